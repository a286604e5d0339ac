"""Attention over packed segments and over a paged cache: one kernel, two ways to find a position's row.

A program handles a tile of query rows (tokens x heads of a group, tokens outermost) of one kv head of one sequence. In
long sequences, the key tiles that all of its rows see come first and need no mask. `triton_tiles` has the expression,
for latent attention too, and says why the query tile may have any size; `triton_decode` handles single queries.

Shape suffixes: T tokens, S sequences, N query heads, K kv heads, H head dim, P rotated dim, R rows of keys and values,
M query rows of a program, G query heads of a kv head, L keys of a tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import NO_GROUPS, PLAIN, AttentionScores, KVPages, Packed, Paged, PrefixGroups
from ..rows import unit_inner
from . import triton_decode, triton_scores
from .reference import KEY_SPLIT
from .triton_scores import add_sinks
from .triton_tiles import (
    BLOCK_L,
    LONG_CONTEXT,
    AttentionForm,
    AttentionTile,
    Keys,
    Queries,
    attend,
    block_size,
    empty_state,
    load_query_parts,
    merge_states,
    store_rows,
)

TILE = AttentionTile(64, 4, 3)
LONG_TILE = AttentionTile(128, 8, 3)  # above `LONG_CONTEXT` keys, or `PAGED_LONG`
PAIRED_TILE = AttentionTile(128, 8, 2, registers=128)  # likewise, with two programs per multiprocessor
PAGED_LONG = 4096  # for a paged cache, where decode rows of one token each run beside prompts
SMALL_TILE = AttentionTile(64, 4, 1)  # for float32 and for head dims above 128


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
    """Zero one kv head's query heads in tokens `first` onwards; the programs along axis 0 share the work."""
    for start in range(tl.program_id(0) * BLOCK_M, (tokens - first) * GROUP, tl.num_programs(0) * BLOCK_M):
        row_M = start + tl.arange(0, BLOCK_M)
        token_M = first + row_M // GROUP
        offset_M = token_M.to(tl.int64) * out_stride + (kv_head * GROUP + row_M % GROUP) * HEAD_DIM
        store_rows(out_ptr, tl.zeros((BLOCK_M, BLOCK_H), tl.float32), offset_M, token_M < tokens, HEAD_DIM)
        tl.store(lse_ptr + row_M, tl.zeros((BLOCK_M,), tl.float32), mask=token_M < tokens)


