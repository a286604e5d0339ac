"""What a model's blocks ask of the ranks that share its products (tensor parallelism without a reduction).

A product is cut by its output columns and attention by its heads, and words are gathered; what is summed over is never
cut. So each element is the one sum that it is on one rank, and bits do not depend on the number of ranks.

Shape suffixes: T tokens, W a rank's columns, R rows, V all columns, C rows with a number each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import gather, gather_columns, gather_rows, own_columns, rows_of_sum, rows_to_owners
from .mesh import Axis


class Spread(nn.Module):
    """The ranks along an axis that share a model's products. On an axis of one its methods return their arguments, and
    add nothing to a graph. It has no parameters. `index`: this rank's place on the axis, int64 [1], an input of graphs,
    which hold no rank; None on an axis of one."""

    def __init__(self, axis: Axis, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.axis = axis
        self.index = torch.tensor([axis.rank], device=device) if axis.size > 1 else None

    @property
    def least_rows(self) -> int:
        """Of a graph whose rows the ranks share: each draws the tokens of two at the least, as a graph of one would
        hold for no other number."""
        return 1 if self.index is None else 2 * self.axis.size

    def part(self, count: int) -> int:
        """A rank's share of so many heads or columns."""
        return count // self.axis.size

    def columns(self, x_TW: Tensor) -> Tensor:
        """All ranks' columns, by rank, [T, ranks * W]."""
        return x_TW if self.index is None else gather_columns((x_TW,), self.axis)[0]

    def together(self, *pieces: Tensor) -> Sequence[Tensor]:
        """`columns` of several tensors, in one collective."""
        return pieces if self.index is None else gather_columns(pieces, self.axis)

    def own(self, x_TV: Tensor) -> Tensor:
        """This rank's columns of a tensor that all have whole, [T, W]."""
        return x_TV if self.index is None else own_columns(x_TV, self.index, self.axis)

    def added(
        self,
        product: Callable[..., Tensor],
        x_TW: Tensor,
        weight: Tensor,
        stream_TV: Tensor,
        bias: Tensor | None,
        own_TW: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`product(x, weight, stream, bias)` of what the ranks have columns of and a stream that all have whole: whole,
        [T, V], and where there are several ranks this one's columns of it. `own_TW`: those of the stream, if they are
        at hand."""
        if self.index is None:
            return product(x_TW, weight, stream_TV, bias), None
        own_TW = self.own(stream_TV) if own_TW is None else own_TW
        found_TW = product(self.columns(x_TW), weight, own_TW, bias)
        return self.columns(found_TW), found_TW

    def own_rows(self, *tensors: Tensor) -> Sequence[Tensor]:
        """This rank's share of the rows of tensors that all have whole, [ceil(R / ranks), ...]; those beyond the last
        row repeat it."""
        if self.index is None:
            return tensors
        count = tensors[0].shape[0]
        share = -(-count // self.axis.size)
        row_R = (self.index * share + torch.arange(share, device=self.index.device)).clamp_max(count - 1)
        return [x.index_select(0, row_R) for x in tensors]

    def rows_to_owners(self, x_RW: Tensor) -> Tensor:
        """All columns of this rank's share of the rows (`own_rows`), [ceil(R / ranks), V], of own columns of all."""
        return x_RW if self.index is None else rows_to_owners(x_RW, self.axis)

    def all_rows(self, x: Tensor, rows: int) -> Tensor:
        """The `rows` rows whose shares the ranks have (`own_rows`)."""
        return x if self.index is None else gather_rows(x, rows, self.axis)

    def whole_rows(self, weight: Tensor) -> Tensor:
        """All ranks' rows of a weight, by rank; its gradients on all ranks add up to the rows'."""
        return weight if self.index is None else _Rows.apply(weight, self.axis)

    def numbers(self, rows: int, *own: Tensor) -> Sequence[Tensor]:
        """float32 [rows] each, from those of each rank's share of the rows (`own_rows`); a gradient is whole on every
        rank, which takes that of its own rows."""
        return own if self.index is None else _Numbers.apply(self.axis, self.index, rows, *own)

    def once(self, value: Tensor) -> Tensor:
        """What each rank computes whole and differentiates, with a gradient on one of them alone."""
        return value if self.index is None else torch.where(self.index[0] == 0, value, value.detach())


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return gather(own, axis).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rows_of_sum(grad, ctx.axis), None


class _Numbers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, index: Tensor, rows: int, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.index = axis, index
        ctx.set_materialize_grads(False)
        found = gather(torch.stack(own), axis).transpose(0, 1).flatten(1)
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
