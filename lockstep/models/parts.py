"""What a rank has of a model: ranges of its tensors, and where these come from."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..distributed.collectives import gather
from ..distributed.mesh import ALONE, Axis, Mesh
from ..distributed.pieces import Shares, whole_shape
from ..distributed.placement import ROWS, WHOLE
from .config import ModelConfig
from .decoder import Decoder

LEAST = 1 << 20  # elements of a range from which on those that all want alike read a share of it each


class Held(NamedTuple):
    """What one process has of a tensor: flat elements, of which the first is element `first` of the whole."""

    values: Tensor
    first: int


Ranges = Mapping[str, Sequence[Held]]  # by the decoder's names, in ascending order


def ranges_of(model: Decoder) -> dict[str, list[Held]]:
    """What this rank has of a model, of which it may have a part."""
    axis, found = model.spread.axis, dict[str, list[Held]]()
    for name, tensor in tensors_of(model).items():
        on, flat = model.placements.get(name, WHOLE), tensor.view(-1)
        shares = Shares(on, whole_shape(on, Mesh(tp=axis), tensor.shape), axis.size, tensor.numel())
        found[name] = [Held(flat[at : at + count], first) for at, first, count in shares.held(axis.rank)]
    return found


def tensors_of(model: Decoder) -> dict[str, Tensor]:
    """What a folder holds: parameters and buffers."""
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


@cache
def without_memory(config: ModelConfig) -> dict[str, Tensor]:
    """All tensors of a whole model, by name; only their shapes say anything."""
    return tensors_of(Decoder(config, torch.bfloat16, "meta"))


def within(held: Sequence[Held], start: int, count: int) -> Iterator[tuple[int, Tensor]]:
    """What is held of so many elements from `start` on: where it begins among them, and its values."""
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
        """Fill ranges of its tensors, of any dtype and on any device; others stay. `InputError`: they are not as they
        should be."""


class ResidentWeights:
    """The `WeightSource` that a model is which this rank has whole."""

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
    mesh: Mesh = ALONE,
    copies: Axis = ALONE.fsdp,
) -> Decoder:
    """What a rank generates with: its part of a model, or the whole. Of ranks that share a model each has rows of the
    head; of a tied one they are those of its table. Of the ranks along `copies`, which have the same part, each reads a
    share of it, and `complete` gives it the others'."""
    model = Decoder(source.config, dtype, device, mesh)
    if model.lm_head is model.embed and mesh.tp.size > 1:
        model.lm_head = nn.Parameter(ROWS.cut(model.embed.detach(), mesh))
        model.placements["lm_head"] = ROWS
    with torch.no_grad():
        wanted = ranges_of(model)
        source.fill({name: [_share(one, copies) for one in held] for name, held in wanted.items()})
    return model


@torch.no_grad()
def complete(model: Decoder, copies: Axis) -> None:
    """Give the ranks along `copies`, each of which calls this, what the others have read (`load_part`)."""
    for one in [one for held in ranges_of(model).values() for one in held]:
        if (own := _share(one, copies)) is not one:
            one.values.view(copies.size, -1).copy_(gather(own.values, copies))


def _share(held: Held, copies: Axis) -> Held:
    """What one of several ranks reads of what all want alike: an even share, or all of what is small or has none."""
    share, rest = divmod(held.values.numel(), copies.size)
    if copies.size == 1 or rest or held.values.numel() < LEAST:
        return held
    return Held(held.values.view(copies.size, -1)[copies.rank], held.first + share * copies.rank)
