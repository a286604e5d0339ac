"""The collectives along an axis of the mesh, for eager calls and for traces alike.

A captured graph names the axis's group and holds nothing else of a rank: it is the same graph on all of them. Each
collective is two calls, its start and the wait for it, which passes move apart. Eagerly one ends before the next
starts; in a graph those of several axes travel at once, each axis's in the order of the graph on a stream of its
communicator's, and `machine.prepare_nccl` says what orders the axes among one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import torch_private
from .mesh import Axis, Mesh
from .push.operator import push_columns


def gather(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, [ranks, *x.shape], by rank; the same everywhere."""
    return _all(x.reshape(1, *x.shape), axis)


def unshard(shard: Tensor, shape: Sequence[int], axis: Axis) -> Tensor:
    """The whole tensor whose parts, one a rank, are `shard`: flat, of equal size, the last ones padded at the end."""
    whole = _all(shard, axis)
    size = prod(shape)
    return (whole if size == whole.numel() else whole[:size]).view(shape)


def exchange(x: Tensor, size: int, axis: Axis) -> Tensor:
    """Each rank's part `rank` of a tensor that all ranks have values of, [ranks, size], by the rank it comes from;
    `ranks` parts of `size` elements hold the tensor and padding.

    Adding the rows up in their order is a reduce-scatter whose order of addition is fixed: whatever the number of
    ranks, the sum is that of one process which adds the same tensors one after another. It moves as many bytes, in the
    tensor's own dtype, and may add in a wider one.
    """
    flat = _padded(x, size * axis.size)
    if axis.size > 1:
        flat = torch_private.wait(torch_private.all_to_all(flat, axis.size, axis.group))
    return flat.view(axis.size, size)


def exchange_in_cells(x: Tensor, size: int, mesh: Mesh) -> Tensor:
    """What the ranks of this one's cell have of the parts, cut as `exchange` cuts along `fsdp`, of those that have its
    place in each cell: [ranks of a cell, cells * size], by the rank it comes from. The sum of the rows is to be
    exchanged along the cells: one row leaves a cell in place of one of each rank's.
    """
    lanes, cells = mesh.cells
    parts = _padded(x, size * mesh.fsdp.size).view(cells.size, lanes.size, size).transpose(0, 1)
    return exchange(parts, cells.size * size, lanes)


def gather_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each of these tensors, [T, W] with the rank's own columns, all ranks' columns by rank, [T, ranks * W].

    Words are moved, and nothing is computed. The gradient of what was gathered is on each rank that of what the rank
    made of it; those of all ranks add up to the gradient of the columns (`sums_of_columns`).
    """
    if not axis.pushes:
        return _Columns.apply(axis, *pieces)
    whole_TV = push_columns(_joined(pieces), axis.size, axis.group, False)
    if len(pieces) == 1:
        return [whole_TV]
    all_TRW = whole_TV.unflatten(1, (axis.size, -1))
    return [own_TRW.flatten(1) for own_TRW in all_TRW.split([piece.shape[1] for piece in pieces], dim=2)]


def own_columns(x: Tensor, index: Tensor, axis: Axis) -> Tensor:
    """The rank's own columns, [T, W], of a tensor that all ranks have whole, by its place on the axis, int64 [1]."""
    return x.unflatten(1, (axis.size, -1)).index_select(1, index).squeeze(1)


def sums_of_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each of these tensors, [T, ranks * W], the rank's own columns, [T, W], of the sum of all ranks': added in
    float32, rank by rank, and rounded once. In one collective."""
    by_rank = torch.stack([_joined(own) for own in zip(*(x.chunk(axis.size, dim=1) for x in pieces), strict=True)])
    total = _part_of_sum(by_rank, by_rank.numel() // axis.size, axis).view(by_rank.shape[1:])
    return [own.contiguous() for own in total.split([x.shape[1] // axis.size for x in pieces], dim=1)]


def rows_of_sum(x: Tensor, axis: Axis) -> Tensor:
    """The rank's share of the rows of the sum of all ranks' `x`, whose rows they share evenly; added as columns are."""
    return _part_of_sum(x, x.numel() // axis.size, axis).view(-1, *x.shape[1:])


def sum_of_all(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' `x`, whole on every rank; on an axis of one `x`. Each adds up a part, so that its bits are
    one rank's."""
    if axis.size == 1:
        return x
    return unshard(_part_of_sum(x, -(-x.numel() // axis.size), axis), x.shape, axis)


def largest(x: Tensor, axis: Axis) -> Tensor:
    """Of each element the largest that a rank has; on an axis of one `x`."""
    return x if axis.size == 1 else gather(x, axis).amax(0)


def _part_of_sum(x: Tensor, size: int, axis: Axis) -> Tensor:
    first, *rest = exchange(x, size, axis).unbind()
    total = first.float()
    for part in rest:
        total = total + part
    return total.to(x.dtype)


def rows_to_owners(x: Tensor, axis: Axis) -> Tensor:
    """All columns of the rank's share of the rows, [ceil(R / ranks), V], of the rank's own columns of all rows, [R, W];
    the last ranks' shares are filled up with the last row."""
    rows = -(-x.shape[0] // axis.size)
    row_R = torch.arange(rows * axis.size, device=x.device).clamp_max(x.shape[0] - 1)
    padded = x.index_select(0, row_R)
    if axis.pushes:
        return push_columns(padded, axis.size, axis.group, True)
    return _side_by_side(exchange(padded, rows * x.shape[1], axis).view(axis.size, rows, x.shape[1]))


def gather_rows(x: Tensor, rows: int, axis: Axis) -> Tensor:
    """The first `rows` of all ranks' rows, by rank."""
    if axis.pushes:
        return push_columns(x.reshape(1, -1), axis.size, axis.group, False).view(-1, *x.shape[1:])[:rows]
    return gather(x, axis).flatten(0, 1)[:rows]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)


def _padded(x: Tensor, size: int) -> Tensor:
    """Flat, with zeros at its end."""
    flat = x.reshape(-1)
    return functional.pad(flat, (0, size - flat.numel())) if flat.numel() < size else flat


def _side_by_side(parts: Tensor) -> Tensor:
    """[ranks, T, W] as [T, ranks * W]."""
    return torch.cat(parts.unbind(), dim=1)


class _Columns(torch.autograd.Function):
    """`gather_columns`."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        all_ranks = gather(_joined(pieces), axis)
        if len(pieces) == 1:
            return (_side_by_side(all_ranks),)
        widths = [piece.shape[1] for piece in pieces]
        ends = accumulate(widths)
        return tuple(_side_by_side(all_ranks[:, :, end - width : end]) for end, width in zip(ends, widths, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *sums_of_columns(grads, ctx.axis)


def _all(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, along dimension 0; of one rank, its own."""
    return x if axis.size == 1 else torch_private.wait(torch_private.all_gather(x, axis.size, axis.group))
