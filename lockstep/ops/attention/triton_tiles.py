"""The expression that every attention kernel evaluates: key tiles, their online softmax, and the merging of splits. And
the sums of its gradients, over keys and over queries.

Keys come in tiles of `KEY_TILE` at absolute positions, ascending; at every multiple of `KEY_SPLIT` a fresh online
softmax begins, and the splits' states are merged left to right. A tile that is masked for a row multiplies its
accumulators by 1 and adds 0; a split in which a row sees no key is skipped. The order of a tile's row sum is written
out (`row_sum`), so nothing depends on a query tile's rows, on its warps or on how the compiler lays them out.

Rounding points: scores, maxima, sums and the output's accumulator are float32; probabilities are rounded to the values'
dtype before the second product, their sum is taken before that rounding; the result is rounded once.

A state is (shift, sum, acc): the row's largest score times `scale` (which holds log2(e)), the sum of exponentials and
the output before its division, both relative to that shift.

With a window, tiles before it are left out: of a row that sees none of a tile's keys yet, the state stays empty.
`triton_scores` has what else a layer may want of its scores.

Latent attention has the same expression. There ROPE_DIM > 0: queries and keys have a rotated part of that width beside
them, whose products are added last to a score, in the same accumulator; and a tile of keys is also that of the values.

Shape suffixes: H head dim, P rotated dim, M query rows of a program, L keys of a tile, S segments.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .reference import KEY_TILE
from .triton_scores import tanh

MIN_BLOCK = 16  # tl.dot's smallest side
LONG = 512  # keys of a sequence above which larger tiles of queries pay
LN_2 = tl.constexpr(math.log(2))


class AttentionTile(NamedTuple):
    """How a kernel runs: query rows of a program, warps, pipeline stages, and, where they are free, keys of a tile."""

    query_rows: int
    warps: int
    stages: int
    keys: int = KEY_TILE


class Queries(NamedTuple):
    """In a kernel: query rows of tokens and heads, and their rotated part if ROPE_DIM > 0."""

    ptr: Any
    stride: Any
    head_stride: Any
    rope_ptr: Any = None
    rope_stride: Any = None
    rope_head_stride: Any = None


class Keys(NamedTuple):
    """In a kernel: the keys and values of a kv head, and where `key_rows` finds a position's row."""

    k_ptr: Any
    v_ptr: Any
    k_stride: Any
    v_stride: Any
    table_ptr: Any
    prefix: Any
    shared: Any
    own: Any
    rope_ptr: Any = None
    rope_stride: Any = None


