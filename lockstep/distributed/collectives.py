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


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, [ranks, *x.shape], in rank order: an all-gather."""
    return _gather_flat(x.reshape(1, *x.shape), axis)


def unshard(shard: Tensor, shape: Sequence[int], axis: Axis) -> Tensor:
    """The whole tensor of this shape, all-gathered from flat shards of equal size, the last of them padded."""
    whole = _gather_flat(shard, axis)
    size = prod(shape)
    return (whole if size == whole.numel() else whole[:size]).view(shape)


def all_to_all(x: Tensor, size: int, axis: Axis) -> Tensor:
    """This rank's part of every rank's `x`, [ranks, size], by sending rank: an all-to-all. `x` is flattened and padded
    to `ranks` parts of `size` elements.

    Summing the rows in order makes it a reduce-scatter with a fixed order of addition: the sum is that of one process
    which adds the same tensors one after another. It moves as many bytes as a reduce-scatter, in the tensor's own
    dtype, and the caller may accumulate in a wider one.
    """
    flat = _flatten_and_pad(x, size * axis.size)
    if axis.size > 1:
        flat = torch_private.wait(torch_private.all_to_all(flat, axis.size, axis.group))
    return flat.view(axis.size, size)


def all_to_all_in_cell(x: Tensor, size: int, mesh: Mesh) -> Tensor:
    """The first of two all-to-alls, among the ranks of a cell. With `x` cut into parts as `all_to_all` cuts it along
    `fsdp`, this rank receives the parts of the ranks at its own place in each cell: [ranks of a cell, cells * size],
    by sending rank. The caller sums the rows and exchanges the sum along `cells`, so that a cell sends out one row
    instead of one for each of its ranks.
    """
    cell, cells = mesh.cells
    parts = _flatten_and_pad(x, size * mesh.fsdp.size).view(cells.size, cell.size, size).transpose(0, 1)
    return all_to_all(parts, cells.size * size, cell)


def all_gather_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each tensor of this rank's columns, [T, W], all ranks' columns in rank order, [T, ranks * W].

    Nothing is computed. In the backward pass each rank has the gradient from its own use of the gathered tensor; their
    sum over the ranks is the gradient of the columns (`reduce_scatter_columns`).
    """
    if not axis.pushes:
        return _AllGatherColumns.apply(axis, *pieces)
    whole_TV = push_columns(_concatenate(pieces), axis.size, axis.group, False)
    if len(pieces) == 1:
        return [whole_TV]
    all_TRW = whole_TV.unflatten(1, (axis.size, -1))
    return [own_TRW.flatten(1) for own_TRW in all_TRW.split([piece.shape[1] for piece in pieces], dim=2)]


def local_columns(x: Tensor, index: Tensor, axis: Axis) -> Tensor:
    """This rank's columns, [T, W], of a replicated tensor, by the rank's place on the axis, int64 [1]."""
    return x.unflatten(1, (axis.size, -1)).index_select(1, index).squeeze(1)


def reduce_scatter_columns(pieces: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """For each tensor, [T, ranks * W], this rank's columns, [T, W], of its sum over the ranks: accumulated in float32
    in rank order and rounded once. One collective for all tensors."""
    chunks = [x.chunk(axis.size, dim=1) for x in pieces]
    by_rank = torch.stack([_concatenate([chunk[rank] for chunk in chunks]) for rank in range(axis.size)])
    total = _reduce_scatter(by_rank, by_rank.numel() // axis.size, axis).view(by_rank.shape[1:])
    return [own.contiguous() for own in total.split([x.shape[1] // axis.size for x in pieces], dim=1)]


def reduce_scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """This rank's share of the rows of the sum of all ranks' `x`, whose rows divide evenly; summed as columns are."""
    return _reduce_scatter(x, x.numel() // axis.size, axis).view(-1, *x.shape[1:])


def all_reduce_sum(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' `x`, whole on every rank; `x` on an axis of one. Each element is summed by one rank and
    then gathered, so all ranks have the same bits."""
    if axis.size == 1:
        return x
    return unshard(_reduce_scatter(x, -(-x.numel() // axis.size), axis), x.shape, axis)


def all_reduce_max(x: Tensor, axis: Axis) -> Tensor:
    """The elementwise maximum of all ranks' `x`; `x` on an axis of one."""
    return x if axis.size == 1 else all_gather(x, axis).amax(0)


def _reduce_scatter(x: Tensor, size: int, axis: Axis) -> Tensor:
    first, *rest = all_to_all(x, size, axis).unbind()
    total = first.float()
    for part in rest:
        total = total + part
    return total.to(x.dtype)


def columns_to_rows(x: Tensor, axis: Axis) -> Tensor:
    """All columns of this rank's share of the rows, [ceil(R / ranks), V], given its own columns of all rows, [R, W].
    The last shares are padded with copies of the last row."""
    rows = -(-x.shape[0] // axis.size)
    row_R = torch.arange(rows * axis.size, device=x.device).clamp_max(x.shape[0] - 1)
    padded = x.index_select(0, row_R)
    if axis.pushes:
        return push_columns(padded, axis.size, axis.group, True)
    return _side_by_side(all_to_all(padded, rows * x.shape[1], axis).view(axis.size, rows, x.shape[1]))


def all_gather_rows(x: Tensor, rows: int, axis: Axis) -> Tensor:
    """The first `rows` of all ranks' rows, in rank order."""
    if axis.pushes:
        return push_columns(x.reshape(1, -1), axis.size, axis.group, False).view(-1, *x.shape[1:])[:rows]
    return all_gather(x, axis).flatten(0, 1)[:rows]


def _concatenate(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)


def _flatten_and_pad(x: Tensor, size: int) -> Tensor:
    """Flattened, and padded with zeros to `size`."""
    flat = x.reshape(-1)
    return functional.pad(flat, (0, size - flat.numel())) if flat.numel() < size else flat


def _side_by_side(parts: Tensor) -> Tensor:
    """[ranks, T, W] as [T, ranks * W]."""
    return torch.cat(parts.unbind(), dim=1)


class _AllGatherColumns(torch.autograd.Function):
    """`all_gather_columns`."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *pieces: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        all_ranks = all_gather(_concatenate(pieces), axis)
        if len(pieces) == 1:
            return (_side_by_side(all_ranks),)
        widths = [piece.shape[1] for piece in pieces]
        ends = accumulate(widths)
        return tuple(_side_by_side(all_ranks[:, :, end - width : end]) for end, width in zip(ends, widths, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *reduce_scatter_columns(grads, ctx.axis)


def _gather_flat(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, concatenated along dimension 0."""
    if axis.size == 1:
        return x
    return torch_private.wait(torch_private.all_gather(x, axis.size, axis.group))
