"""Gradient of `embedding.gather_rows` on a GPU, as an operator of its own that a trace keeps whole.

On a CPU `operator.py` computes the same in plain torch. Neither is under the forward's contract; both give the same
bits every time.
"""

from __future__ import annotations

from torch import Tensor

from ..operator import operator


@operator(
    "lockstep::gather_rows_backward",
    gpu_only=True,
    fake=lambda grad_TD, rows_T, table_rows: grad_TD.new_empty(table_rows, grad_TD.shape[1]),
)
def gather_rows(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:
    """Gradient of `embedding.operator.gather_rows` for its table, [R, D]: a row's gradients add up in float32, in an
    order that `rows_T` alone decides."""
    from . import triton_backward

    return triton_backward.gather_rows(grad_TD, rows_T, table_rows)
