"""A rank's part of a model: the ranges of tensors that it holds, and where their values come from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..distributed.collectives import all_gather
from ..distributed.mesh import ONE_RANK, Axis, Mesh
from ..distributed.parameter_parts import Shares, whole_shape
from ..distributed.placement import ROWS, WHOLE
from .config import ModelConfig
from .decoder import Decoder

MIN_SHARED_ELEMENTS = 1 << 20  # of the smallest range that ranks with the same part divide among them for reading


class TensorRange(NamedTuple):
    """A range of a tensor that a process holds: flat elements, the first of which is element `first` of the whole."""

    values: Tensor
    first: int


Ranges = Mapping[str, Sequence[TensorRange]]  # by the decoder's names; in ascending order


def ranges_of(model: Decoder) -> dict[str, list[TensorRange]]:
    """The ranges of a model's tensors that this rank holds."""
    axis, found = model.spread.axis, dict[str, list[TensorRange]]()
    for name, tensor in tensors_of(model).items():
        on, flat = model.placements.get(name, WHOLE), tensor.view(-1)
        shares = Shares(on, whole_shape(on, Mesh(tp=axis), tensor.shape), axis.size, tensor.numel())
        found[name] = [TensorRange(flat[at : at + count], first) for at, first, count in shares.pieces_of(axis.rank)]
    return found


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """A model's parameters and buffers, which are what a folder stores."""
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


@cache
def meta_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """All tensors of a whole model by name, on the meta device; only their shapes are meaningful."""
    return tensors_of(Decoder(config, torch.bfloat16, "meta"))


def intersect(held: Sequence[TensorRange], start: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """The parts of elements `start : start + count` that are held: the offset of each from `start`, and its values."""
    for i in range(max(0, bisect_right(held, start, key=lambda one: one.first) - 1), len(held)):
        values, first = held[i]
        begin, end = max(first, start), min(first + values.numel(), start + count)
        if first >= start + count:
            break
        if begin < end:
            yield begin - start, values[begin - first : end - first]


class WeightSource(Protocol):
    """Where a model's weights come from."""

    config: ModelConfig

    def fill(self, wanted: Ranges) -> None:
        """Fill these ranges of tensors, which may be of any dtype and on any device. Raises `InputError` if the source
        is invalid."""


class ResidentWeights:
    """A `WeightSource` that reads from a model of which this rank holds the whole."""

    def __init__(self, model: Decoder) -> None:
        self.config, self._model = model.config, model

    @torch.no_grad()
    def fill(self, wanted: Ranges) -> None:
        for name, (held,) in ranges_of(self._model).items():
            for values, first in wanted.get(name, ()):
                values.copy_(held.values[first : first + values.numel()])


def load_part(
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str,
    mesh: Mesh = ONE_RANK,
    copies: Axis = ONE_RANK.fsdp,
) -> Decoder:
    """Load this rank's part of a model, or the whole model, for generation. Tensor-parallel ranks each hold rows of the
    head, also if it is tied to the embedding. Of the ranks along `copies`, which hold the same part, each reads only a
    share of it; `all_gather_shares` then exchanges the shares."""
    model = Decoder(source.config, dtype, device, mesh)
    if model.lm_head is model.embed and mesh.tp.size > 1:
        model.lm_head = nn.Parameter(ROWS.take_part(model.embed.detach(), mesh))
        model.placements["lm_head"] = ROWS
    with torch.no_grad():
        wanted = ranges_of(model)
        source.fill({name: [_share(held, copies) for held in ranges] for name, ranges in wanted.items()})
    return model


@torch.no_grad()
def all_gather_shares(model: Decoder, copies: Axis) -> None:
    """All-gather the shares that each rank along `copies` has read (`load_part`); all of them must call this."""
    for held in [held for ranges in ranges_of(model).values() for held in ranges]:
        share = _share(held, copies)
        if share is not held:
            held.values.view(copies.size, -1).copy_(all_gather(share.values, copies))


def _share(held: TensorRange, copies: Axis) -> TensorRange:
    """This rank's share to read of a range that all along `copies` hold; the whole range if small or not divisible."""
    share, rest = divmod(held.values.numel(), copies.size)
    if copies.size == 1 or rest or held.values.numel() < MIN_SHARED_ELEMENTS:
        return held
    return TensorRange(held.values.view(copies.size, -1)[copies.rank], held.first + share * copies.rank)
