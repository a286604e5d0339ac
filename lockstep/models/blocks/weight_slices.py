"""Which rows of the decoder's tensors, in which weights are fused, correspond to a Hugging Face folder's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..config import ModelConfig, MoEConfig


class BlockRead(NamedTuple):
    """Rows of a block that are read together.

    Attributes:
        columns: the columns to read of a block that the folder stores as [inputs, outputs]; None: the whole block.
        rows: the block's rows that these become, in the order of `RowLayout.from_hf`.
    """

    columns: range | None
    rows: Sequence[range]


@dataclass(frozen=True)
class RowLayout(ABC):
    """A layout of rows in a folder that differs from the decoder's. The conversions round nothing and are inverse to
    each other. Rows from any multiple of `block` on, `block` of them, have the same place in both tensors."""

    block: int

    def plan_reads(self, wanted: Sequence[range]) -> list[BlockRead]:
        """What to read of a block to get the `wanted` rows."""
        return [BlockRead(None, [range(self.block)])]

    @abstractmethod
    def from_hf(self, tensor: Tensor) -> Tensor:
        """The decoder's rows from a folder's tensor."""

    @abstractmethod
    def to_hf(self, rows: Tensor) -> Tensor:
        """The folder's tensor from the decoder's rows."""


@dataclass(frozen=True)
class ReorderedRows(RowLayout):
    """A folder stores the `block` rows of each head in another order; `order[i]` is the folder's row that is the
    decoder's row `i`."""

    order: tuple[int, ...]

    def from_hf(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, self.block))[:, self.order].flatten(0, 1)

    def to_hf(self, rows: Tensor) -> Tensor:
        inverse = sorted(range(self.block), key=self.order.__getitem__)
        return rows.unflatten(0, (-1, self.block))[:, inverse].flatten(0, 1)


def interleaved_rotary(block: int, rotated: int) -> ReorderedRows:
    """For a folder that stores the two rows of each rotated pair side by side, in the last `rotated` rows of a head.
    The decoder stores the first rows of all pairs, then the second ones."""
    begin = block - rotated
    return ReorderedRows(block, (*range(begin), *range(begin, block, 2), *range(begin + 1, block, 2)))


def partial_rotary(block: int, rotated: int) -> ReorderedRows:
    """For a folder whose heads begin with the `rotated` rows, whose first half rotates with the second. The decoder
    rotates all pairs of rows half a head apart, some by an angle of 0, so each half of its heads has half of the
    rotated rows and then half of the others."""
    turned, kept = rotated // 2, rotated + (block - rotated) // 2
    return ReorderedRows(block, (*range(turned), *range(rotated, kept), *range(turned, rotated), *range(kept, block)))


class LayerSlice(NamedTuple):
    """Tensor `name` of a layer in a folder is rows `start : start + rows` of the layer's `parameter`."""

    name: str
    parameter: str
    start: int
    rows: int
    layout: RowLayout | None = None


Slices = Iterable[LayerSlice]


class WeightSlice(LayerSlice):
    """Tensor `name` of a Hugging Face folder is rows `start : start + rows` of the decoder's `parameter`, whose leading
    dims are flattened to rows if it has more than two; converted by `layout`, if there is one."""

    __slots__ = ()

    def rows_of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows, as a view."""
        tensor = tensors[self.parameter]
        rows = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        return rows[self.start : self.start + self.rows]

    def first_element(self, rows: Tensor) -> int:
        """The flat index, in the parameter, of the first element of `rows`, which come from `rows_of`."""
        return self.start * (rows.shape[-1] if rows.dim() > 1 else 1)

    def to_hf(self, rows: Tensor) -> Tensor:
        """The folder's tensor from these rows."""
        return rows if self.layout is None else self.layout.to_hf(rows)


