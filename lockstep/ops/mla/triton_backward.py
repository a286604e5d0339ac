"""Backward of packed latent attention in two kernels, without atomics: a program owns the rows that it writes.

The first computes the queries' gradients: a program does a tile of query rows (tokens x heads, tokens outermost) over
the keys they see, and leaves `delta = rowsum(dO * O)` for the second. The second computes the latents' and the rotated
keys': a program does a tile of one segment's keys over the query rows of some of the heads that see them, first the
segment's own from the tile on, then those of the segments whose shared prefix reaches into the tile, in their order. A
latent is key and value, so both of its gradients go into one accumulator. What the groups of heads found is added last.

Rounding points: scores, probabilities (from the forward's log-sum-exp), their gradients and the accumulators are
float32; P and dS are rounded to the inputs' dtype before a product; each gradient is rounded once.

Shape suffixes: T tokens, S segments, N heads, R latent rank, P rotated dim, M query rows of a tile, L keys of a tile,
C groups of heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.triton_tiles import find_tile, load_queries, load_rows, rows_last, scores
from .triton import block

LN_2 = tl.constexpr(math.log(2))


class LatentBackwardTile(NamedTuple):
    """How one kernel runs: query rows and keys of a tile, warps."""

    query_rows: int
    keys: int
    warps: int


QUERY_TILE, KEY_TILE = LatentBackwardTile(32, 32, 8), LatentBackwardTile(32, 32, 8)  # larger ones spill registers
GROUP = 16  # heads that a program of the second kernel does, if they divide by it


@triton.jit(do_not_specialize=["tokens", "segments"])
def _query_kernel(
    grad_ptr,  # [T, N, R], contiguous
    q_ptr,  # [T, N, R]
    q_rope_ptr,  # [T, N, P]
    latent_ptr,  # [T, R]
    k_rope_ptr,  # [T, P]
    out_ptr,  # [T, N, R], contiguous
    lse_ptr,  # [T, N]
    delta_ptr,  # [T, N], written
    dq_ptr,  # [T, N, R], contiguous, written
    dq_rope_ptr,  # [T, N, P], contiguous, written
    cu_seqlens_ptr,  # [S + 1]
    prefix_start_ptr,  # [S]
    prefix_len_ptr,
    tokens,
    segments,
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
    latent_stride,
    k_rope_stride,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    segment, tile, tiles = find_tile(cu_seqlens_ptr, prefix_len_ptr, tokens, segments, HEADS, BLOCK_M, BLOCK_S)
    if segment > segments:
        return
    first = tl.load(cu_seqlens_ptr + segment)
    first_row = (tiles - 1 - tile) * BLOCK_M  # the rows that see most come first
    row_M = first_row + tl.arange(0, BLOCK_M)
    token_M, head_M = first + row_M // HEADS, row_M % HEADS
    flat_M = (first * HEADS + row_M).to(tl.int64)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    offset_MR, offset_MP = flat_M[:, None] * RANK + r[None, :], flat_M[:, None] * ROPE_DIM + p[None, :]
    dq_MR, dq_MP = tl.zeros((BLOCK_M, BLOCK_R), tl.float32), tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    stop = tokens  # of the padding
    if segment < segments:
        stop = tl.load(cu_seqlens_ptr + segment + 1)
    inside_M = token_M < stop
    mask_MR, mask_MP = inside_M[:, None] & (r < RANK)[None, :], inside_M[:, None] & (p < ROPE_DIM)[None, :]
    if segment < segments:
        prefix = tl.load(prefix_len_ptr + segment)
        shared = tl.load(prefix_start_ptr + segment)
        own = first - prefix
        q_MR = load_queries(q_ptr, token_M, head_M, q_stride, q_head_stride, inside_M, RANK, BLOCK_R)
        q_MP = load_queries(q_rope_ptr, token_M, head_M, q_rope_stride, q_rope_head_stride, inside_M, ROPE_DIM, BLOCK_P)
        grad_MR = tl.load(grad_ptr + offset_MR, mask=mask_MR, other=0.0)
        out_MR = tl.load(out_ptr + offset_MR, mask=mask_MR, other=0.0)
        lse_M = tl.load(lse_ptr + flat_M, mask=inside_M, other=float("inf"))  # no row: P is 0
        delta_M = tl.sum(grad_MR.to(tl.float32) * out_MR.to(tl.float32), axis=1)
        tl.store(delta_ptr + flat_M, delta_M, mask=inside_M)
        position_M = prefix + row_M // HEADS
        seen = prefix + tl.minimum((first_row + BLOCK_M - 1) // HEADS + 1, stop - first)
        for start in range(0, seen, BLOCK_L):
            position_L = start + tl.arange(0, BLOCK_L)
            inside_L = position_L < seen
            row_L = tl.where(position_L < prefix, shared, own) + position_L
            k_LR = load_rows(latent_ptr, row_L, latent_stride, inside_L, True, RANK, BLOCK_R)
            k_LP = load_rows(k_rope_ptr, row_L, k_rope_stride, inside_L, True, ROPE_DIM, BLOCK_P)
            p_ML = tl.exp2(scores(q_MR, q_MP, k_LR, k_LP, ROPE_DIM) * scale - lse_M[:, None])
            p_ML = tl.where(position_L[None, :] <= position_M[:, None], p_ML, 0.0)
            dp_ML = tl.dot(grad_MR, tl.trans(k_LR), input_precision="ieee")
            ds_ML = (p_ML * (dp_ML - delta_M[:, None])).to(k_LR.dtype)
            dq_MR = tl.dot(ds_ML, k_LR, dq_MR, input_precision="ieee")
            dq_MP = tl.dot(ds_ML, k_LP, dq_MP, input_precision="ieee")
    tl.store(dq_ptr + offset_MR, (dq_MR * (scale * LN_2)).to(dq_ptr.dtype.element_ty), mask=mask_MR)
    tl.store(dq_rope_ptr + offset_MP, (dq_MP * (scale * LN_2)).to(dq_ptr.dtype.element_ty), mask=mask_MP)


@triton.jit
def _over_queries(
    dk_LR,
    dk_LP,
    k_LR,
    k_LP,
    row_L,
    visible_L,
    begin,
    end,
    first_head,
    grad_ptr,
    q_ptr,
    q_rope_ptr,
    lse_ptr,
    delta_ptr,
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
    scale,
    CAUSAL: tl.constexpr,  # a query sees keys up to its row, or else those of visible_L
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The gradients with the group's query rows of tokens `begin` to `end` added; products have keys first."""
    BLOCK_R: tl.constexpr = k_LR.shape[1]
    BLOCK_P: tl.constexpr = k_LP.shape[1]
    for start in range(begin * GROUP_HEADS, end * GROUP_HEADS, BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        token_M, head_M = row_M // GROUP_HEADS, first_head + row_M % GROUP_HEADS
        inside_M = token_M < end
        flat_M = token_M.to(tl.int64) * HEADS + head_M
        q_MR = load_queries(q_ptr, token_M, head_M, q_stride, q_head_stride, inside_M, RANK, BLOCK_R)
        q_MP = load_queries(q_rope_ptr, token_M, head_M, q_rope_stride, q_rope_head_stride, inside_M, ROPE_DIM, BLOCK_P)
        grad_MR = load_queries(grad_ptr, token_M, head_M, HEADS * RANK, RANK, inside_M, RANK, BLOCK_R)
        lse_M = tl.load(lse_ptr + flat_M, mask=inside_M, other=float("inf"))  # no row: P is 0
        delta_M = tl.load(delta_ptr + flat_M, mask=inside_M, other=0.0)
        p_LM = tl.exp2(scores(k_LR, k_LP, q_MR, q_MP, ROPE_DIM) * scale - lse_M[None, :])
        if CAUSAL:
            p_LM = tl.where(row_L[:, None] <= token_M[None, :], p_LM, 0.0)
        else:
            p_LM = tl.where(visible_L[:, None], p_LM, 0.0)
        dp_LM = tl.dot(k_LR, tl.trans(grad_MR), input_precision="ieee")
        ds_LM = (p_LM * (dp_LM - delta_M[None, :]) * (scale * LN_2)).to(q_MR.dtype)
        dk_LR = tl.dot(p_LM.to(grad_MR.dtype), grad_MR, dk_LR, input_precision="ieee")
        dk_LR = tl.dot(ds_LM, q_MR, dk_LR, input_precision="ieee")
        dk_LP = tl.dot(ds_LM, q_MP, dk_LP, input_precision="ieee")
    return dk_LR, dk_LP


@triton.jit(do_not_specialize=["tokens", "segments"])
def _key_kernel(
    grad_ptr,  # [T, N, R], contiguous
    q_ptr,  # [T, N, R]
    q_rope_ptr,  # [T, N, P]
    latent_ptr,  # [T, R]
    k_rope_ptr,  # [T, P]
    lse_ptr,  # [T, N]
    delta_ptr,
    dk_ptr,  # float32 [C, T, R], contiguous, written
    dk_rope_ptr,  # float32 [C, T, P], contiguous, written
    cu_seqlens_ptr,  # [S + 1]
    prefix_start_ptr,  # [S]
    prefix_len_ptr,
    tokens,
    segments,
    q_stride,
    q_head_stride,
    q_rope_stride,
    q_rope_head_stride,
    latent_stride,
    k_rope_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    group = tl.program_id(0)
    first_head = group * GROUP_HEADS
    segment, tile, _ = find_tile(cu_seqlens_ptr, prefix_len_ptr, tokens, segments, 1, BLOCK_L, BLOCK_S)
    if segment > segments:
        return
    first = tl.load(cu_seqlens_ptr + segment) + tile * BLOCK_L
    row_L = first + tl.arange(0, BLOCK_L)
    r, p = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    dk_LR, dk_LP = tl.zeros((BLOCK_L, BLOCK_R), tl.float32), tl.zeros((BLOCK_L, BLOCK_P), tl.float32)
    end = tokens  # of the padding
    if segment < segments:
        end = tl.load(cu_seqlens_ptr + segment + 1)
        inside_L = row_L < end
        k_LR = load_rows(latent_ptr, row_L, latent_stride, inside_L, True, RANK, BLOCK_R)
        k_LP = load_rows(k_rope_ptr, row_L, k_rope_stride, inside_L, True, ROPE_DIM, BLOCK_P)
        dk_LR, dk_LP = _over_queries(
            dk_LR, dk_LP, k_LR, k_LP, row_L, inside_L, first, end, first_head, grad_ptr, q_ptr, q_rope_ptr, lse_ptr,
            delta_ptr, q_stride, q_head_stride, q_rope_stride, q_rope_head_stride, scale, True, HEADS, GROUP_HEADS,
            RANK, ROPE_DIM, BLOCK_M,
        )  # fmt: skip
        s = tl.arange(0, BLOCK_S)
        start_S = tl.load(prefix_start_ptr + s, mask=s < segments, other=0)
        length_S = tl.load(prefix_len_ptr + s, mask=s < segments, other=0)
        last = tl.minimum(first + BLOCK_L, end)
        reaches_S = (length_S > 0) & (start_S < last) & (start_S + length_S > first)
        child = tl.min(tl.where(reaches_S, s, segments), axis=0)
        children_end = tl.max(tl.where(reaches_S, s + 1, 0), axis=0)
        while child < children_end:  # a run of segments with one prefix; its rows follow each other
            shared = tl.load(prefix_start_ptr + child)
            length = tl.load(prefix_len_ptr + child)
            other_S = (s > child) & ((start_S != shared) | (length_S != length))
            run_end = tl.min(tl.where(other_S, s, segments), axis=0)
            visible_L = (row_L >= shared) & (row_L < shared + length)
            begin = tl.load(cu_seqlens_ptr + child)
            rows_end = tl.load(cu_seqlens_ptr + run_end)
            rows_end = tl.where((shared < last) & (shared + length > first), rows_end, begin)
            dk_LR, dk_LP = _over_queries(
                dk_LR, dk_LP, k_LR, k_LP, row_L, visible_L, begin, rows_end, first_head, grad_ptr, q_ptr, q_rope_ptr,
                lse_ptr, delta_ptr, q_stride, q_head_stride, q_rope_stride, q_rope_head_stride, scale, False, HEADS,
                GROUP_HEADS, RANK, ROPE_DIM, BLOCK_M,
            )  # fmt: skip
            child = run_end
    flat_L = (tl.cast(group, tl.int64) * tokens + row_L)[:, None]
    mask_L1 = (row_L < end)[:, None]
    tl.store(dk_ptr + flat_L * RANK + r[None, :], dk_LR, mask=mask_L1 & (r < RANK)[None, :])
    tl.store(dk_rope_ptr + flat_L * ROPE_DIM + p[None, :], dk_LP, mask=mask_L1 & (p < ROPE_DIM)[None, :])


def packed(
    grad_TNR: Tensor,
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    out_TNR: Tensor,
    lse_TN: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    scale: float,
    max_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mla.operator.latent_attention_packed_backward`."""
    (tokens, heads, rank), rope_dim, segments = q_TNR.shape, k_rope_TP.shape[1], prefix_len_S.shape[0]
    q_TNR, q_rope_TNP, latent_TR, k_rope_TP = map(rows_last, (q_TNR, q_rope_TNP, latent_TR, k_rope_TP))
    grad_TNR, out_TNR = grad_TNR.contiguous(), out_TNR.contiguous()
    group = GROUP if heads % GROUP == 0 else heads

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q_TNR.device)

    def options(tile: LatentBackwardTile) -> dict[str, int]:
        return {
            "HEADS": heads,
            "RANK": rank,
            "ROPE_DIM": rope_dim,
            "BLOCK_M": tile.query_rows,
            "BLOCK_L": tile.keys,
            "BLOCK_R": block(rank),
            "BLOCK_P": block(rope_dim),
            "BLOCK_S": triton.next_power_of_2(segments + 1),
            "num_warps": tile.warps,
            "num_stages": 1,
            "enable_fp_fusion": True,
        }

    inputs = grad_TNR, q_TNR, q_rope_TNP, latent_TR, k_rope_TP
    strides = *q_TNR.stride()[:2], *q_rope_TNP.stride()[:2], latent_TR.stride(0), k_rope_TP.stride(0)
    rest = cu_seqlens, prefix_start_S, prefix_len_S, tokens, segments, *strides, scale * math.log2(math.e)
    delta_TN, dq_TNR = floats(tokens, heads), q_TNR.new_empty(q_TNR.shape)
    dq_rope_TNP = q_TNR.new_empty(q_rope_TNP.shape)
    grid = (1, triton.cdiv(tokens * heads, QUERY_TILE.query_rows) + segments + 1)  # a segment's last tile may be short
    _query_kernel[grid](
        *inputs, out_TNR, lse_TN, delta_TN, dq_TNR, dq_rope_TNP, *rest, **options(QUERY_TILE)
    )  # fmt: skip
    parts = floats(heads // group, tokens, rank), floats(heads // group, tokens, rope_dim)
    grid = (heads // group, triton.cdiv(tokens, KEY_TILE.keys) + segments + 1)
    _key_kernel[grid](*inputs, lse_TN, delta_TN, *parts, *rest, GROUP_HEADS=group, **options(KEY_TILE))
    dlatent_TR, dk_rope_TP = (part.sum(0).to(latent_TR.dtype) for part in parts)
    return dq_TNR, dq_rope_TNP, dlatent_TR, dk_rope_TP