@triton.jit
def key_rows(position_L, end, table_ptr, prefix, shared, own, PAGE_SIZE: tl.constexpr):
    """Rows (int32) of absolute positions below `end`: by the block table when PAGE_SIZE > 0, else `shared + position`
    in the prefix and `own + position` after it."""
    if PAGE_SIZE > 0:
        page_L = tl.load(table_ptr + position_L // PAGE_SIZE, mask=position_L < end, other=0)
        return page_L * PAGE_SIZE + position_L % PAGE_SIZE
    else:
        return tl.where(position_L < prefix, shared, own) + position_L


@triton.jit
def load_rows(ptr, row_L, stride, inside_L, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of keys or values; with MASKED, zeros where not inside."""
    h = tl.arange(0, BLOCK_H)
    at_LH = ptr + (row_L.to(tl.int64) * stride)[:, None] + h[None, :]
    if MASKED or HEAD_DIM != BLOCK_H:
        return tl.load(at_LH, mask=inside_L[:, None] & (h < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at_LH)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """The state before the first key."""
    shift_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return shift_M, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_H), tl.float32)


@triton.jit
def row_sum(p_ML, BLOCK_M: tl.constexpr):
    """Sums over a tile's 64 keys: for each t the keys 8 j + 2 t + b in order of (j, b), then t = (0 + 2) + (1 + 3). It
    is the order of the matrix instruction's own layout, where it costs no more than `tl.sum`."""
    p_M6 = tl.reshape(p_ML, (BLOCK_M, 2, 2, 2, 4, 2))  # M, the bits of j, t, b
    j0246, j1357 = tl.split(tl.permute(p_M6, (0, 4, 5, 1, 2, 3)))  # first what warps may lie along
    j04, j26 = tl.split(j0246)
    j15, j37 = tl.split(j1357)
    j0, j4 = tl.split(j04)
    j1, j5 = tl.split(j15)
    j2, j6 = tl.split(j26)
    j3, j7 = tl.split(j37)
    even, odd = tl.split(j0)
    sum_M4 = even + odd
    rest = (j1, j2, j3, j4, j5, j6, j7)
    for j in tl.static_range(len(rest)):
        even, odd = tl.split(rest[j])
        sum_M4 = (sum_M4 + even) + odd
    return tl.sum(tl.sum(tl.reshape(sum_M4, (BLOCK_M, 2, 2)), axis=1), axis=1)


@triton.jit
def load_queries(ptr, token_M, head_M, stride, head_stride, inside_M, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rows [M, H] of [T, N, HEAD_DIM], zeros where not inside."""
    h = tl.arange(0, BLOCK_H)
    offset_M = token_M.to(tl.int64) * stride + head_M * head_stride
    return tl.load(ptr + offset_M[:, None] + h[None, :], inside_M[:, None] & (h < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_query_parts(
    x,
    token_M,
    head_M,
    inside_M,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """`load_queries` of both parts of `Queries`; where there is one, it stands for the other."""
    q_MH = load_queries(x.ptr, token_M, head_M, x.stride, x.head_stride, inside_M, HEAD_DIM, BLOCK_H)
    q_MP = q_MH
    if ROPE_DIM > 0:
        q_MP = load_queries(x.rope_ptr, token_M, head_M, x.rope_stride, x.rope_head_stride, inside_M, ROPE_DIM, BLOCK_P)
    return q_MH, q_MP


@triton.jit
def load_key_parts(
    x,
    row_L,
    inside_L,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """`load_rows` of keys, of values and of the keys' rotated part, from `Keys`; keys stand for what there is not."""
    k_LH = load_rows(x.k_ptr, row_L, x.k_stride, inside_L, MASKED, HEAD_DIM, BLOCK_H)
    if ROPE_DIM > 0:
        return k_LH, k_LH, load_rows(x.rope_ptr, row_L, x.rope_stride, inside_L, MASKED, ROPE_DIM, BLOCK_P)
    else:
        return k_LH, load_rows(x.v_ptr, row_L, x.v_stride, inside_L, MASKED, HEAD_DIM, BLOCK_H), k_LH


@triton.jit
def scores(q_MH, q_MP, k_LH, k_LP, ROPE_DIM: tl.constexpr):
    """Products of query rows and keys, float32 [M, L]."""
    score_ML = tl.dot(q_MH, tl.trans(k_LH), input_precision="ieee")
    if ROPE_DIM > 0:
        score_ML = tl.dot(q_MP, tl.trans(k_LP), score_ML, input_precision="ieee")
    return score_ML


@triton.jit
def attend(
    state,
    q,  # [M, H], and [M, P] if ROPE_DIM > 0
    last_M,  # the last position that a row sees
    begin,  # a multiple of BLOCK_L
    end,
    keys,
    scale,
    MASKED: tl.constexpr,  # some row does not see some of the keys
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    lowest=0,  # what no row sees a key before, if WINDOW > 0
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    """The state with the keys at positions `begin` to `end` added: a tile of the online softmax (Milakov and Gimelshein
    2018) after the other."""
    shift_M, sum_M, acc_MH = state
    q_MH, q_MP = q
    BLOCK_M: tl.constexpr = q_MH.shape[0]
    BLOCK_H: tl.constexpr = q_MH.shape[1]
    BLOCK_P: tl.constexpr = q_MP.shape[1] if ROPE_DIM > 0 else 0
    row_L = key_rows(begin + tl.arange(0, BLOCK_L), end, keys.table_ptr, keys.prefix, keys.shared, keys.own, PAGE_SIZE)
    for start in range(begin, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        inside_L = position_L < end
        if WINDOW > 0:
            inside_L = inside_L & (position_L >= lowest)
        k_LH, v_LH, k_LP = load_key_parts(keys, row_L, inside_L, MASKED, HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P)
        visible_ML = position_L[None, :] <= last_M[:, None]
        if WINDOW > 0:
            visible_ML = visible_ML & (position_L[None, :] > last_M[:, None] - WINDOW)
        score_ML = scores(q_MH, q_MP, k_LH, k_LP, ROPE_DIM)
        if FACTOR > 0:
            score_ML = tanh(score_ML * FACTOR)
        if MASKED:
            score_ML = tl.where(visible_ML, score_ML, float("-inf"))
        new_M = tl.maximum(shift_M, tl.max(score_ML, axis=1) * scale)
        finite_M = new_M
        if MASKED:
            finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # no visible key yet: every exp2 below is 0
        p_ML = tl.exp2(tl.fma(score_ML, scale, -finite_M[:, None]))
        alpha_M = tl.exp2(shift_M - finite_M)
        sum_M = tl.fma(sum_M, alpha_M, row_sum(p_ML, BLOCK_M))
        acc_MH = tl.dot(p_ML.to(v_LH.dtype), v_LH, acc_MH * alpha_M[:, None], input_precision="ieee")
        shift_M = new_M
        row_L = key_rows(  # a tile ahead
            position_L + BLOCK_L, end, keys.table_ptr, keys.prefix, keys.shared, keys.own, PAGE_SIZE
        )
    return shift_M, sum_M, acc_MH


@triton.jit
def merge_states(state, next_state):
    """The state of the splits so far with the next one's added; exactly the other's where one has no key."""
    shift_M, sum_M, acc_MH = state
    next_shift_M, next_sum_M, next_acc_MH = next_state
    new_M = tl.maximum(shift_M, next_shift_M)
    finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    alpha_M, beta_M = tl.exp2(shift_M - finite_M), tl.exp2(next_shift_M - finite_M)
    only_M, none_M = sum_M == 0.0, next_sum_M == 0.0
    total_M = sum_M * alpha_M + next_sum_M * beta_M
    total_M = tl.where(none_M, sum_M, tl.where(only_M, next_sum_M, total_M))
    total_MH = acc_MH * alpha_M[:, None] + next_acc_MH * beta_M[:, None]
    total_MH = tl.where(none_M[:, None], acc_MH, tl.where(only_M[:, None], next_acc_MH, total_MH))
    return new_M, total_M, total_MH


@triton.jit
def over_keys(
    dq_MH,
    dq_MP,  # if ROPE_DIM > 0
    q,  # [M, H], and [M, P] if ROPE_DIM > 0
    grad_MH,
    lse_M,
    delta_M,
    position_M,
    begin,
    end,
    keys,
    scale,
    MASKED: tl.constexpr,  # some row does not see some of the keys
    HEAD_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    """dQ with the keys at positions `begin` to `end` added."""
    BLOCK_H: tl.constexpr = grad_MH.shape[1]
    for start in range(begin, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        row_L = key_rows(position_L, end, keys.table_ptr, keys.prefix, keys.shared, keys.own, 0)
        k_LH, v_LH, k_LP = load_key_parts(keys, row_L, position_L < end, MASKED, HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P)
        score_ML = scores(q[0], q[1], k_LH, k_LP, ROPE_DIM)
        if FACTOR > 0:
            score_ML = tanh(score_ML * FACTOR)
        p_ML = tl.exp2(score_ML * scale - lse_M[:, None])
        if MASKED:
            p_ML = tl.where(position_L[None, :] <= position_M[:, None], p_ML, 0.0)
            if WINDOW > 0:
                p_ML = tl.where(position_L[None, :] > position_M[:, None] - WINDOW, p_ML, 0.0)
        dp_ML = tl.dot(grad_MH, tl.trans(v_LH), input_precision="ieee")
        ds_ML = p_ML * (dp_ML - delta_M[:, None])
        if FACTOR > 0:
            ds_ML = ds_ML * (1.0 - score_ML * score_ML)
        ds_ML = ds_ML.to(k_LH.dtype)
        dq_MH = tl.dot(ds_ML, k_LH, dq_MH, input_precision="ieee")
        if ROPE_DIM > 0:
            dq_MP = tl.dot(ds_ML, k_LP, dq_MP, input_precision="ieee")
    return dq_MH, dq_MP


class Rows(NamedTuple):
    """In a kernel: what the forward and the first kernel left of a kv head's query rows."""

    grad_ptr: Any
    grad_stride: Any
    lse_ptr: Any
    delta_ptr: Any


@triton.jit
def over_queries(
    dk_LH,
    other_LX,  # dV; if ROPE_DIM > 0, dK of the rotated part
    keys,  # [L, H], values [L, H], and the rotated part [L, P] if ROPE_DIM > 0
    row_L,
    visible_L,
    begin,
    stop,
    end,
    queries,
    rows,
    scale,
    MASK: tl.constexpr,  # "causal": a query sees keys up to its row; "visible": those of visible_L; "none": all
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # if ROPE_DIM > 0
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    shift=0,  # of a row's token, to what keys' rows are counted from, if WINDOW > 0
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    """The gradients with the query rows (token * G + head) of the tiles that start in `begin` to `stop` added, those
    below `end`; products are transposed, keys first."""
    k_LH, v_LH, k_LP = keys
    BLOCK_H: tl.constexpr = k_LH.shape[1]
    for start in range(begin, stop, BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        token_M, head_M = row_M // GROUP, row_M % GROUP
        inside_M, statistic_M = row_M < end, row_M
        if ROPE_DIM > 0:
            statistic_M = token_M.to(tl.int64) * HEADS + head_M
        q_MH, q_MP = load_query_parts(queries, token_M, head_M, inside_M, HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P)
        grad_MH = load_queries(rows.grad_ptr, token_M, head_M, rows.grad_stride, HEAD_DIM, inside_M, HEAD_DIM, BLOCK_H)
        lse_M = tl.load(rows.lse_ptr + statistic_M, mask=inside_M, other=float("inf"))  # no row: P is 0
        delta_M = tl.load(rows.delta_ptr + statistic_M, mask=inside_M, other=0.0)
        score_LM = scores(k_LH, k_LP, q_MH, q_MP, ROPE_DIM)
        if FACTOR > 0:
            score_LM = tanh(score_LM * FACTOR)
        p_LM = tl.exp2(score_LM * scale - lse_M[None, :])
        if MASK == "causal":
            p_LM = tl.where(row_L[:, None] <= token_M[None, :], p_LM, 0.0)
        if MASK == "visible":
            p_LM = tl.where(visible_L[:, None], p_LM, 0.0)
        if WINDOW > 0 and MASK != "none":
            p_LM = tl.where(token_M[None, :] + shift - row_L[:, None] < WINDOW, p_LM, 0.0)
        if ROPE_DIM == 0:
            other_LX = tl.dot(p_LM.to(grad_MH.dtype), grad_MH, other_LX, input_precision="ieee")
        dp_LM = tl.dot(v_LH, tl.trans(grad_MH), input_precision="ieee")
        ds_LM = p_LM * (dp_LM - delta_M[None, :])
        if FACTOR > 0:
            ds_LM = ds_LM * (1.0 - score_LM * score_LM)
        if ROPE_DIM > 0:
            ds_LM = ds_LM * (scale * LN_2)  # beside dV, which has no such factor
            dk_LH = tl.dot(p_LM.to(grad_MH.dtype), grad_MH, dk_LH, input_precision="ieee")
            other_LX = tl.dot(ds_LM.to(q_MH.dtype), q_MP, other_LX, input_precision="ieee")
        dk_LH = tl.dot(ds_LM.to(q_MH.dtype), q_MH, dk_LH, input_precision="ieee")
    return dk_LH, other_LX


@triton.jit
def find_tile(
    cu_seqlens_ptr,
    prefix_len_ptr,
    tokens,
    segments,
    ROWS: tl.constexpr,  # rows a token
    BLOCK: tl.constexpr,  # rows a tile
    BLOCK_S: tl.constexpr,
):
    """The segment of tile number `program_id(1)`, the tile's place in it and the segment's tiles.

    Segment `segments` is the padding, a larger one means that no tile is left. Segments without a prefix come first:
    their keys may be a shared prompt's, whose programs run longest.
    """
    index = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    first_S = tl.load(cu_seqlens_ptr + s, mask=s <= segments, other=tokens)
    end_S = tl.load(cu_seqlens_ptr + s + 1, mask=s < segments, other=tokens)
    prefix_S = tl.load(prefix_len_ptr + s, mask=s < segments, other=1)
    tiles_S = tl.cdiv((end_S - first_S) * ROWS, BLOCK)
    root_tiles_S = tl.where(prefix_S == 0, tiles_S, 0)
    root_tiles = tl.sum(root_tiles_S, axis=0)
    is_root = index < root_tiles
    tiles_S = tl.where(is_root, root_tiles_S, tiles_S - root_tiles_S)
    index = tl.where(is_root, index, index - root_tiles)
    segment = tl.sum((tl.cumsum(tiles_S, axis=0) <= index).to(tl.int32), axis=0)
    tile = index - tl.sum(tl.where(s < segment, tiles_S, 0), axis=0)
    return segment, tile, tl.sum(tl.where(s == segment, tiles_S, 0), axis=0)


def block(width: int) -> int:
    """A power of two that holds so many elements, and that `tl.dot` takes."""
    return max(triton.next_power_of_2(width), MIN_BLOCK)
