"""Which rows of the decoder's tensors, whose weights are fused, the tensors of a Hugging Face folder are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import ModelConfig, MoEConfig


class Window(NamedTuple):
    """Rows of a block that are read at one time.

    Attributes:
        columns: of a block that a folder has by inputs, those that the rows are; None where it is read whole.
        rows: of the block, in the order of `Form.from_hf`.
    """

    columns: range | None
    rows: Sequence[range]


@dataclass(frozen=True)
class Form(ABC):
    """How a folder has rows in another way than the decoder. Nothing is rounded, and the two are inverse. So many rows
    as `block` says, from any multiple of it on, have their elements where the folder's tensor has them."""

    block: int

    def windows(self, wanted: Sequence[range]) -> list[Window]:
        """What is read of a block, of which these rows are wanted."""
        return [Window(None, [range(self.block)])]

    @abstractmethod
    def from_hf(self, tensor: Tensor) -> Tensor:
        """The decoder's rows of a folder's tensor."""

    @abstractmethod
    def to_hf(self, rows: Tensor) -> Tensor:
        """The folder's tensor of the decoder's rows."""


@dataclass(frozen=True)
class Interleaved(Form):
    """A folder has the pairs of rows that rotate together side by side; the decoder has their first elements first,
    then their second ones. Heads are of `block` rows, and their last `rotated` ones rotate."""

    rotated: int

    def from_hf(self, tensor: Tensor) -> Tensor:
        return self._reordered(tensor, -1, 2)

    def to_hf(self, rows: Tensor) -> Tensor:
        return self._reordered(rows, 2, -1)

    def _reordered(self, rows: Tensor, *shape: int) -> Tensor:
        """With the two dims that each head's rotated rows have in this shape exchanged."""
        plain, pairs = rows.unflatten(0, (-1, self.block)).split((self.block - self.rotated, self.rotated), dim=1)
        return torch.cat((plain, pairs.unflatten(1, shape).transpose(1, 2).flatten(1, 2)), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class PartlyRotated(Form):
    """A folder's heads, of `block` rows, begin with the `rotated` elements, of which one of the first half rotates with
    one of the second. The decoder rotates all pairs of elements half a head apart, these and those that stay where they
    are: its heads have half of either in each half."""

    rotated: int

    def from_hf(self, tensor: Tensor) -> Tensor:
        return self._in_order(tensor, lambda turned, kept: (turned, turned, kept, kept))

    def to_hf(self, rows: Tensor) -> Tensor:
        return self._in_order(rows, lambda turned, kept: (turned, kept, turned, kept))

    def _in_order(self, rows: Tensor, sizes: Callable[[int, int], tuple[int, ...]]) -> Tensor:
        """With the second and third of four parts of each head exchanged."""
        parts = sizes(self.rotated // 2, (self.block - self.rotated) // 2)
        first, second, third, fourth = rows.unflatten(0, (-1, self.block)).split(parts, dim=1)
        return torch.cat((first, third, second, fourth), dim=1).flatten(0, 1)


class LayerSlice(NamedTuple):
    """Tensor `name` of a layer in a folder is rows `start : start + rows` of the layer's `parameter`."""

    name: str
    parameter: str
    start: int
    rows: int
    form: Form | None = None


Slices = Iterable[LayerSlice]


class WeightSlice(LayerSlice):
    """Tensor `name` of a Hugging Face folder is rows `start : start + rows` of the decoder's `parameter`, whose leading
    dims count as rows when it has more than two; in another `form` where there is one."""

    __slots__ = ()

    def of(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The rows, as a view."""
        tensor = tensors[self.parameter]
        rows = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        return rows[self.start : self.start + self.rows]

    def first(self, rows: Tensor) -> int:
        """Where the first of these rows, which are `of` a tensor, begins in it, flat."""
        return self.start * (rows.shape[-1] if rows.dim() > 1 else 1)

    def to_hf(self, rows: Tensor) -> Tensor:
        """The folder's tensor of these rows."""
        return rows if self.form is None else self.form.to_hf(rows)


def slices_of_layer(
    config: ModelConfig, index: int, attention: Slices | None = None, feed_forward: Slices | None = None
) -> Iterator[LayerSlice]:
    """Of a `blocks.layer.Layer`, with the names that most families use; or of another attention or feed-forward behind
    its norms."""
    yield LayerSlice("input_layernorm.weight", "attention_norm", 0, config.hidden_size)
    yield from attention or attention_slices(config)
    yield LayerSlice("post_attention_layernorm.weight", "mlp_norm", 0, config.hidden_size)
    yield from feed_forward or feed_forward_slices(config, index)


def slices_with_qk_norm(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    return slices_of_layer(config, index, attention_slices(config, qk_norm_slices(config)))


def qk_norm_slices(config: ModelConfig) -> Iterator[LayerSlice]:
    form = _head_form(config)
    yield LayerSlice("self_attn.q_norm.weight", "q_norm", 0, config.head_dim, form)
    yield LayerSlice("self_attn.k_norm.weight", "k_norm", 0, config.head_dim, form)


def _head_form(config: ModelConfig) -> Form | None:
    head, rotated = config.head_dim, config.rotary_dim
    return PartlyRotated(head, rotated) if 0 < rotated < head else None


def attention_slices(config: ModelConfig, norms: Slices = ()) -> Iterator[LayerSlice]:
    q, kv, form = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, _head_form(config)
    for kind, parameter in (("weight", "qkv"), ("bias", "qkv_bias")):
        if kind == "weight" or "qkv" in config.biases:
            yield LayerSlice(f"self_attn.q_proj.{kind}", parameter, 0, q, form)
            yield LayerSlice(f"self_attn.k_proj.{kind}", parameter, q, kv, form)
            yield LayerSlice(f"self_attn.v_proj.{kind}", parameter, q + kv, kv)
    yield from norms
    yield LayerSlice("self_attn.o_proj.weight", "o", 0, config.hidden_size)
    if "o" in config.biases:
        yield LayerSlice("self_attn.o_proj.bias", "o_bias", 0, config.hidden_size)


def feed_forward_slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    """Of a layer's feed-forward, or of its experts in a tensor each."""
    if config.moe is not None and config.is_moe(index):
        yield from _expert_slices(config.moe, config.hidden_size)
    else:
        yield from _gated_slices("mlp", "", config.intermediate_size, config.hidden_size)


def _gated_slices(theirs: str, ours: str, width: int, hidden: int, index: int = 0) -> Iterator[LayerSlice]:
    """Of a feed-forward, or of expert `index` among those in one parameter."""
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
