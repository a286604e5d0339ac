"""The decoder: packed tokens in, hidden states out, in both roles.

Shape suffixes: T tokens, D hidden, H head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache.fingerprint import digest
from ..distributed.mesh import ONE_RANK, Mesh
from ..distributed.placement import ROWS, WHOLE
from .blocks.attention import Attend, Masks
from .blocks.attributes import Attributes
from .blocks.moe import Routing
from .blocks.rope import partial_frequencies, scale_rope_table
from .blocks.weights import WeightFactory
from .config import ModelConfig
from .families import family_of


class Decoder(nn.Module):
    """A transformer with rotary positions, with the layers of its family.

    There is no batch dimension and no hidden context: sequences exist only in `attend`. Parameters are created
    uninitialized, in the compute dtype. `masks`, if set, are the FlexAttention masks that `attend` must apply.

    Args:
        mesh: this rank holds its part of each parameter (`Placement.take_part`), and activations are all-gathered.
        memory: whether to allocate the parameters; those without memory are substituted before the model computes.

    Attributes:
        spread: the tensor-parallel ranks.
        placements: how each parameter is sharded over a mesh, by name.
        init_constants: by name, the constants that a random model fills parameters with; the others are random.
        value_head: [1, hidden], of a critic that shares the decoder in training; None: there is no critic.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mesh: Mesh = ONE_RANK,
        memory: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.masks: Masks | None = None

        family = family_of(config)
        family.check(config)
        weight = WeightFactory(dtype, device, mesh, memory)
        self.spread = weight.spread
        self.heads = tuple(map(self.spread.local_count, (config.num_heads, config.num_kv_heads)))

        table = config.vocab_size, config.hidden_size
        self.embed = weight(*table)
        self.layers = nn.ModuleList(family.layer(config, i, weight) for i in range(config.num_layers))
        self.norm, self.norm_offset = weight(config.hidden_size, fill=1.0 - family.norm_offset), family.norm_offset
        self.lm_head = self.embed if config.tie_word_embeddings else weight(*table, on=ROWS)
        self.register_parameter("value_head", None)
        self.placements = {name: weight.placements[parameter] for name, parameter in self.named_parameters()}
        constants = weight.init_constants
        self.init_constants = {name: constants[p] for name, p in self.named_parameters() if p in constants}
        scaling = config.rope_scaling
        head = config.head_dim, config.rotary_dim or config.head_dim
        self.inv_freq = partial_frequencies(*head, config.rope_theta, scaling).to(device)
        local = config.local_rope_theta
        self.local_inv_freq = None if local is None else partial_frequencies(*head, local, None).to(device)
        # a frequency of 0 rotates nothing, exactly: its cosines are 1 and its sines 0
        self.zero_inv_freq = torch.zeros_like(self.inv_freq) if config.unrotated_layers else None
        self.call_layer: Callable[..., Tensor] = nn.Module.__call__  # (layer, index, x, rope, attend, routes)
        factor = family.embedding_scale(config)
        self.embed_factor = torch.tensor(factor, dtype=dtype, device="cpu").item()  # rounded, as in transformers
        self.rope_factor = 1.0 if scaling is None else scaling.table_factor

    def trace_constants(self) -> dict[str, Any]:
        """What traces hold as constants besides the model's tensors, by name: numbers, how tensors are gathered from
        other ranks, and the classes whose code was traced."""
        axis = self.spread.axis
        blocks = Attributes(module for module in self.layers.modules() if module is not self.spread)
        classes = [type(self), type(self.spread), *blocks.classes]
        hooks = self._forward_hooks, self._forward_pre_hooks, self._backward_hooks, self._backward_pre_hooks
        given = any(hooks) or "forward" in vars(self) or self.call_layer is not nn.Module.__call__
        if given:
            classes.append(object)  # a function has no key
        return {
            "model": self.config,
            "masks": self.masks,
            "factors": (self.norm_offset, self.embed_factor, self.rope_factor),
            "spread": (axis.name, axis.size, axis.pushes),
            "blocks": classes,
            "held": digest(*blocks.values),
        }

    def add_value_head(self) -> None:
        """Give the model a value head, initialized to zeros."""
        self.value_head = nn.Parameter(self.norm.new_zeros(1, self.config.hidden_size))
        self.placements["value_head"] = WHOLE

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [T, D]. Tokens and absolute positions are int64; each mixture-of-experts
        layer appends its router's choices to `routes`."""
        rope_TH = ops.rope_table(positions_T, self.inv_freq)
        if self.rope_factor != 1.0:
            rope_TH = scale_rope_table(rope_TH, self.rope_factor, self.config.rotary_dim)
        local_TH = rope_TH if self.local_inv_freq is None else ops.rope_table(positions_T, self.local_inv_freq)
        tables = [local_TH if window else rope_TH for window in self.config.windows]
        if self.zero_inv_freq is not None:
            zero_TH = ops.rope_table(positions_T, self.zero_inv_freq)
            tables = [zero_TH if i in self.config.unrotated_layers else table for i, table in enumerate(tables)]
        if self.masks is not None:
            attend.prepare(ops.FlexSizes(tokens_T.shape[0], *self.heads))
        x_TD = ops.gather_rows(self.embed, tokens_T)
        if self.embed_factor != 1.0:
            x_TD = x_TD * self.embed_factor
        for index, layer in enumerate(self.layers):
            found: list[Routing] | None = None if routes is None else []  # one per layer, so that all calls are alike
            x_TD = self.call_layer(layer, index, x_TD, tables[index], attend, found)
            if routes is not None and found:
                routes += found
        return ops.rms_norm(x_TD, self.norm, self.config.rms_norm_eps, self.norm_offset)


@functools.cache
def num_parameters(config: ModelConfig, mesh: Mesh = ONE_RANK) -> int:
    """The number of parameters of a model, or of this rank's part of it on a mesh; tied ones count once."""
    return sum(parameter.numel() for parameter in Decoder(config, torch.float32, "meta", mesh).parameters())
