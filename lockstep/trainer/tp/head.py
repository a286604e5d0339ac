"""The LM head where ranks share the trainer's products: each scores its share of the rows, and all have all numbers.

What follows from the numbers, the loss above all, each rank computes whole. So their gradients are whole on each, and
it takes those of its own rows; behind the head a rank's gradients are of its share, and add up over the ranks, as those
of the model's products do (`distributed.collectives`).

Shape suffixes: C completion tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import distributed, ops
from ...distributed.mesh import Axis
from ...distributed.sums import rows_of_sum
from ...models import Decoder
from ...types import PackedBatch


def token_logprobs(model: Decoder, rows_CD: Tensor, batch: PackedBatch) -> ops.TokenLogprobs:
    """`ops.token_logprobs` of a batch, for the hidden rows that predict its tokens."""
    given = rows_CD, batch.targets_C, batch.temperature_C, batch.top_k_C, batch.top_p_C, batch.min_p_C
    own_CD, targets_C, *filters = model.spread.own_rows(*given)
    support_CB = None if batch.support_C is None else model.spread.own_rows(batch.support_C)[0]
    by = ops.Filters(*filters)
    found = ops.token_logprobs(own_CD, whole_head(model), targets_C, by, support_CB, batch.truncated)
    return ops.TokenLogprobs(*_whole(model, found, batch.targets_C))


def of_rows(model: Decoder, rows_CD: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
    """What `score` makes of hidden rows, float32 [C], row by row."""
    (own_CD,) = model.spread.own_rows(rows_CD)
    return _whole(model, [score(own_CD)], rows_CD)[0]


def whole_head(model: Decoder) -> Tensor:
    """The LM head [V, D] of a model, of which a rank may have rows."""
    cut = model.placements.get("lm_head")  # where it is tied the head is the embedding, which is whole
    return model.lm_head if cut is None or model.spread.index is None else _Rows.apply(model.lm_head, model.spread.axis)


def once(model: Decoder, value: Tensor) -> Tensor:
    """What each rank computes whole and differentiates, with a gradient on one of them alone."""
    index = model.spread.index
    return value if index is None else torch.where(index[0] == 0, value, value.detach())


def _whole(model: Decoder, found: Sequence[Tensor], rows: Tensor) -> Sequence[Tensor]:
    """All ranks' numbers a row, from those of the shares of as many `rows`."""
    index = model.spread.index
    return found if index is None else _Numbers.apply(model.spread.axis, index, rows.shape[0], *found)


class _Rows(torch.autograd.Function):
    """All ranks' rows of a weight, by rank; its gradients on all ranks add up to the rows'."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return distributed.gather(own, axis).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rows_of_sum(grad, ctx.axis), None


class _Numbers(torch.autograd.Function):
    """float32 [C] of all rows, from vectors of each rank's share; their gradient is whole on every rank."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, index: Tensor, rows: int, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.index = axis, index
        ctx.set_materialize_grads(False)
        found = distributed.gather(torch.stack(own), axis).transpose(0, 1).flatten(1)
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
