"""Backward of the row operators on a GPU, as operators of its own that a trace keeps whole.

On a CPU `rows.py` computes the same in plain torch. Neither is under the forward's contract; both give the same bits
every time. Shape suffixes as in `rows.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("lockstep::gather_rows_backward", mutates_args=(), device_types="cuda")
def gather_rows(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:
    """Gradient of `rows.gather_rows` for its table, [R, D]: a row's gradients add up in float32, in an order that
    `rows_T` alone decides."""
    from .kernels import gather_backward

    return gather_backward.gather_rows(grad_TD, rows_T, table_rows)


@gather_rows.register_fake
def _(grad_TD, rows_T, table_rows):
    return grad_TD.new_empty(table_rows, grad_TD.shape[1])


@torch.library.custom_op("lockstep::rms_norm_backward", mutates_args=(), device_types="cuda")
def rms_norm(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `rows.rms_norm` for x, [T, D], and for the weight, [D]."""
    from .kernels import rows_backward

    return rows_backward.rms_norm(grad_TD, x_TD, weight_D, eps)


@rms_norm.register_fake
def _(grad_TD, x_TD, weight_D, eps):
    return x_TD.new_empty(x_TD.shape), weight_D.new_empty(weight_D.shape)


@torch.library.custom_op("lockstep::qk_norm_rope_backward", mutates_args=(), device_types="cuda")
def qk_norm_rope(
    grad: Tensor,
    qkv_TE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rows.qk_norm_rope` for qkv, [T, (N + 2K) * H] with zeros for v, and for both weights, [H]; the
    latter are empty where there are no weights."""
    from .kernels import rows_backward

    return rows_backward.qk_norm_rope(grad, qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps)


@qk_norm_rope.register_fake
def _(grad, qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps):
    size = 0 if q_weight_H is None or k_weight_H is None else cos_sin_TH.shape[1]
    q_dtype, k_dtype = ((w if w is not None else qkv_TE).dtype for w in (q_weight_H, k_weight_H))
    return qkv_TE.new_empty(qkv_TE.shape), qkv_TE.new_empty(size, dtype=q_dtype), qkv_TE.new_empty(size, dtype=k_dtype)
