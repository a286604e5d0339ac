"""Backward of the normalized and rotated queries and keys: float32 inside, each gradient rounded once.

A program does some tokens one after the other and leaves the sum of their weight gradients in a row of its own.

Shape suffixes: T rows, E a fused projection's output, H head dim, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import Rotation
from ..row_alignment import unit_inner
from ..row_gradients import _fold

QK_ROWS, QK_HEADS, QK_WARPS = 16, 8, 4  # tokens and heads that one program does, and its warps


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
    grad: Tensor, qkv_TE: Tensor, by: Rotation, grad_qkv_TE: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rope.operator.qk_norm_rope_backward`; a `grad_qkv_TE` that is given holds the values' gradients and gets the
    rest."""
    q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps = by
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
