"""Where the parts of a parameter that is sharded by its `Placement` lie in the whole parameter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from .collectives import all_gather
from .mesh import Axis, Mesh
from .placement import Placement


def contiguous_runs(on: Placement, mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The contiguous pieces of this rank's part, in order: the offset of each in the part and in the whole parameter
    of this shape, both flat, and its number of elements."""
    cut = [dim for dim, axis in ((on.ep, mesh.ep), (on.tp, mesh.tp)) if dim is not None and axis.size > 1]
    if not cut:
        yield 0, 0, prod(shape)
        return
    dims = max(cut) + 1
    row = prod(shape[dims:])
    rows = on.take_part(torch.arange(prod(shape[:dims])).view(shape[:dims]), mesh).flatten()
    breaks = (rows.diff() != 1).nonzero().flatten().add(1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        yield begin * row, int(rows[begin]) * row, (end - begin) * row


def whole_shape(on: Placement, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a whole parameter, from the shape of a rank's part."""
    ranks = {dim: axis.size for dim, axis in ((on.ep, mesh.ep), (on.tp, mesh.tp)) if axis.size > 1}
    return tuple(size * ranks.get(dim, 1) for dim, size in enumerate(shape))


def gather_whole(on: Placement, part: Tensor, tp: Axis) -> Tensor:
    """A whole parameter, all-gathered along `tp` from the ranks' parts; `part` itself if `tp` does not shard it."""
    if on.tp is None or tp.size == 1:
        return part
    return join_parts(on, all_gather(part, tp).unbind())


def join_parts(on: Placement, parts: Sequence[Tensor]) -> Tensor:
    """A whole parameter, from the parts of all ranks along `tp`, in rank order."""
    assert on.tp is not None
    width, ranks = parts[0].shape[on.tp], len(parts)
    sizes = [block // ranks for block in on.blocks or (width * ranks,)]
    blocks_of_parts = [part.split(sizes * (width // sum(sizes)), on.tp) for part in parts]
    by_block = zip(*blocks_of_parts, strict=True)
    return torch.cat([piece for pieces in by_block for piece in pieces], on.tp)


def take_part_at(on: Placement, whole: Tensor, axis: Axis, place: Tensor) -> Tensor:
    """A rank's part of a whole parameter, by the rank's place on the axis, int64 [1], for graphs that hold no rank."""
    if on.tp is None:
        return whole
    width = whole.shape[on.tp]
    blocks = list(on.blocks * (width // sum(on.blocks))) if on.blocks else width
    parts = [block.unflatten(on.tp, (axis.size, -1)) for block in whole.split(blocks, on.tp)]
    return torch.cat([part.index_select(on.tp, place).squeeze(on.tp) for part in parts], on.tp)


@dataclass(frozen=True)
class Shares:
    """Which rank has which elements of a parameter. Each rank along `tp` has a part, which is flattened, padded, and
    cut along `fsdp` into shares of equal size. Rank `r` is at `r % tp` along `tp` and at `r // tp` along `fsdp`.

    Attributes:
        shape: of the whole parameter. size: elements in a share.
    """

    on: Placement
    shape: tuple[int, ...]
    tp: int
    size: int

    def pieces_of(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """The pieces that a rank has, in order: the flat offsets in its share and in the whole, and the elements."""
        shard, place = divmod(rank, self.tp)
        first = shard * self.size
        for here, there, count in contiguous_runs(self.on, Mesh(tp=Axis("tp", self.tp, place)), self.shape):
            begin, end = max(here, first), min(here + count, first + self.size)
            if begin < end:
                yield begin - first, begin - here + there, end - begin

    def locate(self, there: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where `count` elements of the whole, from flat offset `there`, are found: for each piece, in order, the rank
        (the first one where it is replicated), its offset in that rank's share, and its number of elements."""
        at = bisect_right(self._places, there, key=lambda piece: piece[0]) - 1
        while count:
            begin, length, place, here = self._places[at]
            shard, inside = divmod(here + there - begin, self.size)
            most = min(count, begin + length - there, self.size - inside)
            yield shard * self.tp + place, inside, most
            there, count = there + most, count - most
            at += there == begin + length

    @cached_property
    def _places(self) -> list[tuple[int, int, int, int]]:
        """The pieces of all ranks along `tp`, sorted by offset in the whole: that offset, the number of elements, the
        rank along `tp`, and the offset in its part."""
        found = []
        for place in range(self.tp if self.on.tp is not None else 1):
            mesh = Mesh(tp=Axis("tp", self.tp, place))
            found += [(there, count, place, here) for here, there, count in contiguous_runs(self.on, mesh, self.shape)]
        return sorted(found)
