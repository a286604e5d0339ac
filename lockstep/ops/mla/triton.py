"""Latent attention over packed segments and over a paged cache: one kernel, two ways to find a position's row.

A program does a tile of query rows (tokens x heads, tokens outermost) of one sequence; all of them read the same keys,
and a tile of latents in shared memory is both keys and values. The expression is that of `attention_tiles`, with a
score's sum running over the latent first and over the rotated part after it, in one accumulator. Single queries are
tiles like any others: a token's heads fill them.

Shape suffixes: T tokens, S sequences, N heads, R latent rank, P rotated dim, M query rows of a program, L keys of a
tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.reference import KEY_SPLIT, KEY_TILE
from ..attention.triton_tiles import (
    MIN_BLOCK,
    empty_state,
    key_rows,
    load_rows,
    merge_states,
    row_sum,
    rows_last,
)
from ..records import Latent, Packed, Paged


class LatentTile(NamedTuple):
    """How the kernel runs: query rows of a program, warps, pipeline stages."""

    query_rows: int
    warps: int
    stages: int


TILE = LatentTile(64, 8, 2)


@triton.jit
def scores(q_MR, q_MP, k_LR, k_LP):
    """Products of query rows and keys, float32 [M, L]."""
    score_ML = tl.dot(q_MR, tl.trans(k_LR), input_precision="ieee")
    return tl.dot(q_MP, tl.trans(k_LP), score_ML, input_precision="ieee")


@triton.jit
def load_queries(ptr, token_M, head_M, stride, head_stride, inside_M, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [M, BLOCK] of [T, N, WIDTH], zeros where not inside."""
    column = tl.arange(0, BLOCK)
    offset_M = token_M.to(tl.int64) * stride + head_M * head_stride
    mask = inside_M[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + offset_M[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q_MR,
    q_MP,
    last_M,  # the last position that a row sees
    begin,  # a multiple of BLOCK_L
    end,
    latent_ptr,
    k_rope_ptr,
    table_ptr,
    prefix,
    shared,
    own,
    latent_stride,
    k_rope_stride,
    scale,
    PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The state of the keys at positions `begin` to `end`; one tile of the online softmax after the other."""
    BLOCK_M: tl.constexpr = q_MR.shape[0]
    BLOCK_R: tl.constexpr = q_MR.shape[1]
    BLOCK_P: tl.constexpr = q_MP.shape[1]
    shift_M, sum_M, acc_MR = empty_state(BLOCK_M, BLOCK_R)
    row_L = key_rows(begin + tl.arange(0, BLOCK_L), end, table_ptr, prefix, shared, own, PAGE_SIZE)
    for start in range(begin, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        inside_L = position_L < end
        k_LR = load_rows(latent_ptr, row_L, latent_stride, inside_L, True, RANK, BLOCK_R)
        k_LP = load_rows(k_rope_ptr, row_L, k_rope_stride, inside_L, True, ROPE_DIM, BLOCK_P)
        score_ML = scores(q_MR, q_MP, k_LR, k_LP)
        score_ML = tl.where(position_L[None, :] <= last_M[:, None], score_ML, float("-inf"))
        new_M = tl.maximum(shift_M, tl.max(score_ML, axis=1) * scale)
        finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # no visible key yet: every exp2 below is 0
        p_ML = tl.exp2(tl.fma(score_ML, scale, -finite_M[:, None]))
        alpha_M = tl.exp2(shift_M - finite_M)
        sum_M = tl.fma(sum_M, alpha_M, row_sum(p_ML, BLOCK_M))
        acc_MR = tl.dot(p_ML.to(k_LR.dtype), k_LR, acc_MR * alpha_M[:, None], input_precision="ieee")
        shift_M = new_M
        row_L = key_rows(position_L + BLOCK_L, end, table_ptr, prefix, shared, own, PAGE_SIZE)  # a tile ahead
    return shift_M, sum_M, acc_MR


@triton.jit
def _zero_padding(out_ptr, lse_ptr, first_row, rows, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr):
    """Zero the output's rows from `first_row` on; the programs along axis 0 take turns."""
    column = tl.arange(0, BLOCK_R)
    for start in range(first_row + tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        zero_MR = tl.zeros((BLOCK_M, BLOCK_R), dtype=out_ptr.dtype.element_ty)
        mask_MR = (row_M < rows)[:, None] & (column < RANK)[None, :]
        tl.store(out_ptr + row_M.to(tl.int64)[:, None] * RANK + column[None, :], zero_MR, mask=mask_MR)
        tl.store(lse_ptr + row_M, tl.zeros((BLOCK_M,), tl.float32), mask=row_M < rows)


@triton.jit(do_not_specialize=["tokens"])
def _latent_attention_kernel(
    q_ptr,  # [T, N, R]
    q_rope_ptr,  # [T, N, P]
    latent_ptr,  # rows of R
    k_rope_ptr,  # rows of P
    out_ptr,  # [T, N, R], contiguous
    lse_ptr,  # [T, N], contiguous
    cu_seqlens_ptr,  # [S + 1]
    length_ptr,  # [S]: context length when paged, prefix length when packed
    table_ptr,  # block table [S, pages] when paged, prefix start [S] when packed
    tokens,
    table_stride,
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
    latent_stride,
    k_rope_stride,
    scale,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    SPLIT: tl.constexpr,  # keys of a split; 0: no sequence has more than one
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    sequence = tl.program_id(1)
    first = tl.load(cu_seqlens_ptr + sequence)
    if sequence == tl.num_programs(1) - 1:  # one past the last sequence: padding
        _zero_padding(out_ptr, lse_ptr, first * HEADS, tokens * HEADS, RANK, BLOCK_M, BLOCK_R)
        return
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the rows that see most come first
    if first_row >= length * HEADS:
        return

    if PAGE_SIZE > 0:
        prefix = tl.load(length_ptr + sequence) - length
        shared, own = 0, 0
        table_ptr += sequence.to(tl.int64) * table_stride
    else:
        prefix = tl.load(length_ptr + sequence)
        shared = tl.load(table_ptr + sequence)
        own = first - prefix
    row_M = first_row + tl.arange(0, BLOCK_M)
    token_M, head_M = row_M // HEADS, row_M % HEADS
    inside_M = token_M < length
    q_MR = load_queries(q_ptr, first + token_M, head_M, q_stride, q_head_stride, inside_M, RANK, BLOCK_R)
    q_MP = load_queries(
        q_rope_ptr, first + token_M, head_M, q_rope_stride, q_rope_head_stride, inside_M, ROPE_DIM, BLOCK_P
    )
    last_M = prefix + token_M
    end = prefix + tl.minimum((first_row + BLOCK_M - 1) // HEADS + 1, length)  # keys that the last row sees
    if SPLIT > 0:
        shift_M, sum_M, acc_MR = empty_state(BLOCK_M, BLOCK_R)
        for begin in range(0, end, SPLIT):
            next_shift_M, next_sum_M, next_acc_MR = _attend(
                q_MR, q_MP, last_M, begin, tl.minimum(begin + SPLIT, end), latent_ptr, k_rope_ptr, table_ptr, prefix,
                shared, own, latent_stride, k_rope_stride, scale, PAGE_SIZE, RANK, ROPE_DIM, BLOCK_L,
            )  # fmt: skip
            shift_M, sum_M, acc_MR = merge_states(shift_M, sum_M, acc_MR, next_shift_M, next_sum_M, next_acc_MR)
    else:
        shift_M, sum_M, acc_MR = _attend(
            q_MR, q_MP, last_M, 0, end, latent_ptr, k_rope_ptr, table_ptr, prefix, shared, own, latent_stride,
            k_rope_stride, scale, PAGE_SIZE, RANK, ROPE_DIM, BLOCK_L,
        )  # fmt: skip

    column = tl.arange(0, BLOCK_R)
    out_row_M = first * HEADS + row_M
    out_MR = (acc_MR / sum_M[:, None]).to(out_ptr.dtype.element_ty)
    out_mask_MR = inside_M[:, None] & (column < RANK)[None, :]
    tl.store(out_ptr + out_row_M.to(tl.int64)[:, None] * RANK + column[None, :], out_MR, mask=out_mask_MR)
    tl.store(lse_ptr + out_row_M, shift_M + tl.log2(sum_M), mask=inside_M)


def block(width: int) -> int:
    """A power of two that holds so many elements, and that `tl.dot` takes."""
    return max(triton.next_power_of_2(width), MIN_BLOCK)


def _launch(x: Latent, at: tuple[Tensor, ...], page_size: int, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; rows of latents and of rotated keys lie anywhere. The rest is as in attention's own."""
    max_queries, max_context = bounds
    tokens, heads, rank = x.q_TNR.shape
    q_TNR, q_rope_TNP, latent_rows, k_rope_rows = map(rows_last, x[:4])
    out_TNR = torch.empty((tokens, heads, rank), dtype=q_TNR.dtype, device=q_TNR.device)
    lse_TN = torch.empty((tokens, heads), dtype=torch.float32, device=q_TNR.device)
    block_m = min(block(max_queries * heads), TILE.query_rows)
    _latent_attention_kernel[max(triton.cdiv(max_queries * heads, block_m), 1), at[1].shape[0] + 1](
        q_TNR,
        q_rope_TNP,
        latent_rows,
        k_rope_rows,
        out_TNR,
        lse_TN,
        *at,
        tokens,
        at[2].stride(0),
        *q_TNR.stride()[:2],
        *q_rope_TNP.stride()[:2],
        latent_rows.stride(0),
        k_rope_rows.stride(0),
        x.scale * math.log2(math.e),
        PAGE_SIZE=page_size,
        SPLIT=KEY_SPLIT if max_context > KEY_SPLIT else 0,
        HEADS=heads,
        RANK=rank,
        ROPE_DIM=q_rope_TNP.shape[2],
        BLOCK_M=block_m,
        BLOCK_L=KEY_TILE,
        BLOCK_R=block(rank),
        BLOCK_P=block(q_rope_TNP.shape[2]),
        num_warps=TILE.warps,
        num_stages=TILE.stages,
        enable_fp_fusion=False,
    )
    return out_TNR, lse_TN


def packed(x: Latent, by: Packed) -> tuple[Tensor, Tensor]:
    """See `mla.operator.latent_attention_packed`; also the rows' log-sum-exp of scaled scores in base 2, float32 [T,
    N]."""
    return _launch(x, (by.cu_seqlens, by.prefix_len_S, by.prefix_start_S), 0, (by.max_len,) * 2)


def paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, by: Paged) -> Tensor:
    """See `mla.operator.latent_attention_paged`."""
    rows = cache.flatten(0, 1).split((q_TNR.shape[2], q_rope_TNP.shape[2]), dim=1)
    at, bounds = (by.cu_seqlens, by.context_len_S, by.block_table), (by.max_query_len, by.max_context_len)
    return _launch(Latent(q_TNR, q_rope_TNP, *rows, scale), at, cache.shape[1], bounds)[0]
