"""Attention over packed segments and over a paged cache: one kernel, two ways to find a position's row.

A program does `BLOCK_M` query rows (tokens x heads of a group, tokens outermost) of one kv head of one sequence, with
an online softmax over key tiles of `KEY_TILE` at absolute positions in ascending order. The same tile, warps and layout
serve training, prefill and decode, and warps lie along the query rows, so a row's bits depend on its keys alone: a tile
that is masked for a row multiplies its accumulators by 1 and adds 0.

Rounding points: scores, maxima, sums and the output's accumulator are float32; probabilities are rounded to the values'
dtype before the second product, their sum is taken before that rounding; the result is rounded once.

Shape suffixes: T tokens, S sequences, N query heads, K kv heads, H head dim, R rows of keys and values, M query rows of
a program, G query heads of a kv head, L keys of a tile.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention_reference import KEY_TILE

BLOCK_M = 64
NUM_WARPS = 4
NUM_STAGES = 2
MIN_HEAD_BLOCK = 16  # tl.dot's smallest depth


@triton.jit
def _key_rows(position_L, inside_L, table_ptr, prefix, shared, own, PAGE_SIZE: tl.constexpr):
    """Rows (int64) of absolute positions: by the block table when PAGE_SIZE > 0, else `shared + position` in the prefix
    and `own + position` after it."""
    if PAGE_SIZE > 0:
        page_L = tl.load(table_ptr + position_L // PAGE_SIZE, mask=inside_L, other=0).to(tl.int64)
        return page_L * PAGE_SIZE + position_L % PAGE_SIZE
    else:
        return tl.where(position_L < prefix, shared, own) + position_L


@triton.jit
def _attend_tile(q_MH, k_LH, v_LH, visible_ML, shift_M, sum_M, acc_MH, scale):
    """One key tile of the online softmax (Milakov and Gimelshein 2018); the shift is the row's largest score times
    `scale`, which holds log2(e)."""
    score_ML = tl.dot(q_MH, tl.trans(k_LH), input_precision="ieee")
    score_ML = tl.where(visible_ML, score_ML, float("-inf"))
    new_M = tl.maximum(shift_M, tl.max(score_ML, axis=1) * scale)
    finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # no visible key yet: every exp2 below is 0
    p_ML = tl.exp2(tl.fma(score_ML, scale, -finite_M[:, None]))
    alpha_M = tl.exp2(shift_M - finite_M)
    sum_M = tl.fma(sum_M, alpha_M, tl.sum(p_ML, axis=1))
    acc_MH = tl.dot(p_ML.to(v_LH.dtype), v_LH, acc_MH * alpha_M[:, None], input_precision="ieee")
    return new_M, sum_M, acc_MH


@triton.jit
def _zero_rows(
    out_ptr,
    lse_ptr,  # of token `first`
    kv_head,
    first,
    tokens,
    out_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Zero one kv head's query heads in tokens `first` onwards; the programs along axis 0 take turns."""
    h = tl.arange(0, BLOCK_H)
    for start in range(tl.program_id(0) * BLOCK_M, (tokens - first) * GROUP, tl.num_programs(0) * BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        token_M = first + row_M // GROUP
        offset_M = token_M.to(tl.int64) * out_stride + (kv_head * GROUP + row_M % GROUP) * HEAD_DIM
        zero_MH = tl.zeros((BLOCK_M, BLOCK_H), dtype=out_ptr.dtype.element_ty)
        mask_MH = (token_M < tokens)[:, None] & (h < HEAD_DIM)[None, :]
        tl.store(out_ptr + offset_M[:, None] + h[None, :], zero_MH, mask=mask_MH)
        tl.store(lse_ptr + row_M, tl.zeros((BLOCK_M,), tl.float32), mask=token_M < tokens)


@triton.jit(do_not_specialize=["tokens"])
def _attention_kernel(
    q_ptr,  # [T, N, H]
    k_ptr,  # [R, K, H]
    v_ptr,
    out_ptr,  # [T, N, H], contiguous
    lse_ptr,  # [K, T, G], contiguous
    cu_seqlens_ptr,  # [S + 1]
    length_ptr,  # [S]: context length when paged, prefix length when packed
    table_ptr,  # block table [S, pages] when paged, prefix start [S] when packed
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    scale,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    kv_head, sequence = tl.program_id(1), tl.program_id(2)
    out_stride = tl.num_programs(1) * GROUP * HEAD_DIM
    first = tl.load(cu_seqlens_ptr + sequence)
    lse_ptr += (kv_head * tokens + first) * GROUP
    if sequence == tl.num_programs(2) - 1:  # one past the last sequence: padding
        _zero_rows(out_ptr, lse_ptr, kv_head, first, tokens, out_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_H)
        return
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    first_row = tl.program_id(0) * BLOCK_M
    if first_row >= length * GROUP:
        return

    if PAGE_SIZE > 0:
        prefix = tl.load(length_ptr + sequence) - length
        shared, own = 0, 0
        table_ptr += sequence.to(tl.int64) * table_stride
    else:
        prefix = tl.load(length_ptr + sequence)
        shared = tl.load(table_ptr + sequence).to(tl.int64)
        own = first.to(tl.int64) - prefix
    row_M = first_row + tl.arange(0, BLOCK_M)
    token_M, head_M = row_M // GROUP, kv_head * GROUP + row_M % GROUP
    h = tl.arange(0, BLOCK_H)
    row_mask_MH = (token_M < length)[:, None] & (h < HEAD_DIM)[None, :]
    q_offset_M = (first + token_M).to(tl.int64) * q_stride + head_M * q_head_stride
    q_MH = tl.load(q_ptr + q_offset_M[:, None] + h[None, :], mask=row_mask_MH, other=0.0)

    shift_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    acc_MH = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    end = prefix + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, length)  # keys that the last row sees
    for start in range(0, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        inside_L = position_L < end
        row_L = _key_rows(position_L, inside_L, table_ptr, prefix, shared, own, PAGE_SIZE)
        mask_LH = inside_L[:, None] & (h < HEAD_DIM)[None, :]
        k_LH = tl.load(k_ptr + (row_L * k_stride + kv_head * k_head_stride)[:, None] + h[None, :], mask_LH, other=0.0)
        v_LH = tl.load(v_ptr + (row_L * v_stride + kv_head * v_head_stride)[:, None] + h[None, :], mask_LH, other=0.0)
        visible_ML = position_L[None, :] <= (prefix + token_M)[:, None]
        shift_M, sum_M, acc_MH = _attend_tile(q_MH, k_LH, v_LH, visible_ML, shift_M, sum_M, acc_MH, scale)

    out_offset_M = (first + token_M).to(tl.int64) * out_stride + head_M * HEAD_DIM
    out_MH = (acc_MH / sum_M[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_offset_M[:, None] + h[None, :], out_MH, mask=row_mask_MH)
    tl.store(lse_ptr + row_M, shift_M + tl.log2(sum_M), mask=token_M < length)


def _launch(
    q_TNH: Tensor,
    k_RKH: Tensor,
    v_RKH: Tensor,
    cu_seqlens: Tensor,
    length_S: Tensor,
    table: Tensor,
    page_size: int,
    max_queries: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; `max_queries` bounds a sequence's query tokens."""
    tokens, heads, head_dim = q_TNH.shape
    kv_heads = k_RKH.shape[1]
    group = heads // kv_heads
    q_TNH, k_RKH, v_RKH = (x if x.stride(2) == 1 else x.contiguous() for x in (q_TNH, k_RKH, v_RKH))
    out_TNH = torch.empty((tokens, heads, head_dim), dtype=q_TNH.dtype, device=q_TNH.device)
    lse_KTG = torch.empty((kv_heads, tokens, group), dtype=torch.float32, device=q_TNH.device)
    grid = (max(triton.cdiv(max_queries * group, BLOCK_M), 1), kv_heads, length_S.shape[0] + 1)
    _attention_kernel[grid](
        q_TNH,
        k_RKH,
        v_RKH,
        out_TNH,
        lse_KTG,
        cu_seqlens,
        length_S,
        table,
        tokens,
        table.stride(0),
        *(stride for x in (q_TNH, k_RKH, v_RKH) for stride in x.stride()[:2]),
        head_dim**-0.5 * math.log2(math.e),
        PAGE_SIZE=page_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_M=BLOCK_M,
        BLOCK_L=KEY_TILE,
        BLOCK_H=max(triton.next_power_of_2(head_dim), MIN_HEAD_BLOCK),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        enable_fp_fusion=False,
    )
    return out_TNH, lse_KTG


def packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor]:
    """See `attention.attention_packed`; also the rows' log-sum-exp of scaled scores in base 2, float32 [K, T, G]."""
    return _launch(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_len_S, prefix_start_S, 0, max_len)


def paged(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    """See `attention.attention_paged`. The context's bound is not needed: a program reads its own context's length."""
    k_RKH, v_RKH = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
    return _launch(q_TNH, k_RKH, v_RKH, cu_seqlens, context_len_S, block_table, k_cache.shape[1], max_query_len)[0]
