"""RMSNorm and its gradients on a GPU: float32 inside, each rounded once to the input's dtype. `rows` says how programs
divide the work.

Shape suffixes: T rows, D model dim, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..rows import aligned_rows, num_warps, sum_partials, unit_inner

ROW_THREAD = 8  # elements of a row that a thread loads at a time, if they are aligned
NORM_ROWS = 8  # rows whose weight gradients one program adds up
NORM_TILE, NORM_THREAD = 2048, 16  # elements at a time, per program and per thread


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    residual_ptr,  # added to the rounded norm; or None
    out_ptr,
    x_stride,
    residual_stride,
    eps,
    OFFSET: tl.constexpr,  # of the weights
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    pdl.release_and_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    out_ptr += row * WIDTH + column
    out = (x * rstd * weight).to(out_ptr.dtype.element_ty)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
        out = (residual + out.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr, out, mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return norm_add(x_TD, weight_D, None, eps, weight_offset)


def norm_add(
    x_TD: Tensor, weight_D: Tensor, residual_TD: Tensor | None, eps: float, weight_offset: float = 0.0
) -> Tensor:
    """See `norm.operator.norm_add`; without `residual_TD`, nothing is added."""
    x_TD, weight_D = aligned_rows(x_TD), aligned_rows(weight_D)
    residual_TD = None if residual_TD is None else aligned_rows(residual_TD)
    rows, width = x_TD.shape
    out_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    _rms_norm_kernel[(rows,)](
        x_TD, weight_D, residual_TD, out_TD, x_TD.stride(0), None if residual_TD is None else residual_TD.stride(0),
        eps,
        OFFSET=weight_offset, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        **pdl.options(x_TD, num_warps=num_warps(width, ROW_THREAD)),
    )  # fmt: skip
    return out_TD


@triton.jit
def _rms_norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    other_ptr,  # or None
    grad_x_ptr,
    partial_ptr,  # [P, D]
    rows,
    grad_stride,
    x_stride,
    other_stride,
    eps,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # rows at a time
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    total = tl.zeros((TILE, BLOCK), tl.float32)
    for start in range(0, ROWS, TILE):
        row = program * ROWS + start + tl.arange(0, TILE)[:, None]
        mask = (row < rows) & inside
        x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
        normed = x * rstd
        weighted = grad * weight
        grad_x = rstd * (weighted - normed * (tl.sum(weighted * normed, axis=1) / WIDTH)[:, None])
        grad_x = grad_x.to(grad_x_ptr.dtype.element_ty)
        if other_ptr is not None:
            other = tl.load(other_ptr + row * other_stride + column, mask=mask, other=0.0).to(tl.float32)
            grad_x = (grad_x.to(tl.float32) + other).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * WIDTH + column, grad_x, mask=mask)
        total += grad * normed
    column = tl.arange(0, BLOCK)
    tl.store(partial_ptr + program * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def rms_norm_backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return rms_norm_backward_add(grad_TD, x_TD, weight_D, eps, None, weight_offset)


def rms_norm_backward_add(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, other_TD: Tensor | None, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `fused.backward.rms_norm_add`; without `other_TD`, there is no other gradient of x."""
    grad_TD, x_TD, weight_D = unit_inner(grad_TD), unit_inner(x_TD), unit_inner(weight_D)
    other_TD = None if other_TD is None else unit_inner(other_TD)
    rows, width = x_TD.shape
    programs, block = triton.cdiv(rows, NORM_ROWS), triton.next_power_of_2(width)
    tile = min(max(NORM_TILE // block, 1), NORM_ROWS)
    grad_x_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    partial_PD = torch.empty((programs, width), dtype=torch.float32, device=x_TD.device)
    _rms_norm_backward_kernel[(programs,)](
        grad_TD, x_TD, weight_D, other_TD, grad_x_TD, partial_PD, rows, grad_TD.stride(0), x_TD.stride(0),
        None if other_TD is None else other_TD.stride(0), eps,
        OFFSET=weight_offset, WIDTH=width, BLOCK=block, ROWS=NORM_ROWS, TILE=tile,
        num_warps=num_warps(tile * block, NORM_THREAD), enable_fp_fusion=True,
    )  # fmt: skip
    return grad_x_TD, sum_partials(partial_PD, weight_D.dtype)