def slices_of_layer(
    config: ModelConfig, index: int, attention: Slices | None = None, feed_forward: Slices | None = None
) -> Iterator[LayerSlice]:
    """The slices of a `blocks.layer.Layer`, with the names that most families use, or with another `attention` or
    `feed_forward` between its norms."""
    yield LayerSlice("input_layernorm.weight", "attention_norm", 0, config.hidden_size)
    yield from attention or attention_slices(config)
    yield LayerSlice("post_attention_layernorm.weight", "mlp_norm", 0, config.hidden_size)
    yield from feed_forward or feed_forward_slices(config, index)


def slices_with_qk_norm(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    return slices_of_layer(config, index, attention_slices(config, qk_norm_slices(config)))


def qk_norm_slices(config: ModelConfig) -> Iterator[LayerSlice]:
    layout = _rotary_layout(config)
    yield LayerSlice("self_attn.q_norm.weight", "q_norm", 0, config.head_dim, layout)
    yield LayerSlice("self_attn.k_norm.weight", "k_norm", 0, config.head_dim, layout)


def _rotary_layout(config: ModelConfig) -> ReorderedRows | None:
    head, rotated = config.head_dim, config.rotary_dim
    return partial_rotary(head, rotated) if 0 < rotated < head else None


def fused_rotary_layout(config: ModelConfig) -> ReorderedRows | None:
    """For a folder with the rows of all queries, keys and values in one tensor, of which every rank reads the whole."""
    if (layout := _rotary_layout(config)) is None:
        return None
    head, turned, kept = config.head_dim, config.num_heads + config.num_kv_heads, config.num_kv_heads
    order = [begin + row for begin in range(0, turned * head, head) for row in layout.order]
    rows = (turned + kept) * head
    return ReorderedRows(rows, (*order, *range(turned * head, rows)))


def attention_slices(config: ModelConfig, norms: Slices = ()) -> Iterator[LayerSlice]:
    q, kv, layout = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, _rotary_layout(config)
    for kind, parameter in (("weight", "qkv"), ("bias", "qkv_bias")):
        if kind == "weight" or "qkv" in config.biases:
            yield LayerSlice(f"self_attn.q_proj.{kind}", parameter, 0, q, layout)
            yield LayerSlice(f"self_attn.k_proj.{kind}", parameter, q, kv, layout)
            yield LayerSlice(f"self_attn.v_proj.{kind}", parameter, q + kv, kv)
    yield from norms
    yield LayerSlice("self_attn.o_proj.weight", "o", 0, config.hidden_size)
    if "o" in config.biases:
        yield LayerSlice("self_attn.o_proj.bias", "o_bias", 0, config.hidden_size)


def feed_forward_slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    """The slices of a layer's feed-forward, or of its experts, each of which has tensors of its own."""
    if config.moe is not None and config.is_moe(index):
        yield from _expert_slices(config.moe, config.hidden_size)
    else:
        yield from _gated_slices("mlp", "", config.intermediate_size, config.hidden_size)


def _gated_slices(theirs: str, ours: str, width: int, hidden: int, index: int = 0) -> Iterator[LayerSlice]:
    """The slices of a feed-forward, or of expert `index` among those in one parameter."""
    yield LayerSlice(f"{theirs}.gate_proj.weight", f"{ours}gate_up", 2 * index * width, width)
    yield LayerSlice(f"{theirs}.up_proj.weight", f"{ours}gate_up", (2 * index + 1) * width, width)
    yield LayerSlice(f"{theirs}.down_proj.weight", f"{ours}down", index * hidden, hidden)


def _expert_slices(moe: MoEConfig, hidden: int) -> Iterator[LayerSlice]:
    yield LayerSlice("mlp.gate.weight", "moe.router", 0, moe.num_experts)
    for e in range(moe.num_experts):
        yield from _gated_slices(f"mlp.experts.{e}", "moe.experts.", moe.intermediate_size, hidden, e)
    if moe.shared_experts:
        width = moe.shared_experts * moe.intermediate_size
        yield from _gated_slices("mlp.shared_experts", "moe.shared.", width, hidden)
    if moe.router_bias:
        yield LayerSlice("mlp.gate.e_score_correction_bias", "moe.router_bias", 0, moe.num_experts)
