"""Gathering rows of a table, such as embeddings or logit positions, and its gradient.

Shape suffixes: T rows, D model dim, R table rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import SAME, operator, save, saved_values


def _gather_backward(ctx, grad_TD: Tensor):
    rows_T, table_rows = saved_values(ctx)
    if grad_TD.is_cuda:
        return gather_rows_backward(grad_TD, rows_T, table_rows)
    total_RD = torch.zeros(table_rows, grad_TD.shape[1], dtype=torch.float32, device=grad_TD.device)
    return accumulate_rows(total_RD, rows_T, grad_TD.float()).to(grad_TD.dtype)


@operator(
    cuda=SAME,
    fake=lambda table_RD, rows_T: table_RD.new_empty(rows_T.shape[0], table_RD.shape[1]),
    setup=lambda ctx, inputs, output: save(ctx, [inputs[1], inputs[0].shape[0]]),
    backward=_gather_backward,
)
def gather_rows(table_RD: Tensor, rows_T: Tensor) -> Tensor:
    """`table[rows]`, [T, D], of a table [R, D] and int64 or int32 rows. The backward adds duplicates in fixed order."""
    return table_RD.index_select(0, rows_T)


@operator(
    gpu_only=True,
    cuda="triton_backward:gather_rows",
    fake=lambda grad_TD, rows_T, table_rows: grad_TD.new_empty(table_rows, grad_TD.shape[1]),
)
def gather_rows_backward(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:  # type: ignore[empty-body]
    """Gradient of `gather_rows` for its table, [R, D]: a row's gradients are added in float32, in an order that depends
    on `rows_T` alone. Opaque to traces. GPU only; on a CPU, `gather_rows` differentiates by plain torch."""


def accumulate_rows(total_RD: Tensor, rows_T: Tensor, values_TD: Tensor) -> Tensor:
    """`total[rows[t]] += values[t]` in place, in a deterministic order."""
    if total_RD.is_cuda:  # sorts by row; index_add_ would use atomics
        return total_RD.index_put_((rows_T,), values_TD, accumulate=True)
    return total_RD.index_add_(0, rows_T, values_TD)  # serial; index_put_ would use atomics
