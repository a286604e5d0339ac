"""The expression that every attention kernel evaluates: key tiles, their online softmax, and the merging of splits.

Keys come in tiles of `KEY_TILE` at absolute positions, ascending; at every multiple of `KEY_SPLIT` a fresh online
softmax begins, and the splits' states are merged left to right. A tile that is masked for a row multiplies its
accumulators by 1 and adds 0; a split in which a row sees no key is skipped. The order of a tile's row sum is written
out (`row_sum`), so no bit depends on the rows of a query tile, its warps or the layout that the compiler picks.

Rounding points: scores, maxima, sums and the output's accumulator are float32; probabilities are rounded to the values'
dtype before the second product, but summed before that rounding; the result is rounded once.

A state is (shift, sum, acc): the row's largest score times `scale` (which includes log2(e)), the sum of exponentials
and the output before its division, both relative to that shift.

With a window, tiles before it are skipped; the state of a row that sees no key yet stays empty. `triton_scores` has the
other options of `AttentionScores`.

Latent attention has the same expression with ROPE_DIM > 0: queries and keys also have a rotated part of that width,
whose products are added to a score last, in the same accumulator, and a tile of keys serves as the values too.

Shape suffixes: H head dim, P rotated dim, M query rows of a program, L keys of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rows import split_eight
from .reference import KEY_TILE
from .triton_scores import tanh

MIN_BLOCK = 16  # tl.dot's smallest side
BLOCK_L = tl.constexpr(KEY_TILE)
MULTIPROCESSORS = 132  # of an H100 or an H200
LONG_CONTEXT = 512  # above this many keys per sequence, larger query tiles pay


class AttentionTile(NamedTuple):
    """How a kernel runs: query rows per program, warps, pipeline stages, keys per tile (only the backward may choose
    these), and a limit on registers per thread, where that makes room for a second program."""

    query_rows: int
    warps: int
    stages: int
    keys: int = KEY_TILE
    registers: int | None = None


class AttentionForm(NamedTuple):
    """In a kernel: the constants of a layer's attention. BLOCK_* are the dims padded to a block; ROPE_DIM, WINDOW and
    FACTOR (`triton_scores`) are 0 where a layer lacks them, and PAGE_SIZE is 0 for packed keys. The backward also has
    all `HEADS`, in groups of `GROUP`."""

    HEAD_DIM: Any
    BLOCK_H: Any
    ROPE_DIM: Any
    BLOCK_P: Any
    WINDOW: Any
    FACTOR: Any
    PAGE_SIZE: Any = 0
    HEADS: Any = 0
    GROUP: Any = 0


class Queries(NamedTuple):
    """In a kernel: queries by token and head, and their rotated part if ROPE_DIM > 0."""

    ptr: Any
    stride: Any
    head_stride: Any
    rope_ptr: Any = None
    rope_stride: Any = None
    rope_head_stride: Any = None


class Keys(NamedTuple):
    """In a kernel: the keys and values of a kv head, and what `key_rows` needs to find a position's row. Strides are
    constants, by which a row's address takes a third of the instructions."""

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
def key_rows(position_L, end, keys, FORM: tl.constexpr):
    """Rows (int32) of absolute positions below `end`: from the block table if PAGE_SIZE > 0, else `shared + position`
    in the prefix and `own + position` after it."""
    if FORM.PAGE_SIZE > 0:
        unsigned_L = position_L.to(tl.uint32)  # divided in fewer instructions
        page_L = tl.load(keys.table_ptr + unsigned_L // FORM.PAGE_SIZE, mask=position_L < end, other=0)
        return page_L * FORM.PAGE_SIZE + (unsigned_L % FORM.PAGE_SIZE).to(tl.int32)
    else:
        return tl.where(position_L < keys.prefix, keys.shared, keys.own) + position_L


@triton.jit
def load_rows(ptr, row_L, stride, inside_L, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of keys or values; with MASKED, zero outside."""
    h = tl.arange(0, BLOCK_H)
    at_LH = ptr + (row_L.to(tl.int64) * stride)[:, None] + h[None, :]
    if MASKED or HEAD_DIM != BLOCK_H:
        return tl.load(at_LH, mask=inside_L[:, None] & (h < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(at_LH)


@triton.jit
def store_rows(ptr, value_MX, offset_M, inside_M, WIDTH: tl.constexpr):
    """Store the first `WIDTH` elements of the rows that are inside, rounded to the destination's dtype."""
    x = tl.arange(0, value_MX.shape[1])
    mask_MX = inside_M[:, None] & (x < WIDTH)[None, :]
    tl.store(ptr + offset_M[:, None] + x[None, :], value_MX.to(ptr.dtype.element_ty), mask=mask_MX)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr):
    """The state before the first key."""
    shift_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return shift_M, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_H), tl.float32)


@triton.jit
def row_sum(p_ML, BLOCK_M: tl.constexpr):
    """Sums over a tile's 64 keys: for each t, the keys 8 j + 2 t + b in the order of (j, b), then the four sums over t
    as (0 + 2) + (1 + 3). This follows the layout of MMA accumulators, so it costs no more than `tl.sum`."""
    p_M6 = tl.reshape(p_ML, (BLOCK_M, 2, 2, 2, 4, 2))  # M, the bits of j, t, b
    by_j = split_eight(tl.permute(p_M6, (0, 4, 5, 1, 2, 3)))  # j first, as warps may be laid out along it
    even, odd = tl.split(by_j[0])
    sum_M4 = even + odd
    for j in tl.static_range(1, len(by_j)):
        even, odd = tl.split(by_j[j])
        sum_M4 = (sum_M4 + even) + odd
    return tl.sum(tl.sum(tl.reshape(sum_M4, (BLOCK_M, 2, 2)), axis=1), axis=1)


