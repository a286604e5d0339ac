"""What a model's blocks ask of their tensor-parallel ranks. The forward pass has all-gathers and no reductions.

Products are sharded by output columns and attention by heads, and the results are all-gathered; a dimension that is
summed over is never sharded. Each element is therefore the same single sum as on one rank, with the same bits.

Shape suffixes: T tokens, W a rank's columns, R rows, V all columns, C rows with one scalar each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import (
    all_gather,
    all_gather_columns,
    all_gather_rows,
    columns_to_rows,
    local_columns,
    reduce_scatter_rows,
)
from .mesh import Axis


class Spread(nn.Module):
    """The tensor-parallel ranks along an axis. On an axis of one rank the methods return their arguments and add
    nothing to a graph. The module has no parameters.

    Attributes:
        index: this rank's place on the axis, int64 [1], an input to graphs (which hold no rank as a constant); None on
            an axis of one rank.
    """

    def __init__(self, axis: Axis, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.axis = axis
        self.index = torch.tensor([axis.rank], device=device) if axis.size > 1 else None

    @property
    def min_rows(self) -> int:
        """The fewest rows of a graph whose rows are divided among the ranks: two a rank, since a graph traced with one
        row would be specialized to one."""
        return 1 if self.index is None else 2 * self.axis.size

    def local_count(self, count: int) -> int:
        """How many of `count` heads or columns each rank has."""
        return count // self.axis.size

    def gather_columns(self, x_TW: Tensor) -> Tensor:
        """All ranks' columns, in rank order, [T, ranks * W]."""
        return x_TW if self.index is None else all_gather_columns((x_TW,), self.axis)[0]

    def gather_all(self, *pieces: Tensor) -> Sequence[Tensor]:
        """`gather_columns` of several tensors, in one collective."""
        return pieces if self.index is None else all_gather_columns(pieces, self.axis)

    def local_columns(self, x_TV: Tensor) -> Tensor:
        """This rank's columns, [T, W], of a replicated tensor."""
        return x_TV if self.index is None else local_columns(x_TV, self.index, self.axis)

    def add_product(
        self,
        product: Callable[..., Tensor],
        x_TW: Tensor,
        weight: Tensor,
        stream_TV: Tensor,
        bias: Tensor | None,
        own_TW: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`product(x, weight, stream, bias)`, of column-sharded x added to a replicated residual stream. Returns the
        replicated result, [T, V], and this rank's columns of it (None on one rank). `own_TW`: this rank's columns of
        the stream, if already at hand."""
        if self.index is None:
            return product(x_TW, weight, stream_TV, bias), None
        own_TW = self.local_columns(stream_TV) if own_TW is None else own_TW
        found_TW = product(self.gather_columns(x_TW), weight, own_TW, bias)
        return self.gather_columns(found_TW), found_TW

    def local_rows(self, *tensors: Tensor) -> Sequence[Tensor]:
        """This rank's share of the rows of replicated tensors, [ceil(R / ranks), ...], padded with copies of the last
        row."""
        if self.index is None:
            return tensors
        count = tensors[0].shape[0]
        share = -(-count // self.axis.size)
        row_R = (self.index * share + torch.arange(share, device=self.index.device)).clamp_max(count - 1)
        return [x.index_select(0, row_R) for x in tensors]

    def columns_to_rows(self, x_RW: Tensor) -> Tensor:
        """All columns of this rank's share of the rows (`local_rows`), [ceil(R / ranks), V], from its columns of all
        rows, by an all-to-all."""
        return x_RW if self.index is None else columns_to_rows(x_RW, self.axis)

    def gather_rows(self, x: Tensor, rows: int) -> Tensor:
        """All `rows` rows, gathered from the ranks' shares (`local_rows`)."""
        return x if self.index is None else all_gather_rows(x, rows, self.axis)

    def gather_weight_rows(self, weight: Tensor) -> Tensor:
        """All ranks' rows of a weight, in rank order. The backward pass gives each rank its rows of the gradients' sum
        over the ranks, as a reduce-scatter would."""
        return weight if self.index is None else _GatherWeightRows.apply(weight, self.axis)

    def gather_scalars(self, rows: int, *own: Tensor) -> Sequence[Tensor]:
        """Each tensor as float32 [rows], gathered from the ranks' shares of the rows (`local_rows`). All ranks have the
        same gradient of it, and each keeps that of its own rows."""
        return own if self.index is None else _GatherScalars.apply(self.axis, self.index, rows, *own)

    def count_gradient_once(self, value: Tensor) -> Tensor:
        """A value that all ranks compute, detached on all but the first so that its gradient counts once."""
        return value if self.index is None else torch.where(self.index[0] == 0, value, value.detach())


class _GatherWeightRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(own, axis).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_rows(grad, ctx.axis), None


class _GatherScalars(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, index: Tensor, rows: int, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.index = axis, index
        ctx.set_materialize_grads(False)
        found = all_gather(torch.stack(own), axis).transpose(0, 1).flatten(1)
        return tuple(row[:rows].clone() for row in found.unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        def own(grad: Tensor | None) -> Tensor | None:
            if grad is None:
                return None
            last, share = grad.shape[0] - 1, -(-grad.shape[0] // ctx.axis.size)
            row_C = ctx.index * share + torch.arange(share, device=grad.device)
            return torch.where(row_C <= last, grad.index_select(0, row_C.clamp_max(last)), 0.0)

        return None, None, None, *map(own, grads)
