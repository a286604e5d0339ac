"""Where the parts of a parameter that ranks share by its `Placement` lie in the whole of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .collectives import gather
from .mesh import Axis, Mesh
from .placement import Placement


def runs(on: Placement, mesh: Mesh, shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The contiguous pieces of a rank's part, in order: where each begins in the part and in a whole parameter of this
    shape, both flat, and its elements."""
    cut = [dim for dim, axis in ((on.ep, mesh.ep), (on.tp, mesh.tp)) if dim is not None and axis.size > 1]
    dims = max(cut) + 1 if cut else 0
    row = prod(shape[dims:])
    rows = on.cut(torch.arange(prod(shape[:dims])).view(shape[:dims]), mesh).flatten()
    breaks = (rows.diff() != 1).nonzero().flatten().add(1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        yield begin * row, int(rows[begin]) * row, (end - begin) * row


def whole_shape(on: Placement, mesh: Mesh, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a parameter, from that of a rank's part."""
    ranks = {dim: axis.size for dim, axis in ((on.ep, mesh.ep), (on.tp, mesh.tp)) if axis.size > 1}
    return tuple(size * ranks.get(dim, 1) for dim, size in enumerate(shape))


def whole(on: Placement, part: Tensor, tp: Axis) -> Tensor:
    """A whole parameter, from this rank's part of it; where the axis does not cut it, the part."""
    return part if on.tp is None or tp.size == 1 else joined(on, gather(part, tp).unbind())


def joined(on: Placement, parts: Sequence[Tensor]) -> Tensor:
    """A whole parameter, from the parts of all ranks along `tp`, by rank."""
    assert on.tp is not None
    width, ranks = parts[0].shape[on.tp], len(parts)
    sizes = [block // ranks for block in on.blocks or (width * ranks,)]
    fused = zip(*(part.split(sizes * (width // sum(sizes)), on.tp) for part in parts), strict=True)
    return torch.cat([piece for of_all in fused for piece in of_all], on.tp)
