"""Backward of packed attention, dense and latent, in two kernels without atomics: a program owns the rows of the
gradients that it writes.

The first computes dQ: a program handles a tile of query rows (tokens x heads of a group, tokens outermost) over the
keys they see, and stores `delta = rowsum(dO * O)` for the second. The second computes dK and dV: a program handles a
tile of one segment's keys over the query rows that see them, first the segment's own from the tile on, then those of
the segments whose shared prefix reaches into the tile, in order. So the packing alone fixes the order of additions.

The tiles of all segments are numbered consecutively, and a program finds its own on the device, so grids depend on
shapes alone. Rows after the last segment are one more segment, whose gradients are zero.

If ROPE_DIM > 0 (see `triton_tiles`), a latent is both key and value, so both of its gradients go into one accumulator,
and each program of the second kernel handles a group of heads, whose sums are stored separately.

Rounding points: scores, probabilities (from the forward's log-sum-exp), their gradients and the accumulators are
float32; P and dS are rounded to the inputs' dtype before a product; each gradient is rounded once. The method is
FlashAttention-2's (Dao 2023, algorithm 2), with the loops over queries and over keys in separate kernels.

Shape suffixes: T tokens, S segments, N query heads, K kv heads, G query heads of a kv head, H head dim, P rotated dim,
M query rows of a tile, L keys of a tile, C groups of heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import PLAIN, AttentionGradient, AttentionScores, Packed
from ..rows import LN_2, unit_inner
from . import triton_scores
from .triton_gradient_tiles import Rows, add_to_dk_dv, add_to_dq, find_tile, store_keys
from .triton_scores import first_tile, sinks_gradient
from .triton_tiles import (
    LONG_CONTEXT,
    AttentionForm,
    AttentionTile,
    Keys,
    Queries,
    block_size,
    load_key_parts,
    load_query_parts,
    load_rows,
    store_rows,
)

DQ_TILE, DKV_TILE = AttentionTile(64, 4, 2, keys=32), AttentionTile(64, 4, 2, keys=64)
LONG_DQ_TILE = AttentionTile(128, 8, 3, keys=64)  # above `LONG_CONTEXT` keys, like the next
LONG_DKV_TILE = AttentionTile(64, 8, 2, keys=128)
SMALL_TILE = AttentionTile(32, 4, 1, keys=32)  # for both kernels, for float32 and for head dims above 128


@triton.jit(do_not_specialize=["tokens", "segments"])
def _query_kernel(
    grad_ptr,  # [T, N, H], contiguous
    q_ptr,  # [T, N, H]
    k_ptr,  # [T, K, H]
    v_ptr,
    out_ptr,  # [T, N, H], contiguous
    lse_ptr,  # [K, T, G]
    delta_ptr,  # [K, T, G], written
    dq_ptr,  # [T, N, H], heads contiguous, written
    cu_seqlens_ptr,  # [S + 1]
    prefix_start_ptr,  # [S]
    prefix_len_ptr,
    tokens,
    segments,
    q_stride,
    q_head_stride,
    k_stride: tl.constexpr,
    k_head_stride,
    v_stride: tl.constexpr,
    v_head_stride,
    scale,
    dq_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_LONG: tl.constexpr,  # whether tiles without masks have a loop of their own
    q_rope_ptr=None,  # [T, N, P]; these if ROPE_DIM > 0, and then v_ptr is not read
    q_rope_stride=None,
    q_rope_head_stride=None,
    k_rope_ptr=None,  # [T, P]
    k_rope_stride: tl.constexpr = None,
    dq_rope_ptr=None,  # [T, N, P], contiguous, written
    ROPE_DIM: tl.constexpr = 0,
    BLOCK_P: tl.constexpr = 0,
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    kv_head, index = tl.program_id(0) % (HEADS // GROUP), tl.program_id(0) // (HEADS // GROUP)
    segment, tile, tiles = find_tile(index, cu_seqlens_ptr, prefix_len_ptr, tokens, segments, GROUP, BLOCK_M, BLOCK_S)
    if segment > segments:
        return
    first = tl.load(cu_seqlens_ptr + segment)
    first_row = (tiles - 1 - tile) * BLOCK_M  # the rows that see the most keys come first
    row_M = first_row + tl.arange(0, BLOCK_M)
    token_M, head_M = first + row_M // GROUP, kv_head * GROUP + row_M % GROUP
    dq_offset_M = token_M.to(tl.int64) * dq_stride + head_M * HEAD_DIM
    dq_rope_offset_M = (first * GROUP + row_M).to(tl.int64) * ROPE_DIM
    dq_MH = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    dq_MP = dq_MH
    if ROPE_DIM > 0:
        dq_MP = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    if segment == segments:
        store_rows(dq_ptr, dq_MH, dq_offset_M, token_M < tokens, HEAD_DIM)
        if ROPE_DIM > 0:
            store_rows(dq_rope_ptr, dq_MP, dq_rope_offset_M, token_M < tokens, ROPE_DIM)
        return

    end = tl.load(cu_seqlens_ptr + segment + 1)
    prefix = tl.load(prefix_len_ptr + segment)
    shared = tl.load(prefix_start_ptr + segment)
    own = first - prefix
    inside_M = token_M < end
    queries = Queries(q_ptr, q_stride, q_head_stride, q_rope_ptr, q_rope_stride, q_rope_head_stride)
    FORM: tl.constexpr = AttentionForm(HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P, WINDOW, FACTOR, 0, HEADS, GROUP)
    q = load_query_parts(queries, token_M, head_M, inside_M, FORM)
    output_M = token_M * HEADS + head_M
    grad_MH = load_rows(grad_ptr, output_M, HEAD_DIM, inside_M, True, HEAD_DIM, BLOCK_H)
    out_MH = load_rows(out_ptr, output_M, HEAD_DIM, inside_M, True, HEAD_DIM, BLOCK_H)
    statistic_M = (kv_head * tokens + first) * GROUP + row_M
    lse_M = tl.load(lse_ptr + statistic_M, mask=inside_M, other=float("inf"))  # no row: P is 0
    delta_M = tl.sum(grad_MH.to(tl.float32) * out_MH.to(tl.float32), axis=1)
    tl.store(delta_ptr + statistic_M, delta_M, mask=inside_M)

    position_M = prefix + row_M // GROUP
    seen_by_all = (prefix + first_row // GROUP + 1) // BLOCK_L * BLOCK_L
    seen = prefix + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, end - first)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    keys = Keys(k_ptr, v_ptr, k_stride, v_stride, None, prefix, shared, own, k_rope_ptr, k_rope_stride)
    begin = 0
    dq = (dq_MH, dq_MP)
    if WINDOW > 0:
        begin = first_tile(prefix + first_row // GROUP, WINDOW, BLOCK_L)
        seen_by_all = tl.maximum(seen_by_all, begin)
        if IS_LONG:
            entered = tl.cdiv(tl.maximum(seen - WINDOW, 0), BLOCK_L) * BLOCK_L  # from here on, all windows have begun
            entered = tl.maximum(begin, tl.minimum(entered, seen_by_all))
            dq = add_to_dq(dq, q, grad_MH, lse_M, delta_M, position_M, begin, entered, keys, scale, True, BLOCK_L, FORM)
            begin = entered
    if IS_LONG:
        dq = add_to_dq(
            dq, q, grad_MH, lse_M, delta_M, position_M, begin, seen_by_all, keys, scale, False, BLOCK_L, FORM
        )
        begin = seen_by_all
    dq_MH, dq_MP = add_to_dq(dq, q, grad_MH, lse_M, delta_M, position_M, begin, seen, keys, scale, True, BLOCK_L, FORM)
    if FACTOR > 0:
        dq_MH = dq_MH * FACTOR
    store_rows(dq_ptr, dq_MH * (scale * LN_2), dq_offset_M, inside_M, HEAD_DIM)
    if ROPE_DIM > 0:
        store_rows(dq_rope_ptr, dq_MP * (scale * LN_2), dq_rope_offset_M, inside_M, ROPE_DIM)


@triton.jit(do_not_specialize=["tokens", "segments"])
def _key_kernel(
    grad_ptr,  # [T, N, H], contiguous
    q_ptr,  # [T, N, H]
    k_ptr,  # [T, K, H]
    v_ptr,
    lse_ptr,  # [K, T, G]
    delta_ptr,
    dk_ptr,  # [T, K, H], heads contiguous, written; if ROPE_DIM > 0, float32 [C, T, H], contiguous
    dv_ptr,  # likewise; if ROPE_DIM > 0, float32 [C, T, P], dK of the rotated part
    cu_seqlens_ptr,  # [S + 1]
    prefix_start_ptr,  # [S]
    prefix_len_ptr,
    tokens,
    segments,
    q_stride: tl.constexpr,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    scale,
    dk_stride,
    dv_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head; if ROPE_DIM > 0, heads per program
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    IS_LONG: tl.constexpr,  # whether tiles without masks have a loop of their own
    q_rope_ptr=None,  # [T, N, P]; these if ROPE_DIM > 0, and then v_ptr is not read
    q_rope_stride: tl.constexpr = None,
    q_rope_head_stride=None,
    k_rope_ptr=None,  # [T, P]
    k_rope_stride=None,
    ROPE_DIM: tl.constexpr = 0,
    BLOCK_P: tl.constexpr = 0,
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    kv_head, index = tl.program_id(0) % (HEADS // GROUP), tl.program_id(0) // (HEADS // GROUP)
    segment, tile, _ = find_tile(index, cu_seqlens_ptr, prefix_len_ptr, tokens, segments, 1, BLOCK_L, BLOCK_S)
    if segment > segments:
        return
    first = tl.load(cu_seqlens_ptr + segment) + tile * BLOCK_L
    row_L = first + tl.arange(0, BLOCK_L)
    WIDTH: tl.constexpr = ROPE_DIM if ROPE_DIM > 0 else HEAD_DIM  # of the second gradient
    dk_LH = tl.zeros((BLOCK_L, BLOCK_H), tl.float32)
    dv_LX = tl.zeros((BLOCK_L, BLOCK_P if ROPE_DIM > 0 else BLOCK_H), tl.float32)
    if segment == segments:
        store_keys(dk_ptr, dk_LH, kv_head, row_L, row_L < tokens, tokens, dk_stride, HEAD_DIM, ROPE_DIM)
        store_keys(dv_ptr, dv_LX, kv_head, row_L, row_L < tokens, tokens, dv_stride, WIDTH, ROPE_DIM)
        return

    end = tl.load(cu_seqlens_ptr + segment + 1)
    visible_L = row_L < end
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    keys = Keys(k_ptr, v_ptr, k_stride, v_stride, None, 0, 0, 0, k_rope_ptr, k_rope_stride)
    FORM: tl.constexpr = AttentionForm(HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P, WINDOW, FACTOR, 0, HEADS, GROUP)
    keys = load_key_parts(keys, row_L, visible_L, True, FORM)
    grad_ptr += kv_head * GROUP * HEAD_DIM
    q_ptr += kv_head * GROUP * q_head_stride
    if ROPE_DIM > 0:
        q_rope_ptr += kv_head * GROUP * q_rope_head_stride
        lse_ptr += kv_head * GROUP
        delta_ptr += kv_head * GROUP
    else:
        lse_ptr += kv_head * tokens * GROUP
        delta_ptr += kv_head * tokens * GROUP
    queries = Queries(q_ptr, q_stride, q_head_stride, q_rope_ptr, q_rope_stride, q_rope_head_stride)
    rows = Rows(queries, grad_ptr, lse_ptr, delta_ptr)

    grads = (dk_LH, dv_LX)
    begin, rows_end = first * GROUP, end * GROUP
    if WINDOW > 0:
        rows_end = tl.minimum(end, tl.minimum(first + BLOCK_L, end) - 1 + WINDOW) * GROUP
    stop = rows_end
    if IS_LONG:
        after = begin + tl.cdiv(BLOCK_L * GROUP, BLOCK_M) * BLOCK_M  # from here on, rows see the whole tile
        stop = tl.minimum(after, rows_end)
    grads = add_to_dk_dv(grads, keys, row_L, visible_L, begin, stop, rows_end, rows, scale, "causal", BLOCK_M, FORM)
    if IS_LONG:
        stop = rows_end
        if WINDOW > 0:  # rows that see the tile's first key see them all
            stop = tl.minimum(rows_end, tl.maximum(after, begin + WINDOW * GROUP // BLOCK_M * BLOCK_M))
        grads = add_to_dk_dv(grads, keys, row_L, visible_L, after, stop, rows_end, rows, scale, "none", BLOCK_M, FORM)
        if WINDOW > 0:
            stop = tl.maximum(after, begin + WINDOW * GROUP // BLOCK_M * BLOCK_M)
            grads = add_to_dk_dv(
                grads, keys, row_L, visible_L, stop, rows_end, rows_end, rows, scale, "causal", BLOCK_M, FORM
            )

    s = tl.arange(0, BLOCK_S)
    start_S = tl.load(prefix_start_ptr + s, mask=s < segments, other=0)
    length_S = tl.load(prefix_len_ptr + s, mask=s < segments, other=0)
    last = tl.minimum(first + BLOCK_L, end)
    reaches_S = (length_S > 0) & (start_S < last) & (start_S + length_S > first)
    child = tl.min(tl.where(reaches_S, s, segments), axis=0)
    children_end = tl.max(tl.where(reaches_S, s + 1, 0), axis=0)
    while child < children_end:  # a run of segments with the same prefix, whose rows are consecutive
        shared = tl.load(prefix_start_ptr + child)
        length = tl.load(prefix_len_ptr + child)
        other_S = (s > child) & ((start_S != shared) | (length_S != length))
        run_end = tl.min(tl.where(other_S, s, segments), axis=0)
        visible_L = (row_L >= shared) & (row_L < shared + length)
        shift = 0
        if WINDOW > 0:  # each segment's rows have positions of their own
            run_end = child + 1
        run = tl.load(cu_seqlens_ptr + child) * GROUP
        rows_end = tl.load(cu_seqlens_ptr + run_end) * GROUP
        if WINDOW > 0:
            shift = shared + length - run // GROUP
            rows_end = tl.minimum(rows_end, (tl.minimum(last, shared + length) - 1 + WINDOW - shift) * GROUP)
        rows_end = tl.where((shared < last) & (shared + length > first), rows_end, run)
        grads = add_to_dk_dv(
            grads, keys, row_L, visible_L, run, rows_end, rows_end, rows, scale, "visible", BLOCK_M, FORM, shift
        )
        child = run_end
    dk_LH, dv_LX = grads
    if FACTOR > 0:
        dk_LH = dk_LH * FACTOR
    if ROPE_DIM == 0:
        dk_LH = dk_LH * (scale * LN_2)
    store_keys(dk_ptr, dk_LH, kv_head, row_L, row_L < end, tokens, dk_stride, HEAD_DIM, ROPE_DIM)
    store_keys(dv_ptr, dv_LX, kv_head, row_L, row_L < end, tokens, dv_stride, WIDTH, ROPE_DIM)


def _choose_tiles(max_len: int, head_dim: int, dtype: torch.dtype) -> tuple[AttentionTile, AttentionTile]:
    """For dQ, and for dK and dV."""
    if dtype.itemsize > 2 or head_dim > 128:
        return SMALL_TILE, SMALL_TILE
    return (LONG_DQ_TILE, LONG_DKV_TILE) if max_len > LONG_CONTEXT else (DQ_TILE, DKV_TILE)


def packed(x: AttentionGradient, layout: Packed, scores: AttentionScores = PLAIN) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, if there are any, the sinks."""
    grads = tuple(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in x[1:4])
    delta_KTG = packed_into(grads, x, layout, scores)
    return grads if scores.sinks_N is None else (*grads, sinks_gradient(x, layout, scores.sinks_N, delta_KTG))


