"""The collectives along an axis of the mesh, called eagerly or traced.

A captured graph names the axis's group and holds nothing else that is specific to a rank, so all ranks run the same
graph. Each collective is two calls, a start and a wait, which graph passes move apart. Eagerly, one ends before the
next starts. In a graph, collectives of different axes may overlap: each axis's run in graph order on the stream of its
communicator, and `machine.prepare_nccl` says how the axes are ordered among each other.
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
    """Every rank's `x`, [ranks, *x.shape], in rank order: an all-gather."""
    return _all(x.reshape(1, *x.shape), axis)


def unshard(shard: Tensor, shape: Sequence[int], axis: Axis) -> Tensor:
    """The whole tensor of this shape, all-gathered from flat shards of equal size, the last of them padded."""
    whole = _all(shard, axis)
    size = prod(shape)
    return (whole if size == whole.numel() else whole[:size]).view(shape)


def exchange(x: Tensor, size: int, axis: Axis) -> Tensor:
    """This rank's part of every rank's `x`, [ranks, size], by sending rank: an all-to-all. `x` is flattened and padded
    to `ranks` parts of `size` elements.

    Summing the rows in order makes it a reduce-scatter with a fixed order of addition: the sum is that of one process
    which adds the same tensors one after another. It moves as many bytes as a reduce-scatter, in the tensor's own
    dtype, and the caller may accumulate in a wider one.
    """
    flat = _padded(x, size * axis.size)
    if axis.size > 1:
        flat = torch_private.wait(torch_private.all_to_all(flat, axis.size, axis.group))
    return flat.view(axis.size, size)


def exchange_in_cells(x: Tensor, size: int, mesh: Mesh) -> Tensor:
    """The first of two exchanges, among the ranks of a cell. With `x` cut into parts as `exchange` cuts it along
    `fsdp`, this rank receives the parts of the ranks at its own place in each cell: [ranks of a cell, cells * size],
    by sending rank. The caller sums the rows and exchanges the sum along `cells`, so that a cell sends out one row
    instead of one for each of its ranks.
    """
    lanes, cells = mesh.cells
    parts = _padded(x, size * mesh.fsdp.size).view(cells.size, lanes.size, size).transpose(0, 1)
    return exchange(parts, cells.size * size, lanes)


def gather_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each tensor of this rank's columns, [T, W], all ranks' columns in rank order, [T, ranks * W].

    Nothing is computed. In the backward pass each rank has the gradient from its own use of the gathered tensor; their
    sum over the ranks is the gradient of the columns (`sums_of_columns`).
    """
    if not axis.pushes:
        return _Columns.apply(axis, *pieces)
    whole_TV = push_columns(_joined(pieces), axis.size, axis.group, False)
    if len(pieces) == 1:
        return [whole_TV]
    all_TRW = whole_TV.unflatten(1, (axis.size, -1))
    return [own_TRW.flatten(1) for own_TRW in all_TRW.split([piece.shape[1] for piece in pieces], dim=2)]


def own_columns(x: Tensor, index: Tensor, axis: Axis) -> Tensor:
    """This rank's columns, [T, W], of a replicated tensor, by the rank's place on the axis, int64 [1]."""
    return x.unflatten(1, (axis.size, -1)).index_select(1, index).squeeze(1)


def sums_of_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each tensor, [T, ranks * W], this rank's columns, [T, W], of its sum over the ranks: accumulated in float32
    in rank order and rounded once. One collective for all tensors."""
    by_rank = torch.stack([_joined(own) for own in zip(*(x.chunk(axis.size, dim=1) for x in pieces), strict=True)])
    total = _part_of_sum(by_rank, by_rank.numel() // axis.size, axis).view(by_rank.shape[1:])
    return [own.contiguous() for own in total.split([x.shape[1] // axis.size for x in pieces], dim=1)]


def rows_of_sum(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of the rows of the sum of all ranks' `x`, whose rows divide evenly; summed as columns are."""
    return _part_of_sum(x, x.numel() // axis.size, axis).view(-1, *x.shape[1:])


def sum_of_all(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' `x`, whole on every rank; `x` on an axis of one. Each element is summed by one rank and
    then gathered, so all ranks have the same bits."""
    if axis.size == 1:
        return x
    return unshard(_part_of_sum(x, -(-x.numel() // axis.size), axis), x.shape, axis)


def largest(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise maximum of all ranks' `x`; `x` on an axis of one."""
    return x if axis.size == 1 else gather(x, axis).amax(0)


def _part_of_sum(x: Tensor, size: int, axis: Axis) -> Tensor:
    first, *rest = exchange(x, size, axis).unbind()
    total = first.float()
    for part in rest:
        total = total + part
    return total.to(x.dtype)


def rows_to_owners(x: Tensor, axis: Axis) -> Tensor:
    """All columns of this rank's share of the rows, [ceil(R / ranks), V], given its own columns of all rows, [R, W].
    The last shares are padded with copies of the last row."""
    rows = -(-x.shape[0] // axis.size)
    row_R = torch.arange(rows * axis.size, device=x.device).clamp_max(x.shape[0] - 1)
    padded = x.index_select(0, row_R)
    if axis.pushes:
        return push_columns(padded, axis.size, axis.group, True)
    return _side_by_side(exchange(padded, rows * x.shape[1], axis).view(axis.size, rows, x.shape[1]))


def gather_rows(x: Tensor, rows: int, axis: Axis) -> Tensor:
    """The first `rows` of all ranks' rows, in rank order."""
    if axis.pushes:
        return push_columns(x.reshape(1, -1), axis.size, axis.group, False).view(-1, *x.shape[1:])[:rows]
    return gather(x, axis).flatten(0, 1)[:rows]


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)


def _padded(x: Tensor, size: int) -> Tensor:
    """Flattened, and padded with zeros to `size`."""
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
    """Every rank's `x`, concatenated along dimension 0."""
    return x if axis.size == 1 else torch_private.wait(torch_private.all_gather(x, axis.size, axis.group))
