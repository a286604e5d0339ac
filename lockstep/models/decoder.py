"""The decoder: packed tokens in, hidden states out, in either role.

Shape suffixes: T tokens, D hidden, E fused projection, N query heads, K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from .attention import Attend
from .config import ModelConfig
from .rope import inverse_frequencies


class Decoder(nn.Module):
    """A pre-norm transformer with grouped-query attention, rotary positions and a SiLU-gated feed-forward.

    There is no batch dimension and no hidden context: sequences exist only in `attend`. Parameters are created
    uninitialized; load or initialize them. Their dtype is the compute dtype.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.embed = weight(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, weight) for _ in range(config.num_layers))
        self.norm = weight(config.hidden_size)
        self.lm_head = self.embed if config.tie_word_embeddings else weight(config.vocab_size, config.hidden_size)
        self.inv_freq = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling).to(device)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [T, D]. Tokens and absolute positions are int64."""
        rope_TH = ops.rope_table(positions_T, self.inv_freq)
        x_TD = ops.gather_rows(self.embed, tokens_T)
        for index, layer in enumerate(self.layers):
            x_TD = layer(index, x_TD, rope_TH, attend)
        return ops.rms_norm(x_TD, self.norm, self.config.rms_norm_eps)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, weight: Callable[..., nn.Parameter]) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attention_norm = weight(config.hidden_size)
        self.qkv = weight((heads + 2 * kv_heads) * head_dim, config.hidden_size)
        self.q_norm = weight(head_dim) if config.qk_norm else None
        self.k_norm = weight(head_dim) if config.qk_norm else None
        self.o = weight(config.hidden_size, heads * head_dim)
        self.mlp_norm = weight(config.hidden_size)
        self.gate_up = weight(2 * config.intermediate_size, config.hidden_size)
        self.down = weight(config.hidden_size, config.intermediate_size)

    def forward(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        eps = self.config.rms_norm_eps
        x_TD = x_TD + self._attention(index, ops.rms_norm(x_TD, self.attention_norm, eps), rope_TH, attend)
        gate_up_TE = ops.linear(ops.rms_norm(x_TD, self.mlp_norm, eps), self.gate_up)
        return x_TD + ops.linear(ops.silu_mul(gate_up_TE), self.down)

    def _attention(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        c = self.config
        qkv_TE = ops.linear(x_TD, self.qkv)
        qk = ops.qk_norm_rope(qkv_TE, self.q_norm, self.k_norm, rope_TH, c.num_heads, c.num_kv_heads, c.rms_norm_eps)
        q_TNH, k_TKH = qk[:, : c.num_heads], qk[:, c.num_heads :]
        v_TKH = qkv_TE[:, (c.num_heads + c.num_kv_heads) * c.head_dim :].unflatten(1, (c.num_kv_heads, c.head_dim))
        return ops.linear(attend(index, q_TNH, k_TKH, v_TKH).flatten(1), self.o)
