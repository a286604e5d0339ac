"""A token's rows back together, and their gradients. Meaning and rounding points: `ops/routing.py`.

A program does one row of the result, so the order of its sum is the slots'.

Shape suffixes: T tokens, K slots a token, R = T * K rows, D hidden dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WARPS = 4


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weight_ptr, out_ptr, y_stride, WIDTH: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(SLOTS):
        row = tl.load(row_ptr + token * SLOTS + slot)
        weight = tl.load(weight_ptr + token * SLOTS + slot)
        y = tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        total = total + y * weight if slot > 0 else y * weight
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """See `routing.combine`."""
    y_RD = y_RD if y_RD.stride(1) == 1 else y_RD.contiguous()
    (tokens, slots), width = row_TK.shape, y_RD.shape[1]
    out_TD = torch.empty((tokens, width), dtype=y_RD.dtype, device=y_RD.device)
    _combine_kernel[(tokens,)](
        y_RD,
        row_TK.contiguous(),
        weights_TK.contiguous(),
        out_TD,
        y_RD.stride(0),
        WIDTH=width,
        SLOTS=slots,
        BLOCK=triton.next_power_of_2(width),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return out_TD


@triton.jit
def _combine_backward_kernel(
    grad_ptr,
    y_ptr,
    order_ptr,
    weight_ptr,
    grad_y_ptr,
    grad_weight_ptr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(order_ptr + row)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    grad = tl.load(grad_ptr + place // SLOTS * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + place)
    tl.store(grad_y_ptr + row * WIDTH + column, (grad * weight).to(grad_y_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_weight_ptr + row, tl.sum(grad * y, axis=0))


def combine_backward(grad_TD: Tensor, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """See `routing.combine_backward`."""
    rows, width = y_RD.shape
    grad_y_RD = torch.empty((rows, width), dtype=y_RD.dtype, device=y_RD.device)
    grad_R = torch.empty(rows, dtype=torch.float32, device=y_RD.device)
    _combine_backward_kernel[(rows,)](
        grad_TD.contiguous(),
        y_RD.contiguous(),
        order_R,
        weights_TK.contiguous(),
        grad_y_RD,
        grad_R,
        WIDTH=width,
        SLOTS=weights_TK.shape[1],
        BLOCK=triton.next_power_of_2(width),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    return grad_y_RD, grad_R
