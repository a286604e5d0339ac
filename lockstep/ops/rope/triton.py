"""Queries and keys, normalized and rotated, and the table of angles: float32 inside, one rounding to the input's dtype.
`rows` says how programs divide the work.

Shape suffixes: T rows, E a fused projection's output, H head dim, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .. import pdl
from ..records import KVPages, Rotation
from ..rows import aligned_rows, load_halves, num_warps, split_eight, store_halves, sum_partials, unit_inner

RUN = tl.constexpr(8)  # neighbours that `sum_columns` adds one after another
MAX_LEVELS = tl.constexpr(8)  # of halving: rows have at most `RUN << MAX_LEVELS` columns
QK_ROWS, QK_HEADS, QK_WARPS = 16, 8, 4  # tokens and heads per program of the backward, and its warps


@triton.jit
def sum_columns(x_MB, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Row sums, [M, 1]: first over each `RUN` neighbours from left to right; then the first half of these sums is added
    to the second half, and so on. The order is written out, so the compiler has no choice; zeros appended to a row
    change no bit."""
    run = split_eight(tl.reshape(x_MB, (BLOCK_M, BLOCK // RUN, 2, 2, 2)))
    sum_MR = run[0]
    for i in tl.static_range(1, RUN):
        sum_MR += run[i]
    for level in tl.static_range(MAX_LEVELS):
        if (2 << level) <= BLOCK // RUN:
            halves = tl.reshape(sum_MR, (BLOCK_M, 2, BLOCK // RUN // (2 << level)))
            sum_MR = tl.sum(halves, axis=1)
    return sum_MR


@triton.jit
def rotate_heads(
    qkv_ptr,  # of the token
    angle_ptr,  # of the token's row in the table
    head_M,
    is_key_M,
    mask_M,
    q_weight_ptr,  # or None, with `k_weight_ptr`
    k_weight_ptr,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OFFSET: tl.constexpr = 0.0,  # of the norm's weights
):
    """Heads of one token with the bits that `_qk_norm_rope_kernel` gives them, [M, H]; zero where masked."""
    HALF: tl.constexpr = HEAD_DIM // 2
    h = tl.broadcast_to(tl.arange(0, BLOCK_H)[None, :], (BLOCK_M, BLOCK_H))
    is_first, is_key = h < HALF, tl.broadcast_to(is_key_M[:, None], (BLOCK_M, BLOCK_H))
    pair = tl.where(is_first, h + HALF, h - HALF)  # the element that it is rotated with
    mask = mask_M[:, None] & (h < HEAD_DIM)
    x = tl.load(qkv_ptr + head_M[:, None] * HEAD_DIM + h, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(qkv_ptr + head_M[:, None] * HEAD_DIM + pair, mask=mask, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        squares = sum_columns(tl.where(is_first, x * x + y * y, 0.0), BLOCK_M, BLOCK_H)
        rstd = tl.rsqrt(squares / HEAD_DIM + eps)
        x_weight = head_weight(q_weight_ptr, k_weight_ptr, is_key, h, mask)
        y_weight = head_weight(q_weight_ptr, k_weight_ptr, is_key, pair, mask)
        if OFFSET != 0.0:
            x_weight, y_weight = x_weight + OFFSET, y_weight + OFFSET
        x, y = x * rstd * x_weight, y * rstd * y_weight
    cos = tl.load(angle_ptr + tl.where(is_first, h, h - HALF), mask=mask, other=0.0)
    sin = tl.load(angle_ptr + tl.where(is_first, h + HALF, h), mask=mask, other=0.0)
    return (x * cos + y * tl.where(is_first, -sin, sin)).to(qkv_ptr.dtype.element_ty)


@triton.jit
def head_weight(q_weight_ptr, k_weight_ptr, is_key, column, mask):
    """The norm's weights of heads, at columns."""
    q_weight = tl.load(q_weight_ptr + column, mask=mask & ~is_key, other=0.0)
    return tl.where(is_key, tl.load(k_weight_ptr + column, mask=mask & is_key, other=0.0), q_weight).to(tl.float32)


@triton.jit
def _weight_halves(q_weight_ptr, k_weight_ptr, is_query, inside, HALF: tl.constexpr, OFFSET: tl.constexpr):
    q_first, q_second = load_halves(q_weight_ptr, inside, HALF)
    k_first, k_second = load_halves(k_weight_ptr, inside, HALF)
    first, second = tl.where(is_query, q_first, k_first), tl.where(is_query, q_second, k_second)
    if OFFSET != 0.0:
        first, second = first + OFFSET, second + OFFSET
    return first, second


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,  # or None, with `k_weight_ptr`
    k_weight_ptr,
    cos_sin_ptr,
    out_ptr,  # [T, N + K, H]; [T, N, H] with a cache
    k_cache_ptr,  # [slots, K, H] each, written; or None
    v_cache_ptr,
    slots_ptr,  # [T]
    qkv_stride,
    cos_sin_stride,
    eps,
    OFFSET: tl.constexpr,  # of the norm's weights
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query and key heads
    HALF: tl.constexpr,  # of the head dim
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < HALF
    mask = (head < HEADS) & inside
    offset = head * (2 * HALF) + column
    qkv_ptr += token * qkv_stride
    pdl.release_and_wait(PDL)
    first, second = load_halves(qkv_ptr + offset, mask, HALF)
    if k_cache_ptr is not None:
        kv_mask = (head < HEADS - NUM_HEADS) & inside
        v_first = tl.load(qkv_ptr + HEADS * 2 * HALF + offset, mask=kv_mask)
        v_second = tl.load(qkv_ptr + HEADS * 2 * HALF + offset + HALF, mask=kv_mask)
        slot = tl.load(slots_ptr + token) * ((HEADS - NUM_HEADS) * 2 * HALF)
    if q_weight_ptr is not None:
        squares = sum_columns(first * first + second * second, BLOCK_HEADS, BLOCK_HALF)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)
        weights = q_weight_ptr + column, k_weight_ptr + column
        first_weight, second_weight = _weight_halves(*weights, head < NUM_HEADS, inside, HALF, OFFSET)
        first, second = first * rstd * first_weight, second * rstd * second_weight
    cos, sin = load_halves(cos_sin_ptr + token * cos_sin_stride + column, inside, HALF)
    rotated_first = (first * cos - second * sin).to(out_ptr.dtype.element_ty)
    rotated_second = (second * cos + first * sin).to(out_ptr.dtype.element_ty)
    if k_cache_ptr is not None:
        out = out_ptr + token * (NUM_HEADS * 2 * HALF) + offset
        k_cache = k_cache_ptr + slot - NUM_HEADS * 2 * HALF + offset
        k_mask = mask & (head >= NUM_HEADS)
        store_halves(k_cache, rotated_first, rotated_second, k_mask, HALF)
        store_halves(v_cache_ptr + slot + offset, v_first, v_second, kv_mask, HALF)
        mask &= head < NUM_HEADS
    else:
        out = out_ptr + token * (HEADS * 2 * HALF) + offset
    store_halves(out, rotated_first, rotated_second, mask, HALF)


def qk_norm_rope(qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0) -> Tensor:
    return qk_norm_rope_write_kv(qkv_TE, rotation, None, None, weight_offset)


def qk_norm_rope_write_kv(
    qkv_TE: Tensor,
    rotation: Rotation,
    cache: KVPages | None = None,
    slots_T: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """See `rope.operator.qk_norm_rope`; with a cache, `attention.operator.qk_norm_rope_write_kv`."""
    q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps = rotation
    qkv_TE, cos_sin_TH = aligned_rows(qkv_TE), aligned_rows(cos_sin_TH)
    tokens, head_dim = cos_sin_TH.shape
    heads, half = num_heads + num_kv_heads, head_dim // 2
    out = torch.empty((tokens, num_heads if cache else heads, head_dim), dtype=qkv_TE.dtype, device=qkv_TE.device)
    block_heads, block_half = triton.next_power_of_2(heads), max(triton.next_power_of_2(half), RUN.value)
    weights = (None if weight_H is None else aligned_rows(weight_H) for weight_H in (q_weight_H, k_weight_H))
    _qk_norm_rope_kernel[(tokens,)](
        qkv_TE, *weights, cos_sin_TH, out, *(cache or (None, None)), slots_T,
        qkv_TE.stride(0), cos_sin_TH.stride(0), eps,
        OFFSET=weight_offset, NUM_HEADS=num_heads, HEADS=heads, HALF=half, BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        **pdl.options(qkv_TE, num_warps=num_warps(2 * block_heads * block_half, 32)),
    )  # fmt: skip
    return out


@triton.jit
def _rope_table_kernel(
    position_ptr, inv_freq_ptr, out_ptr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)
    mask = column < HALF
    pdl.release_and_wait(PDL)
    angle = tl.load(position_ptr + token).to(tl.float32) * tl.load(inv_freq_ptr + column, mask=mask, other=0.0)
    out_ptr += token * (2 * HALF) + column
    tl.store(out_ptr, libdevice.cos(angle), mask=mask)
    tl.store(out_ptr + HALF, libdevice.sin(angle), mask=mask)


def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    tokens, half = positions_T.shape[0], inv_freq.shape[0]
    out_TH = torch.empty((tokens, 2 * half), dtype=torch.float32, device=positions_T.device)
    _rope_table_kernel[(tokens,)](
        positions_T.contiguous(), inv_freq.contiguous(), out_TH,
        HALF=half, BLOCK_HALF=triton.next_power_of_2(half),
        **pdl.options(inv_freq, num_warps=num_warps(triton.next_power_of_2(half), 1)),
    )  # fmt: skip
    return out_TH


@triton.jit
def _qk_norm_rope_backward_kernel(
    grad_ptr,
    qkv_ptr,
    q_weight_ptr,  # or None, with `k_weight_ptr`
    k_weight_ptr,
    cos_sin_ptr,
    grad_qkv_ptr,
    partial_ptr,  # [P, groups of heads, 2, H]
    tokens,
    qkv_stride,
    cos_sin_stride,
    eps,
    OFFSET: tl.constexpr,
    HAS_VALUES: tl.constexpr,  # the values' gradients are already in grad_qkv
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
    if q_weight_ptr is not None:
        weights = q_weight_ptr + column, k_weight_ptr + column
        first_weight, second_weight = _weight_halves(*weights, is_query, inside, HALF, OFFSET)
        first_total = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
        second_total = tl.zeros((BLOCK_HEADS, BLOCK_HALF), tl.float32)
    for token in range(program * ROWS, tl.minimum(program * ROWS + ROWS, tokens)):
        cos, sin = load_halves(cos_sin_ptr + token * cos_sin_stride + column, inside, HALF)
        first, second = load_halves(grad_ptr + token * (HEADS * 2 * HALF) + offset, mask, HALF)
        first, second = first * cos + second * sin, second * cos - first * sin  # orthogonal: its transpose undoes it
        if q_weight_ptr is not None:
            x_first, x_second = load_halves(qkv_ptr + token * qkv_stride + offset, mask, HALF)
            squares = tl.sum(x_first * x_first + x_second * x_second, axis=1)
            rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            x_first, x_second = x_first * rstd, x_second * rstd
            first_total += first * x_first
            second_total += second * x_second
            first, second = first * first_weight, second * second_weight
            along = (tl.sum(first * x_first + second * x_second, axis=1) / (2 * HALF))[:, None]
            first, second = rstd * (first - x_first * along), rstd * (second - x_second * along)
        out = grad_qkv_ptr + token * WIDTH
        store_halves(out + offset, first, second, mask, HALF)
        if not HAS_VALUES:
            zeros = tl.zeros((BLOCK_V,), grad_qkv_ptr.dtype.element_ty)
            tl.store(out + value, zeros, mask=value < WIDTH)
    if q_weight_ptr is not None:
        partial = partial_ptr + (program * groups + group) * (4 * HALF) + half
        for key in tl.static_range(2):
            is_own = is_query if key == 0 else head >= NUM_HEADS
            own_first = tl.sum(tl.where(is_own, first_total, 0.0), axis=0)
            own_second = tl.sum(tl.where(is_own, second_total, 0.0), axis=0)
            store_halves(partial + key * 2 * HALF, own_first, own_second, half < HALF, HALF)


def qk_norm_rope_backward(
    grad: Tensor, qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0, grad_qkv_TE: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rope.operator.qk_norm_rope_backward`. A given `grad_qkv_TE` holds the values' gradients; the rest is written
    to it."""
    q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps = rotation
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
    _qk_norm_rope_backward_kernel[(programs, groups)](
        grad, qkv_TE, *((unit_inner(q_weight_H), unit_inner(k_weight_H)) if norm else (None, None)),
        cos_sin_TH, grad_qkv_TE, partial, tokens, qkv_TE.stride(0), cos_sin_TH.stride(0), eps,
        OFFSET=weight_offset, HAS_VALUES=has_values, NUM_HEADS=num_heads, HEADS=heads, WIDTH=width,
        HALF=half, BLOCK_HEADS=QK_HEADS, BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_V=triton.next_power_of_2(max(triton.cdiv(width - heads * head_dim, groups), 1)),  # latents have no values
        ROWS=QK_ROWS, num_warps=QK_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    if not norm:
        return grad_qkv_TE, qkv_TE.new_empty(0), qkv_TE.new_empty(0)
    return grad_qkv_TE, sum_partials(partial[:, 0], q_weight_H.dtype), sum_partials(partial[:, 1], k_weight_H.dtype)
