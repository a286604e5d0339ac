"""Backward of the row operators: float32 inside, each gradient rounded once, the same bits every time.

A program does some rows (tokens) one after the other and leaves the sum of their weight gradients in a row of its own;
another kernel folds those. The number of rows alone fixes the order of additions. Nothing is under the forward's
contract.

Shape suffixes: T rows, D model dim, E a fused projection's output, F feed-forward dim, H head dim, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import SILU_BLOCK, _warps

NORM_ROWS, NORM_TILE, NORM_THREAD = 8, 2048, 16  # rows whose weight gradients one program adds up; elements
# that it does at a time, and a thread of them
QK_ROWS, QK_HEADS, QK_WARPS = 16, 8, 4  # tokens and heads that one program does, and its warps
FOLD_ROWS, FOLD_BLOCK, FOLD_WARPS = 512, 8, 8


def unit_inner(x: Tensor) -> Tensor:
    """`x` with unit inner stride, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _fold_kernel(partial_ptr, out_ptr, programs, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        mask = (program < programs)[:, None] & (column < width)[None, :]
        total += tl.load(partial_ptr + program[:, None] * stride + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < width)


def _fold(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over programs, [D] in `dtype`."""
    programs, width = partial_PD.shape
    out_D = torch.empty(width, dtype=dtype, device=partial_PD.device)
    _fold_kernel[(triton.cdiv(width, FOLD_BLOCK),)](
        partial_PD, out_D, programs, width, partial_PD.stride(0), ROWS=FOLD_ROWS, BLOCK=FOLD_BLOCK, num_warps=FOLD_WARPS
    )
    return out_D


@triton.jit
def _rms_norm_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    other_ptr,
    grad_x_ptr,
    partial_ptr,  # [P, D]
    rows,
    grad_stride,
    x_stride,
    other_stride,
    eps,
    HAS_OTHER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,  # rows at a time
):
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
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
        if HAS_OTHER:
            other = tl.load(other_ptr + row * other_stride + column, mask=mask, other=0.0).to(tl.float32)
            grad_x = (grad_x.to(tl.float32) + other).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + row * WIDTH + column, grad_x, mask=mask)
        total += grad * normed
    column = tl.arange(0, BLOCK)
    tl.store(partial_ptr + program * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def rms_norm(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, other_TD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `rows_backward.rms_norm` and, with another gradient of x, `fused_backward.rms_norm_add`."""
    grad_TD, x_TD, weight_D = unit_inner(grad_TD), unit_inner(x_TD), unit_inner(weight_D)
    added_TD = grad_TD if other_TD is None else unit_inner(other_TD)  # read if HAS_OTHER
    rows, width = x_TD.shape
    programs, block = triton.cdiv(rows, NORM_ROWS), triton.next_power_of_2(width)
    tile = min(max(NORM_TILE // block, 1), NORM_ROWS)
    grad_x_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    partial_PD = torch.empty((programs, width), dtype=torch.float32, device=x_TD.device)
    _rms_norm_kernel[(programs,)](
        grad_TD,
        x_TD,
        weight_D,
        added_TD,
        grad_x_TD,
        partial_PD,
        rows,
        grad_TD.stride(0),
        x_TD.stride(0),
        added_TD.stride(0),
        eps,
        HAS_OTHER=other_TD is not None,
        WIDTH=width,
        BLOCK=block,
        ROWS=NORM_ROWS,
        TILE=tile,
        num_warps=_warps(tile * block, NORM_THREAD),
        enable_fp_fusion=True,
    )
    return grad_x_TD, _fold(partial_PD, weight_D.dtype)


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
    partial_ptr,  # [P, groups of heads, 2, H]
    tokens,
    qkv_stride,
    cos_sin_stride,
    eps,
    NORM: tl.constexpr,
    HAS_VALUES: tl.constexpr,  # the values' gradients are there
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
    group, groups = tl.program_id(1), tl.num_programs(1)
    head, half = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK_HALF)
    column, is_query = half[None, :], head < NUM_HEADS
    inside = column < HALF
    mask = (head < HEADS) & inside
    offset = head * (2 * HALF) + column
    value = HEADS * 2 * HALF + group * BLOCK_V + tl.arange(0, BLOCK_V)
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
        if not HAS_VALUES:
            zeros = tl.zeros((BLOCK_V,), grad_qkv_ptr.dtype.element_ty)
            tl.store(out + value, zeros, mask=value < WIDTH)
    if NORM:
        _store_weight_gradient(
            partial_ptr + (program * groups + group) * (4 * HALF),
            half,
            half < HALF,
            first_total,
            second_total,
            is_query,
            HALF,
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
    grad_qkv_TE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rows_backward.qk_norm_rope`; a `grad_qkv_TE` that is given holds the values' gradients and gets the rest."""
    grad, qkv_TE, cos_sin_TH = grad.contiguous(), unit_inner(qkv_TE), unit_inner(cos_sin_TH)
    (tokens, width), head_dim = qkv_TE.shape, cos_sin_TH.shape[1]
    heads, half = num_heads + num_kv_heads, head_dim // 2
    programs = triton.cdiv(tokens, QK_ROWS)
    has_values = grad_qkv_TE is not None
    if grad_qkv_TE is None:
        grad_qkv_TE = torch.empty((tokens, width), dtype=qkv_TE.dtype, device=qkv_TE.device)
    norm = q_weight_H is not None and k_weight_H is not None
    groups = triton.cdiv(heads, QK_HEADS)
    partial = torch.empty((programs * groups if norm else 0, 2, head_dim), dtype=torch.float32, device=qkv_TE.device)
    _qk_norm_rope_kernel[(programs, groups)](
        grad,
        qkv_TE,
        *((unit_inner(q_weight_H), unit_inner(k_weight_H)) if norm else (qkv_TE, qkv_TE)),  # read if NORM
        cos_sin_TH,
        grad_qkv_TE,
        partial,
        tokens,
        qkv_TE.stride(0),
        cos_sin_TH.stride(0),
        eps,
        NORM=norm,
        HAS_VALUES=has_values,
        NUM_HEADS=num_heads,
        HEADS=heads,
        WIDTH=width,
        HALF=half,
        BLOCK_HEADS=QK_HEADS,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_V=triton.next_power_of_2(max(triton.cdiv(width - heads * head_dim, groups), 1)),  # latents have no values
        ROWS=QK_ROWS,
        num_warps=QK_WARPS,
        enable_fp_fusion=True,
    )
    if not norm:
        return grad_qkv_TE, qkv_TE.new_empty(0), qkv_TE.new_empty(0)
    return grad_qkv_TE, _fold(partial[:, 0], q_weight_H.dtype), _fold(partial[:, 1], k_weight_H.dtype)


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
    grad_TF, gate_up_TE = unit_inner(grad_TF), unit_inner(gate_up_TE)
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