@triton.jit
def load_queries(ptr, token_M, head_M, stride, head_stride, inside_M, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Rows [M, H] of [T, N, HEAD_DIM], zero outside."""
    h = tl.arange(0, BLOCK_H)
    offset_M = token_M.to(tl.int64) * stride + head_M * head_stride
    return tl.load(ptr + offset_M[:, None] + h[None, :], inside_M[:, None] & (h < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_query_parts(x, token_M, head_M, inside_M, FORM: tl.constexpr):
    """`load_queries` of both parts of `Queries`; without a rotated part, the first is returned twice."""
    q_MH = load_queries(x.ptr, token_M, head_M, x.stride, x.head_stride, inside_M, FORM.HEAD_DIM, FORM.BLOCK_H)
    if FORM.ROPE_DIM > 0:
        return q_MH, load_queries(
            x.rope_ptr, token_M, head_M, x.rope_stride, x.rope_head_stride, inside_M, FORM.ROPE_DIM, FORM.BLOCK_P
        )
    else:
        return q_MH, q_MH


@triton.jit
def load_key_parts(x, row_L, inside_L, MASKED: tl.constexpr, FORM: tl.constexpr):
    """`load_rows` of the keys, the values and the keys' rotated part; keys take the place of a part that is missing."""
    k_LH = load_rows(x.k_ptr, row_L, x.k_stride, inside_L, MASKED, FORM.HEAD_DIM, FORM.BLOCK_H)
    if FORM.ROPE_DIM > 0:
        return k_LH, k_LH, load_rows(x.rope_ptr, row_L, x.rope_stride, inside_L, MASKED, FORM.ROPE_DIM, FORM.BLOCK_P)
    else:
        return k_LH, load_rows(x.v_ptr, row_L, x.v_stride, inside_L, MASKED, FORM.HEAD_DIM, FORM.BLOCK_H), k_LH


@triton.jit
def compute_scores(a, b, FORM: tl.constexpr):
    """Products of query rows and keys, summed over both parts, float32 [M, L]; or of keys and query rows, [L, M]."""
    score_ML = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if FORM.ROPE_DIM > 0:
        score_ML = tl.dot(a[1], tl.trans(b[1]), score_ML, input_precision="ieee")
    if FORM.FACTOR > 0:
        score_ML = tanh(score_ML * FORM.FACTOR)
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
    FORM: tl.constexpr,
    lowest,  # if WINDOW > 0: no row sees a key before this position
):
    """The state with the keys at positions `begin` to `end` added, tile by tile, by the online softmax (Milakov and
    Gimelshein 2018)."""
    shift_M, sum_M, acc_MH = state
    row_L = key_rows(begin + tl.arange(0, BLOCK_L), end, keys, FORM)
    for start in range(begin, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        inside_L = position_L < end
        if FORM.WINDOW > 0:
            inside_L = inside_L & (position_L >= lowest)
        k_LH, v_LH, k_LP = load_key_parts(keys, row_L, inside_L, MASKED, FORM)
        visible_ML = position_L[None, :] <= last_M[:, None]
        if FORM.WINDOW > 0:
            visible_ML = visible_ML & (position_L[None, :] > last_M[:, None] - FORM.WINDOW)
        score_ML = compute_scores(q, (k_LH, k_LP), FORM)
        if MASKED:
            score_ML = tl.where(visible_ML, score_ML, float("-inf"))
        new_M = tl.maximum(shift_M, tl.max(score_ML, axis=1) * scale)
        finite_M = new_M
        if MASKED:
            finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # no visible key yet: every exp2 below is 0
        p_ML = tl.exp2(tl.fma(score_ML, scale, -finite_M[:, None]))
        alpha_M = tl.exp2(shift_M - finite_M)
        sum_M = tl.fma(sum_M, alpha_M, row_sum(p_ML, p_ML.shape[0]))
        acc_MH = tl.dot(p_ML.to(v_LH.dtype), v_LH, acc_MH * alpha_M[:, None], input_precision="ieee")
        shift_M = new_M
        row_L = key_rows(position_L + BLOCK_L, end, keys, FORM)  # a tile ahead
    return shift_M, sum_M, acc_MH


@triton.jit
def merge_states(state, next_state):
    """The state of the splits so far merged with the next one's; where one has no key, exactly the other."""
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
def load_state(acc_ptr, statistics_ptr, row_M, mask_M, states, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """States in rows (split * S + sequence) * N + head; empty where masked."""
    shift_M = tl.load(statistics_ptr + row_M, mask=mask_M, other=float("-inf"))
    sum_M = tl.load(statistics_ptr + states + row_M, mask=mask_M, other=0.0)
    return shift_M, sum_M, load_rows(acc_ptr, row_M, HEAD_DIM, mask_M, True, HEAD_DIM, BLOCK_H)


@triton.jit
def store_state(acc_ptr, statistics_ptr, row_M, mask_M, states, state, HEAD_DIM: tl.constexpr):
    shift_M, sum_M, acc_MH = state
    tl.store(statistics_ptr + row_M, shift_M, mask=mask_M)
    tl.store(statistics_ptr + states + row_M, sum_M, mask=mask_M)
    store_rows(acc_ptr, acc_MH, row_M * HEAD_DIM, mask_M, HEAD_DIM)


def block_size(width: int) -> int:
    """The smallest power of two that holds `width` elements and that `tl.dot` accepts."""
    return max(triton.next_power_of_2(width), MIN_BLOCK)
