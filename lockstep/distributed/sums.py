"""Sums over the ranks of an axis: in float32, rank by rank, rounded once. So they have the same bits in every run."""

from __future__ import annotations

from torch import Tensor

from .collectives import exchange, unshard
from .mesh import Axis


def rows_of_sum(x: Tensor, axis: Axis) -> Tensor:
    """The rank's share of the rows of the sum of all ranks' `x`, whose rows they share evenly."""
    return _part(x, x.numel() // axis.size, axis).view(-1, *x.shape[1:])


def sum_of_all(x: Tensor, axis: Axis) -> Tensor:
    """The sum of all ranks' `x`, whole on every rank. Each adds up a part, so that its bits are one rank's."""
    return unshard(_part(x, -(-x.numel() // axis.size), axis), x.shape, axis)


def _part(x: Tensor, size: int, axis: Axis) -> Tensor:
    first, *rest = exchange(x, size, axis).unbind()
    total = first.float()
    for part in rest:
        total = total + part
    return total.to(x.dtype)