def packed_into(
    grads: tuple[Tensor, ...], x: AttentionGradient, layout: Packed, scores: AttentionScores = PLAIN
) -> Tensor:
    """`packed`, written to `grads` of q, k and v, in each of which a token's heads are contiguous. Returns what
    `launch` does."""
    head_dim = x.q_TNH.shape[2]
    scale, constants = triton_scores.score_arguments(scores, head_dim)
    tiles = _choose_tiles(layout.max_len, head_dim, x.q_TNH.dtype)
    return launch(grads, x, layout, scale, tiles, (constants, constants))


def launch(
    grads: tuple[Tensor, ...],
    x: AttentionGradient,
    layout: Packed,
    scale: float,
    tiles: tuple[AttentionTile, AttentionTile],
    extra: tuple[dict[str, Any], dict[str, Any]],
) -> Tensor:
    """Run both kernels, each with its tile and with its `extra`, the arguments for latents and for `AttentionScores`;
    for latents, the second's include GROUP. Returns `delta`, float32 [K, T, G], which is not set in padding."""
    read = q_TNH, k_TKH, _ = tuple(map(unit_inner, x[1:4]))
    (tokens, heads, head_dim), kv_heads, segments = q_TNH.shape, k_TKH.shape[1], layout.prefix_len_S.shape[0]
    grad_TNH, out_TNH = x.grad_TNH.contiguous(), x.out_TNH.contiguous()
    (dq_TNH, dk_TKH, dv_TKH), lse_KTG, delta_KTG = grads, x.lse_KTG, torch.empty_like(x.lse_KTG)
    strides = (stride for part in read for stride in part.stride()[:2])
    shared = (*layout[:3], tokens, segments, *strides, scale * math.log2(math.e))

    def options(tile: AttentionTile, own: dict[str, Any]) -> dict[str, Any]:
        return {
            **{"HEADS": heads, "GROUP": heads // kv_heads, "HEAD_DIM": head_dim, "BLOCK_H": block_size(head_dim)},
            **{"BLOCK_M": tile.query_rows, "BLOCK_L": tile.keys, "BLOCK_S": triton.next_power_of_2(segments + 1)},
            "IS_LONG": layout.max_len > LONG_CONTEXT and "ROPE_DIM" not in own,
            **{"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True},
            **own,
        }

    query_options, key_options = map(options, tiles, extra)
    rows = tokens * query_options["GROUP"]
    query_tiles = triton.cdiv(rows, tiles[0].query_rows) + segments + 1  # a segment's last tile may be short
    key_tiles = triton.cdiv(tokens, tiles[1].keys) + segments + 1
    grid = (kv_heads * query_tiles,)  # the limit of a grid's second axis is too small
    _query_kernel[grid](
        grad_TNH, *read, out_TNH, lse_KTG, delta_KTG, dq_TNH, *shared, dq_TNH.stride(0), **query_options
    )
    grid = (heads // key_options["GROUP"] * key_tiles,)
    grad_strides = dk_TKH.stride(0), dv_TKH.stride(0)
    _key_kernel[grid](grad_TNH, *read, lse_KTG, delta_KTG, dk_TKH, dv_TKH, *shared, *grad_strides, **key_options)
    return delta_KTG
