"""Backward of the row operators: float32 inside, each gradient rounded once, the same bits every time.

A program does some rows (tokens) one after the other and leaves the sum of their weight gradients in a row of its own;
another kernel folds those. The number of rows alone fixes the order of additions. Nothing is under the forward's
contract.

Shape suffixes: T rows, D model dim, E a fused projection's output, F feed-forward dim, H head dim, R table rows, P
programs.
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
GATHER_ROWS, GATHER_BLOCK = 16, 256  # sorted gradients that one program adds up; elements of each
GATHER_PIECES = 8  # sums of a table row's parts that are added at a time


def _unit_inner(x: Tensor) -> Tensor:
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
    grad_x_ptr,
    partial_ptr,  # [P, D]
    rows,
    grad_stride,
    x_stride,
    eps,
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
        tl.store(grad_x_ptr + row * WIDTH + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
        total += grad * normed
    column = tl.arange(0, BLOCK)
    tl.store(partial_ptr + program * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


def rms_norm(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `rows_backward.rms_norm`."""
    grad_TD, x_TD, weight_D = _unit_inner(grad_TD), _unit_inner(x_TD), _unit_inner(weight_D)
    rows, width = x_TD.shape
    programs, block = triton.cdiv(rows, NORM_ROWS), triton.next_power_of_2(width)
    tile = min(max(NORM_TILE // block, 1), NORM_ROWS)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """See `rows_backward.qk_norm_rope`."""
    grad, qkv_TE, cos_sin_TH = grad.contiguous(), _unit_inner(qkv_TE), _unit_inner(cos_sin_TH)
    (tokens, width), head_dim = qkv_TE.shape, cos_sin_TH.shape[1]
    heads, half = num_heads + num_kv_heads, head_dim // 2
    programs = triton.cdiv(tokens, QK_ROWS)
    grad_qkv_TE = torch.empty((tokens, width), dtype=qkv_TE.dtype, device=qkv_TE.device)
    norm = q_weight_H is not None and k_weight_H is not None
    groups = triton.cdiv(heads, QK_HEADS)
    partial = torch.empty((programs * groups if norm else 0, 2, head_dim), dtype=torch.float32, device=qkv_TE.device)
    _qk_norm_rope_kernel[(programs, groups)](
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
def _gather_pieces_kernel(
    grad_ptr,
    sorted_ptr,  # [T], table rows in ascending order
    token_ptr,  # [T], where in grad_ptr's rows each comes from
    out_ptr,  # [R, D], zeros
    piece_ptr,  # [P, 2, D], float32
    tokens,
    width,
    grad_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up runs of equal rows among `ROWS` of them. One that came in from the program before leaves its sum as the
    first piece, one that began here and goes on as the second."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece = piece_ptr + program.to(tl.int64) * (2 * width) + column
    total = tl.zeros((BLOCK,), tl.float32)
    first = program * ROWS
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    began_here = tl.load(sorted_ptr + first) != before
    for i in tl.static_range(ROWS):
        place = first + i
        row = tl.load(sorted_ptr + place, mask=place < tokens, other=-1)
        token = tl.load(token_ptr + place, mask=place < tokens, other=0)
        limit = tl.where(place < tokens, width, 0)
        total += tl.load(grad_ptr + token * grad_stride + column, mask=column < limit, other=0.0).to(tl.float32)
        ends = row != tl.load(sorted_ptr + place + 1, mask=place + 1 < tokens, other=-1)
        whole, part = (
            tl.where(ends, tl.where(began_here, limit, 0), 0),
            tl.where(ends, tl.where(began_here, 0, limit), 0),
        )
        out = out_ptr + row.to(tl.int64) * width + column
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=column < whole)
        tl.store(piece, total, mask=column < part)
        total = tl.where(ends, 0.0, total)
        began_here = began_here | ends
    goes_on = tl.load(sorted_ptr + first + ROWS, mask=first + ROWS < tokens, other=-1) == row
    limit = tl.where(goes_on, tl.where(first + ROWS < tokens, width, 0), 0)
    tl.store(piece, total, mask=column < tl.where(began_here, 0, limit))
    tl.store(piece + width, total, mask=column < tl.where(began_here, limit, 0))


@triton.jit
def _gather_whole_kernel(
    sorted_ptr,
    piece_ptr,
    out_ptr,
    tokens,
    width,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The program whose second piece begins a run adds the pieces that go on with it; the others have nothing to do."""
    program = tl.program_id(0).to(tl.int64)
    first, following = program * ROWS, (program + 1) * ROWS
    row = tl.load(sorted_ptr + following - 1, mask=following < tokens, other=-1)
    if row < 0:
        return
    if tl.load(sorted_ptr + following) != row:
        return
    if tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1) == row:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(piece_ptr + (program * 2 + 1) * width + column, mask=inside, other=0.0)
    start, count = program + 1, tl.full((), PIECES, tl.int32)
    while count == PIECES:  # the run may go on
        p = start + tl.arange(0, PIECES)
        same = tl.load(sorted_ptr + p * ROWS, mask=p * ROWS < tokens, other=-1) == row
        offset = (p * 2 * width)[:, None] + column[None, :]
        total += tl.sum(tl.load(piece_ptr + offset, mask=same[:, None] & inside[None, :], other=0.0), axis=0)
        count = tl.sum(same.to(tl.int32), axis=0)
        start += PIECES
    tl.store(out_ptr + row.to(tl.int64) * width + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def gather_rows(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:
    """See `rows_backward.gather_rows`."""
    grad_TD = _unit_inner(grad_TD)
    tokens, width = grad_TD.shape
    out_RD = torch.zeros((table_rows, width), dtype=grad_TD.dtype, device=grad_TD.device)
    if tokens == 0:
        return out_RD
    sorted_T, token_T = torch.sort(rows_T.int(), stable=True)
    programs = triton.cdiv(tokens, GATHER_ROWS)
    piece = torch.empty((programs, 2, width), dtype=torch.float32, device=grad_TD.device)
    grid, sizes = (programs, triton.cdiv(width, GATHER_BLOCK)), {"ROWS": GATHER_ROWS, "BLOCK": GATHER_BLOCK}
    _gather_pieces_kernel[grid](
        grad_TD, sorted_T, token_T, out_RD, piece, tokens, width, grad_TD.stride(0), **sizes, num_warps=1
    )
    _gather_whole_kernel[grid](sorted_T, piece, out_RD, tokens, width, PIECES=GATHER_PIECES, **sizes, num_warps=1)
    return out_RD