@triton.jit
def _attend_causal(
    q,
    last_M,
    begin,
    unmasked_end,  # below it, all rows see all keys
    end,
    keys,
    scale,
    IS_LONG: tl.constexpr,
    FORM: tl.constexpr,
    lowest,  # this and the next if WINDOW > 0: no row sees a key before this position
    highest,  # the first position that the last row sees
):
    """The state after the keys at positions `begin` to `end`, all of one split."""
    state = empty_state(q[0].shape[0], q[0].shape[1])
    if FORM.WINDOW > 0:
        begin = tl.maximum(begin, lowest // BLOCK_L * BLOCK_L)
        if IS_LONG:
            entered = tl.maximum(begin, tl.minimum(tl.cdiv(highest, BLOCK_L) * BLOCK_L, end))
            state = attend(state, q, last_M, begin, entered, keys, scale, True, FORM, lowest)
            begin = entered
    if IS_LONG:
        masked = tl.maximum(begin, tl.minimum(unmasked_end, end))
        state = attend(state, q, last_M, begin, masked, keys, scale, False, FORM, lowest)
        begin = masked
    return attend(state, q, last_M, begin, end, keys, scale, True, FORM, lowest)


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
    k_stride: tl.constexpr,
    k_head_stride,
    v_stride: tl.constexpr,
    v_head_stride,
    scale,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    SPLIT: tl.constexpr,  # keys per split; 0: no sequence has more than one
    IS_LONG: tl.constexpr,  # whether tiles that all rows see have a loop of their own, without masks
    GROUP: tl.constexpr,  # query heads per kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    q_rope_ptr=None,  # [T, N, P]; the rope arguments are given if ROPE_DIM > 0, and then v_ptr is not read
    q_rope_stride=None,
    q_rope_head_stride=None,
    k_rope_ptr=None,  # [R, P]
    k_rope_stride: tl.constexpr = None,
    ROPE_DIM: tl.constexpr = 0,
    BLOCK_P: tl.constexpr = 0,
    sinks_ptr=None,  # [N]
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    kv_head, kv_heads, sequence = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    if ROPE_DIM > 0:
        kv_head, kv_heads = 0, 1  # known to the compiler
    out_stride = kv_heads * GROUP * HEAD_DIM
    first = tl.load(cu_seqlens_ptr + sequence)
    lse_ptr += (kv_head * tokens + first) * GROUP
    if sequence == tl.num_programs(2) - 1:  # one past the last sequence: padding
        _zero_rows(out_ptr, lse_ptr, kv_head, first, tokens, out_stride, GROUP, HEAD_DIM, BLOCK_M, BLOCK_H)
        return
    length = tl.load(cu_seqlens_ptr + sequence + 1) - first
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the rows that see the most keys come first
    if first_row >= length * GROUP:
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
    token_M, head_M = row_M // GROUP, kv_head * GROUP + row_M % GROUP
    inside_M = token_M < length
    queries = Queries(q_ptr, q_stride, q_head_stride, q_rope_ptr, q_rope_stride, q_rope_head_stride)
    FORM: tl.constexpr = AttentionForm(HEAD_DIM, BLOCK_H, ROPE_DIM, BLOCK_P, WINDOW, FACTOR, PAGE_SIZE)
    q = load_query_parts(queries, first + token_M, head_M, inside_M, FORM)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    keys = Keys(k_ptr, v_ptr, k_stride, v_stride, table_ptr, prefix, shared, own, k_rope_ptr, k_rope_stride)
    last_M = prefix + token_M
    unmasked_end = (prefix + first_row // GROUP + 1) // BLOCK_L * BLOCK_L
    end = prefix + tl.minimum((first_row + BLOCK_M - 1) // GROUP + 1, length)  # keys that the last row sees
    lowest = 0
    highest = 0
    if WINDOW > 0:
        lowest = tl.maximum(prefix + first_row // GROUP - WINDOW + 1, 0)
        highest = tl.maximum(end - WINDOW, 0)
    if SPLIT > 0:
        state = empty_state(BLOCK_M, BLOCK_H)
        for begin in range(lowest // SPLIT * SPLIT, end, SPLIT):
            stop = tl.minimum(begin + SPLIT, end)
            split = _attend_causal(q, last_M, begin, unmasked_end, stop, keys, scale, IS_LONG, FORM, lowest, highest)
            state = merge_states(state, split)
    else:
        state = _attend_causal(q, last_M, 0, unmasked_end, end, keys, scale, IS_LONG, FORM, lowest, highest)
    if sinks_ptr is not None:
        state = add_sinks(state, sinks_ptr, head_M, inside_M)

    shift_M, sum_M, acc_MH = state
    offset_M = (first + token_M).to(tl.int64) * out_stride + head_M * HEAD_DIM
    store_rows(out_ptr, acc_MH / sum_M[:, None], offset_M, inside_M, HEAD_DIM)
    tl.store(lse_ptr + row_M, shift_M + tl.log2(sum_M), mask=inside_M)


def _choose_tile(
    max_context: int, head_dim: int, dtype: torch.dtype, many_registers: bool, long: int = LONG_CONTEXT
) -> AttentionTile:
    """`many_registers`: with pages or a window, for which half of them are too few if heads are wide."""
    if dtype.itemsize > 2 or head_dim > 128:
        return SMALL_TILE
    if max_context <= long:
        return TILE
    return LONG_TILE if many_registers and head_dim > 64 else PAIRED_TILE


def launch(
    qkv: tuple[Tensor, Tensor, Tensor],
    scale: float,
    layout: Packed | Paged,
    page_size: int,
    tile: AttentionTile,
    **extra: Any,
) -> tuple[Tensor, Tensor]:
    """Output, and each row's log2-sum-exp2 of scaled scores, float32 [K, T, G], from q [T, N, H] and k and v [R, K, H].
    `page_size` is 0 for packed segments; `extra` are the kernel's arguments for latents' rotated parts and for
    `AttentionScores`."""
    if isinstance(layout, Packed):
        at = layout.cu_seqlens, layout.prefix_len_S, layout.prefix_start_S
        max_queries = max_context = layout.max_len
    else:
        at = layout.cu_seqlens, layout.context_len_S, layout.block_table
        max_queries, max_context = layout.max_query_len, layout.max_context_len
    q_TNH, k_RKH, v_RKH = map(unit_inner, qkv)
    (tokens, heads, head_dim), kv_heads = q_TNH.shape, k_RKH.shape[1]
    group = heads // kv_heads
    out_TNH = torch.empty((tokens, heads, head_dim), dtype=q_TNH.dtype, device=q_TNH.device)
    lse_KTG = torch.empty((kv_heads, tokens, group), dtype=torch.float32, device=q_TNH.device)
    tiles = max(triton.cdiv(max_queries * group, tile.query_rows), 1)
    _attention_kernel[tiles, kv_heads, at[1].shape[0] + 1](
        q_TNH, k_RKH, v_RKH, out_TNH, lse_KTG, *at, tokens, at[2].stride(0),
        *(stride for x in (q_TNH, k_RKH, v_RKH) for stride in x.stride()[:2]), scale * math.log2(math.e),
        PAGE_SIZE=page_size, SPLIT=KEY_SPLIT if max_context > KEY_SPLIT else 0,
        IS_LONG=max_context > LONG_CONTEXT and "ROPE_DIM" not in extra, GROUP=group, HEAD_DIM=head_dim,
        BLOCK_M=tile.query_rows, BLOCK_H=block_size(head_dim), **extra, num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=tile.registers, enable_fp_fusion=False,
    )  # fmt: skip
    return out_TNH, lse_KTG


def packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, scores: AttentionScores = PLAIN
) -> tuple[Tensor, Tensor]:
    """See `attention.operator.attention_packed`; also returns `launch`'s log-sum-exp."""
    head_dim = q_TNH.shape[2]
    tile = _choose_tile(layout.max_len, head_dim, q_TNH.dtype, scores.window > 0)
    scale, constants = triton_scores.score_arguments(scores, head_dim)
    return launch((q_TNH, k_TKH, v_TKH), scale, layout, 0, tile, **constants, **triton_scores.sink_arguments(scores))


def paged(
    q_TNH: Tensor, cache: KVPages, layout: Paged, groups: PrefixGroups = NO_GROUPS, scores: AttentionScores = PLAIN
) -> Tensor:
    if contexts := layout.decode_contexts(q_TNH.shape[0]):
        return triton_decode.decode(q_TNH, cache, contexts, groups, scores)
    _, page_size, _, head_dim = cache.k_cache.shape
    k_RKH, v_RKH = (pages.view(-1, *pages.shape[2:]) for pages in cache)
    tile = _choose_tile(layout.max_context_len, head_dim, q_TNH.dtype, True, PAGED_LONG)
    scale, constants = triton_scores.score_arguments(scores, head_dim)
    decodes, rest = layout.split_decodes(groups.sequences)
    sinks = triton_scores.sink_arguments(scores)
    out_TNH, _ = launch((q_TNH, k_RKH, v_RKH), scale, rest, page_size, tile, **constants, **sinks)
    if groups.sequences:
        to = triton_decode.Destination(out_TNH[: groups.sequences])
        triton_decode.decode(q_TNH[: groups.sequences], cache, decodes, groups, scores, to)
    return out_TNH
