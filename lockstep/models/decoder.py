"""The decoder: packed tokens in, hidden states out, in either role.

Shape suffixes: T tokens, D hidden, E fused projection, F feed-forward, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from ..distributed.placement import ROWS, WHOLE, Placement
from .blocks.attention import Attend, Masks
from .blocks.mla import LatentAttention
from .blocks.moe import MixtureOfExperts, Routing
from .blocks.rope import YarnScaling, inverse_frequencies
from .config import ModelConfig


class Decoder(nn.Module):
    """A pre-norm transformer with grouped-query or latent attention, rotary positions and SiLU-gated feed-forwards.

    There is no batch dimension and no hidden context: sequences exist only in `attend`. Parameters are created
    uninitialized; load or initialize them. Their dtype is the compute dtype. What `masks` say is for whoever makes an
    `attend` for this model.

    Attributes:
        placements: how each parameter lies on a mesh, by name.
        value_head: [1, hidden] of a critic that shares the decoder, in training alone; None without.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        self.masks: Masks | None = None

        placed: dict[nn.Parameter, Placement] = {}

        def weight(*shape: int, on: Placement = WHOLE) -> nn.Parameter:
            parameter = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
            placed[parameter] = on
            return parameter

        table = config.vocab_size, config.hidden_size
        self.embed = weight(*table, on=ROWS)
        self.layers = nn.ModuleList(Layer(config, i, weight) for i in range(config.num_layers))
        self.norm = weight(config.hidden_size)
        self.lm_head = self.embed if config.tie_word_embeddings else weight(*table, on=ROWS)
        self.register_parameter("value_head", None)
        self.placements = {name: placed[parameter] for name, parameter in self.named_parameters()}
        scaling = config.rope_scaling
        self.inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, scaling).to(device)
        self.call_layer: Callable[..., Tensor] = Layer.__call__  # (layer, index, x, rope, attend, routes)
        self.rope_factor = scaling.table_factor if isinstance(scaling, YarnScaling) else 1.0

    def add_value_head(self) -> None:
        """Give the model a value head, of zeros."""
        self.value_head = nn.Parameter(self.norm.new_zeros(1, self.config.hidden_size))
        self.placements["value_head"] = WHOLE

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [T, D]. Tokens and absolute positions are int64.

        Args:
            routes: each mixture of experts appends what its router found.
        """
        rope_TH = ops.rope_table(positions_T, self.inv_freq)
        if self.rope_factor != 1.0:
            rope_TH = rope_TH * self.rope_factor
        attend.prepare(ops.FlexSizes(tokens_T.shape[0], self.config.num_heads, self.config.num_kv_heads))
        x_TD = ops.gather_rows(self.embed, tokens_T)
        for index, layer in enumerate(self.layers):
            found: list[Routing] | None = None if routes is None else []  # its own, so that all calls are alike
            x_TD = self.call_layer(layer, index, x_TD, rope_TH, attend, found)
            if routes is not None and found:
                routes += found
        return ops.rms_norm(x_TD, self.norm, self.config.rms_norm_eps)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, weight: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.config = config
        self.scores = ops.AttentionScores(window=config.windows[index])
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention_norm = weight(config.hidden_size)
        self.mla = None
        if config.mla is not None:
            self.mla, head_dim = LatentAttention(config, weight), config.mla.v_dim
        else:
            blocks = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
            self.qkv = weight(sum(blocks), config.hidden_size, on=Placement(tp=0, blocks=blocks))
            self.q_norm = weight(head_dim) if config.qk_norm else None
            self.k_norm = weight(head_dim) if config.qk_norm else None
        self.o = weight(config.hidden_size, heads * head_dim, on=ROWS)
        self.mlp_norm = weight(config.hidden_size)
        self.moe = None
        if config.moe is not None and config.is_moe(index):
            self.moe = MixtureOfExperts(config.moe, config.hidden_size, weight)
        else:
            width = config.intermediate_size
            self.gate_up = weight(2 * width, config.hidden_size, on=Placement(tp=0, blocks=(width, width)))
            self.down = weight(config.hidden_size, width, on=ROWS)

    def forward(
        self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        c = self.config
        x_TD = ops.linear_add(self._attention(index, x_TD, rope_TH, attend), self.o, x_TD)
        if self.moe is not None:
            return x_TD + self.moe(ops.rms_norm(x_TD, self.mlp_norm, c.rms_norm_eps), routes)
        gated_TF = ops.norm_gate_up(x_TD, self.mlp_norm, self.gate_up, c.rms_norm_eps)
        return ops.linear_add(gated_TF, self.down, x_TD)

    def _attention(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        c = self.config
        if self.mla is not None:
            return self.mla(index, x_TD, self.attention_norm, c.rms_norm_eps, rope_TH, attend)
        by = ops.Rotation(self.q_norm, self.k_norm, rope_TH, c.num_heads, c.num_kv_heads, c.rms_norm_eps)
        qkv_TE = ops.norm_linear(x_TD, self.attention_norm, self.qkv, c.rms_norm_eps)
        return attend(index, qkv_TE, by, self.scores).flatten(1)
