"""Backward of the row operators: float32 inside, each gradient rounded once, the same bits every time.

A program does `ROWS` rows (tokens) one after the other and leaves the sum of their weight gradients in a row of its
own; torch folds those. The number of rows alone fixes the order of additions. Nothing is under the forward's contract.

Shape suffixes: T rows, D model dim, E a fused projection's output, F feed-forward dim, H head dim, R table rows, P
programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import SILU_BLOCK, _warps

ROWS = 16  # rows whose weight gradients one program adds up
GATHER_ROWS = 16  # gradients of one table row that are added at a time
GATHER_BLOCK = 256


def _unit_inner(x: Tensor) -> Tensor:
    """`x` with unit inner stride, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _rms_norm_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    grad_x_ptr,
    partial_ptr,  # [P, D]
    rows,
    grad_stride,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program * ROWS, tl.minimum(program * ROWS + ROWS, rows)):
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
        normed = x * rstd
        weighted = grad * weight
        grad_x = rstd * (weighted - normed * (tl.sum(weighted * normed, axis=0) / WIDTH))
        tl.store(grad_x_ptr + row * WIDTH + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        total += grad * normed
    tl.store(partial_ptr + program * WIDTH + column, total, mask=inside)


def rms_norm(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `rows_backward.rms_norm`."""
    grad_TD, x_TD, weight_D = _unit_inner(grad_TD), _unit_inner(x_TD), _unit_inner(weight_D)
    rows, width = x_TD.shape
    programs = triton.cdiv(rows, ROWS)
    grad_x_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    partial_PD = torch.empty((programs, width), dtype=torch.float32, device=x_TD.device)
    _rms_norm_kernel[(programs,)](
        grad_TD,
        x_TD,
        weight_D,
        grad_x_TD,
        partial_PD,
        rows,
        grad_TD.stride(0),
        x_TD.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        ROWS=ROWS,
        num_warps=_warps(width, 8),
        enable_fp_fusion=True,
    )
    return grad_x_TD, partial_PD.sum(0).to(weight_D.dtype)


@triton.jit
def _unrotated(grad_ptr, cos_sin_ptr, column, inside, mask, HALF: tl.constexpr):
    """Both halves of a token's gradient before the rotation, which is orthogonal: its transpose undoes it."""
    cos = tl.load(cos_sin_ptr + column, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + column + HALF, mask=inside, other=0.0)
    first = tl.load(grad_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(grad_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    return first * cos + second * sin, second * cos - first * sin


@triton.jit
def _store_weight_gradient(partial_ptr, column, inside, first, second, is_query, HALF: tl.constexpr):
    """A program's sums over its query heads, then over its key heads: [2, H]."""
    q_first, q_second = tl.sum(tl.where(is_query, first, 0.0), axis=0), tl.sum(tl.where(is_query, second, 0.0), axis=0)
    k_first, k_second = tl.sum(tl.where(is_query, 0.0, first), axis=0), tl.sum(tl.where(is_query, 0.0, second), axis=0)
    tl.store(partial_ptr + column, q_first, mask=inside)
    tl.store(partial_ptr + HALF + column, q_second, mask=inside)
    tl.store(partial_ptr + 2 * HALF + column, k_first, mask=inside)
    tl.store(partial_ptr + 3 * HALF + column, k_second, mask=inside)


@triton.jit
def _qk_norm_rope_kernel(
    grad_ptr,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    grad_qkv_ptr,
    partial_ptr,  # [P, 2, H]
    tokens,
    qkv_stride,
    cos_sin_stride,
    eps,
    NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query and key heads
    WIDTH: tl.constexpr,  # of qkv
    HALF: tl.constexpr,  # of the head dim
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head, half = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)
    column, is_query = half[None, :], head < NUM_HEADS
    inside = column < HALF
    mask = (head < HEADS) & inside
    offset = head * (2 * HALF) + column
    value = HEADS * 2 * HALF + tl.arange(0, BLOCK_V)
    if NORM:
        q_first = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
        first_weight, second_weight = tl.where(is_query, q_first, k_first), tl.where(is_query, q_second, k_second)
        first_total = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
        second_total = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    for token in range(program * ROWS, tl.minimum(program * ROWS + ROWS, tokens)):
        first, second = _unrotated(
            grad_ptr + token * (HEADS * 2 * HALF) + offset,
            cos_sin_ptr + token * cos_sin_stride,
            column,
            inside,
            mask,
            HALF,
        )
        if NORM:
            x_first = tl.load(qkv_ptr + token * qkv_stride + offset, mask=mask, other=0.0).to(tl.float32)
            x_second = tl.load(qkv_ptr + token * qkv_stride + offset + HALF, mask=mask, other=0.0).to(tl.float32)
            squares = tl.sum(x_first * x_first + x_second * x_second, axis=1)
            rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            x_first, x_second = x_first * rstd, x_second * rstd
            first_total += first * x_first
            second_total += second * x_second
            first, second = first * first_weight, second * second_weight
            along = (tl.sum(first * x_first + second * x_second, axis=1) / (2 * HALF))[:, None]
            first, second = rstd * (first - x_first * along), rstd * (second - x_second * along)
        out = grad_qkv_ptr + token * WIDTH
        tl.store(out + offset, first.to(grad_qkv_ptr.dtype.element_ty), mask=mask)
        tl.store(out + offset + HALF, second.to(grad_qkv_ptr.dtype.element_ty), mask=mask)
        zeros = tl.zeros((BLOCK_V,), grad_qkv_ptr.dtype.element_ty)
        tl.store(out + value, zeros, mask=value < WIDTH)
    if NORM:
        _store_weight_gradient(
            partial_ptr + program * (4 * HALF), half, half < HALF, first_total, second_total, is_query, HALF
        )


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
    """See `rows_backward.qk_norm_rope`."""
    grad, qkv_TE, cos_sin_TH = grad.contiguous(), _unit_inner(qkv_TE), _unit_inner(cos_sin_TH)
    (tokens, width), head_dim = qkv_TE.shape, cos_sin_TH.shape[1]
    heads, half = num_heads + num_kv_heads, head_dim // 2
    programs = triton.cdiv(tokens, ROWS)
    grad_qkv_TE = torch.empty((tokens, width), dtype=qkv_TE.dtype, device=qkv_TE.device)
    norm = q_weight_H is not None and k_weight_H is not None
    partial = torch.empty((programs if norm else 0, 2, head_dim), dtype=torch.float32, device=qkv_TE.device)
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    _qk_norm_rope_kernel[(programs,)](
        grad,
        qkv_TE,
        *((_unit_inner(q_weight_H), _unit_inner(k_weight_H)) if norm else (qkv_TE, qkv_TE)),  # read if NORM
        cos_sin_TH,
        grad_qkv_TE,
        partial,
        tokens,
        qkv_TE.stride(0),
        cos_sin_TH.stride(0),
        eps,
        NORM=norm,
        NUM_HEADS=num_heads,
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_V=triton.next_power_of_2(max(width - heads * head_dim, 1)),
        ROWS=ROWS,
        num_warps=_warps(2 * block_heads * block_half, 16),
        enable_fp_fusion=True,
    )
    if not norm:
        return grad_qkv_TE, qkv_TE.new_empty(0), qkv_TE.new_empty(0)
    total = partial.sum(0)
    return grad_qkv_TE, total[0].to(q_weight_H.dtype), total[1].to(k_weight_H.dtype)


@triton.jit
def _silu_mul_kernel(grad_ptr, gate_up_ptr, out_ptr, grad_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, tl.exp(-gate) + 1.0)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    out = out_ptr + row * (2 * WIDTH) + column
    tl.store(out, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + WIDTH, (grad * silu).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """See `rows.silu_mul_backward`."""
    grad_TF, gate_up_TE = _unit_inner(grad_TF), _unit_inner(gate_up_TE)
    rows, width = grad_TF.shape
    out_TE = torch.empty((rows, 2 * width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        grad_TF,
        gate_up_TE,
        out_TE,
        grad_TF.stride(0),
        gate_up_TE.stride(0),
        WIDTH=width,
        BLOCK=SILU_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out_TE


@triton.jit
def _gather_rows_kernel(
    grad_ptr,
    sorted_ptr,  # [T], table rows in ascending order
    token_ptr,  # [T], where in grad_ptr's rows each comes from
    out_ptr,  # [R, D], zeros
    tokens,
    width,
    grad_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first program of a run of equal rows adds it up; the others have nothing to do."""
    first = tl.program_id(0)
    row = tl.load(sorted_ptr + first)
    if tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1) == row:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    start, count = first, tl.full((), ROWS, tl.int32)
    while count == ROWS:  # the run may go on
        place = start + tl.arange(0, ROWS)
        same = (place < tokens) & (tl.load(sorted_ptr + place, mask=place < tokens, other=-1) == row)
        token = tl.load(token_ptr + place, mask=same, other=0)
        offset = token[:, None] * grad_stride + column[None, :]
        values = tl.load(grad_ptr + offset, mask=same[:, None] & inside[None, :], other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
        count = tl.sum(same.to(tl.int32), axis=0)
        start += ROWS
    tl.store(out_ptr + row.to(tl.int64) * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def gather_rows(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:
    """See `rows_backward.gather_rows`."""
    grad_TD = _unit_inner(grad_TD)
    tokens, width = grad_TD.shape
    out_RD = torch.zeros((table_rows, width), dtype=grad_TD.dtype, device=grad_TD.device)
    if tokens == 0:
        return out_RD
    sorted_T, token_T = torch.sort(rows_T, stable=True)
    _gather_rows_kernel[(tokens, triton.cdiv(width, GATHER_BLOCK))](
        grad_TD,
        sorted_T,
        token_T,
        out_RD,
        tokens,
        width,
        grad_TD.stride(0),
        ROWS=GATHER_ROWS,
        BLOCK=GATHER_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out_RD
