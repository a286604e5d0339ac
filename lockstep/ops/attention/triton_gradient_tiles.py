"""Tiles of attention's gradients: `triton_backward`'s sums over keys and over queries, and how it finds its tiles.

Shape suffixes: H head dim, P rotated dim, M query rows of a program, L keys of a tile, S segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..rows import LN_2
from .triton_tiles import Queries, compute_scores, key_rows, load_key_parts, load_queries, load_query_parts, store_rows


@triton.jit
def add_to_dq(
    dq,  # [M, H], and [M, P] if ROPE_DIM > 0, like q
    q,
    grad_MH,
    lse_M,
    delta_M,
    position_M,
    begin,
    end,
    keys,
    scale,
    MASKED: tl.constexpr,  # some row does not see some of the keys
    BLOCK_L: tl.constexpr,
    FORM: tl.constexpr,
):
    """dQ with the keys at positions `begin` to `end` added."""
    dq_MH, dq_MP = dq
    for start in range(begin, end, BLOCK_L):
        position_L = start + tl.arange(0, BLOCK_L)
        row_L = key_rows(position_L, end, keys, FORM)
        k_LH, v_LH, k_LP = load_key_parts(keys, row_L, position_L < end, MASKED, FORM)
        score_ML = compute_scores(q, (k_LH, k_LP), FORM)
        p_ML = tl.exp2(score_ML * scale - lse_M[:, None])
        if MASKED:
            p_ML = tl.where(position_L[None, :] <= position_M[:, None], p_ML, 0.0)
            if FORM.WINDOW > 0:
                p_ML = tl.where(position_L[None, :] > position_M[:, None] - FORM.WINDOW, p_ML, 0.0)
        dp_ML = tl.dot(grad_MH, tl.trans(v_LH), input_precision="ieee")
        ds_ML = p_ML * (dp_ML - delta_M[:, None])
        if FORM.FACTOR > 0:
            ds_ML = ds_ML * (1.0 - score_ML * score_ML)
        ds_ML = ds_ML.to(k_LH.dtype)
        dq_MH = tl.dot(ds_ML, k_LH, dq_MH, input_precision="ieee")
        if FORM.ROPE_DIM > 0:
            dq_MP = tl.dot(ds_ML, k_LP, dq_MP, input_precision="ieee")
    return dq_MH, dq_MP


class Rows(NamedTuple):
    """In a kernel: a kv head's query rows, and what the forward and the first kernel stored for them."""

    queries: Queries
    grad_ptr: Any
    lse_ptr: Any
    delta_ptr: Any


@triton.jit
def add_to_dk_dv(
    grads,  # dK and dV; if ROPE_DIM > 0, dK and dK of the rotated part
    keys,  # [L, H], values [L, H], and the rotated part [L, P] if ROPE_DIM > 0
    row_L,
    visible_L,
    begin,
    stop,
    end,
    rows,
    scale,
    MASK: tl.constexpr,  # "causal": a query sees keys up to its row; "visible": those of visible_L; "none": all
    BLOCK_M: tl.constexpr,
    FORM: tl.constexpr,
    shift=0,  # if WINDOW > 0: added to a row's token, it gives its place in the numbering of keys' rows
):
    """The gradients with query rows (token * G + head) added: those below `end` in tiles that start from `begin` to
    `stop`. Products are transposed, keys first."""
    dk_LH, other_LX = grads
    k_LH, v_LH, k_LP = keys
    for start in range(begin, stop, BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        token_M, head_M = row_M // FORM.GROUP, row_M % FORM.GROUP
        inside_M, statistic_M = row_M < end, row_M
        if FORM.ROPE_DIM > 0:
            statistic_M = token_M.to(tl.int64) * FORM.HEADS + head_M
        q_MH, q_MP = load_query_parts(rows.queries, token_M, head_M, inside_M, FORM)
        WIDTH: tl.constexpr = FORM.HEAD_DIM
        grad_MH = load_queries(rows.grad_ptr, token_M, head_M, FORM.HEADS * WIDTH, WIDTH, inside_M, WIDTH, FORM.BLOCK_H)
        lse_M = tl.load(rows.lse_ptr + statistic_M, mask=inside_M, other=float("inf"))  # no row: P is 0
        delta_M = tl.load(rows.delta_ptr + statistic_M, mask=inside_M, other=0.0)
        score_LM = compute_scores((k_LH, k_LP), (q_MH, q_MP), FORM)
        p_LM = tl.exp2(score_LM * scale - lse_M[None, :])
        if MASK == "causal":
            p_LM = tl.where(row_L[:, None] <= token_M[None, :], p_LM, 0.0)
        if MASK == "visible":
            p_LM = tl.where(visible_L[:, None], p_LM, 0.0)
        if FORM.WINDOW > 0 and MASK != "none":
            p_LM = tl.where(token_M[None, :] + shift - row_L[:, None] < FORM.WINDOW, p_LM, 0.0)
        if FORM.ROPE_DIM == 0:
            other_LX = tl.dot(p_LM.to(grad_MH.dtype), grad_MH, other_LX, input_precision="ieee")
        dp_LM = tl.dot(v_LH, tl.trans(grad_MH), input_precision="ieee")
        ds_LM = p_LM * (dp_LM - delta_M[None, :])
        if FORM.FACTOR > 0:
            ds_LM = ds_LM * (1.0 - score_LM * score_LM)
        if FORM.ROPE_DIM > 0:
            ds_LM = ds_LM * (scale * LN_2)  # dV, in the same accumulator, has no such factor
            dk_LH = tl.dot(p_LM.to(grad_MH.dtype), grad_MH, dk_LH, input_precision="ieee")
            other_LX = tl.dot(ds_LM.to(q_MH.dtype), q_MP, other_LX, input_precision="ieee")
        dk_LH = tl.dot(ds_LM.to(q_MH.dtype), q_MH, dk_LH, input_precision="ieee")
    return dk_LH, other_LX


@triton.jit
def find_tile(
    index,
    cu_seqlens_ptr,
    prefix_len_ptr,
    tokens,
    segments,
    ROWS: tl.constexpr,  # rows per token
    BLOCK: tl.constexpr,  # rows per tile
    BLOCK_S: tl.constexpr,
):
    """The segment of tile number `index`, the tile's place in it, and the segment's number of tiles.

    Segment `segments` is the padding; a larger number means that no tile is left. Segments without a prefix come first:
    their keys may be a shared prompt's, whose programs run longest.
    """
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


@triton.jit
def store_keys(ptr, grad_LX, group, row_L, inside_L, tokens, stride, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Store a gradient of kv head `group`'s rows; if ROPE_DIM > 0, the partial sum of that group of heads, apart."""
    if ROPE_DIM > 0:
        offset_L = (group.to(tl.int64) * tokens + row_L) * WIDTH
    else:
        offset_L = row_L.to(tl.int64) * stride + group * WIDTH
    store_rows(ptr, grad_LX, offset_L, inside_L, WIDTH)
