"""Attention of one query token per sequence over a paged cache, and of groups that share their first pages.

A program handles the query heads of one kv head of one sequence, over one split of its keys. With `group_rows_CW`,
another kernel runs first: each program handles the rows of a whole group over the key tiles that the group shares, so
that those are read once, and stores each row's state, from which the row's own program continues. Either way a row goes
through the same tiles in the same order, and its state is float32 in memory as in registers, so no bit changes.

Given a fused projection, and no groups, programs norm and rotate the heads that they need, and the one that reaches
the new token's position stores its key and value before it reads any.

With several splits or groups, states are stored: acc float32 [splits, S, N, H]; statistics float32 [2, splits, S, N],
shifts and sums.

Shape suffixes: S sequences, C groups, W rows of a group, N query heads, K kv heads, H head dim, M query rows of a
program, L keys of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..records import (
    NO_GROUPS,
    PLAIN,
    AttentionScores,
    Contexts,
    KVPages,
    Peers,
    PrefixGroups,
    Rotation,
    peer_arguments,
)
from ..rope.triton import qk_norm_rope_write_kv, rotate_heads
from ..rows import aligned_rows, unit_inner
from ..triton_peers import store_pairs
from . import hopper_decode, triton_prefetch, triton_scores
from .reference import KEY_SPLIT, KEY_TILE
from .triton_scores import add_sinks, first_tile
from .triton_tiles import (
    BLOCK_L,
    MIN_BLOCK,
    MULTIPROCESSORS,
    AttentionForm,
    AttentionTile,
    Keys,
    attend,
    block_size,
    empty_state,
    load_queries,
    load_state,
    merge_states,
    store_rows,
    store_state,
)

MAX_GROUP_ROWS = 64  # query rows of a tile; a larger group takes several tiles
FEW_PROGRAMS = 32  # up to this many programs, three pipeline stages suffice
SHARED_BYTES = 200 << 10  # shared memory of a multiprocessor for tiles in flight


@triton.jit
def _store_token(wanted, q_MH, is_key_M, value_ptr, keys, slot_ptr, HEAD_DIM: tl.constexpr):
    """Store the new token's key, one of the rows, and its value in the cache, for the whole program to read."""
    if wanted:
        h = tl.arange(0, q_MH.shape[1])
        slot, inside = tl.load(slot_ptr), h < HEAD_DIM
        tl.store(keys.v_ptr + slot * keys.v_stride + h, tl.load(value_ptr + h, mask=inside), mask=inside)
        key_MH = tl.broadcast_to((keys.k_ptr + slot * keys.k_stride + h)[None, :], q_MH.shape)
        tl.store(key_MH, q_MH, mask=is_key_M[:, None] & inside[None, :])
        tl.debug_barrier()


@triton.jit
def _store_to_peers(
    out_MH, row_M, inside_M, addresses_ptr, state_ptr, rank, RANKS: tl.constexpr, HEAD_DIM: tl.constexpr, out_ptr
):  # fmt: skip
    """Store rows of [S * N, HEAD_DIM] for the other ranks, rounded to the dtype of `out_ptr`."""
    out_MH = out_MH.to(out_ptr.dtype.element_ty)
    low, high = tl.split(tl.reshape(out_MH, (out_MH.shape[0], out_MH.shape[1] // 2, 2)))
    word = tl.arange(0, out_MH.shape[1] // 2)
    inside = inside_M[:, None] & (word < HEAD_DIM // 2)[None, :]
    at = row_M.to(tl.int64)[:, None] * (HEAD_DIM // 2) + word[None, :]
    store_pairs(low, high, at, inside, addresses_ptr, state_ptr, rank, RANKS)


@triton.jit(do_not_specialize=["sequences"])
def _group_kernel(
    q_ptr,  # [S, N, H]
    k_ptr,  # [P * page_size, K, H]
    v_ptr,
    acc_ptr,
    statistics_ptr,
    table_ptr,  # [S, pages]
    group_rows_ptr,  # [C, W], contiguous
    shared_len_ptr,  # [S]
    sequences,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride: tl.constexpr,
    k_head_stride,
    v_stride: tl.constexpr,
    v_head_stride,
    scale,
    PDL: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    context_len_ptr=None,  # [S], if WINDOW > 0
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
):
    """Store the states of a group's rows after the whole key tiles of one split that the group shares."""
    pdl.release_and_wait(PDL)
    kv_head, split = tl.program_id(0), tl.program_id(2)
    tiles = tl.cdiv(WIDTH * GROUP, BLOCK_M)
    group_rows_ptr += tl.program_id(1) // tiles * WIDTH
    first = tl.load(group_rows_ptr)
    if first < 0:
        return
    begin = split * SPLIT
    end = tl.load(shared_len_ptr + first) // BLOCK_L * BLOCK_L
    end = tl.minimum(end, begin + SPLIT)
    if end <= begin:
        return

    row_M = tl.program_id(1) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    member_M = row_M // GROUP
    sequence_M = tl.load(group_rows_ptr + member_M, mask=member_M < WIDTH, other=-1)
    if tl.max(sequence_M, axis=0) < 0:
        return
    last_M = row_M  # unused without a window: all rows see all of these keys
    lowest = 0
    if WINDOW > 0:
        last_M = tl.load(context_len_ptr + sequence_M, mask=sequence_M >= 0, other=end + WINDOW) - 1
        lowest = tl.maximum(tl.min(last_M, axis=0) - WINDOW + 1, 0)
        begin = tl.maximum(begin, lowest // BLOCK_L * BLOCK_L)
        if end <= begin:
            return
    head_M, mask_M = kv_head * GROUP + row_M % GROUP, sequence_M >= 0
    q_MH = load_queries(q_ptr, sequence_M, head_M, q_stride, q_head_stride, mask_M, HEAD_DIM, BLOCK_H)
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    keys = Keys(k_ptr, v_ptr, k_stride, v_stride, table_ptr + first.to(tl.int64) * table_stride, 0, 0, 0)
    state = empty_state(BLOCK_M, BLOCK_H)
    FORM: tl.constexpr = AttentionForm(HEAD_DIM, BLOCK_H, 0, 0, WINDOW, FACTOR, PAGE_SIZE)
    state = attend(state, (q_MH, q_MH), last_M, begin, end, keys, scale, WINDOW > 0, FORM, lowest)
    heads = tl.num_programs(0) * GROUP
    state_M = (split * sequences + sequence_M).to(tl.int64) * heads + head_M
    states = tl.num_programs(2).to(tl.int64) * sequences * heads
    store_state(acc_ptr, statistics_ptr, state_M, mask_M, states, state, HEAD_DIM)


@triton.jit(do_not_specialize=["table_width", "cache_rows", "rank"])
def _decode_kernel(
    q_ptr,  # [S, N, H]; with slots, [S, (N + 2K) * H]
    k_ptr,  # [P * page_size, K, H]
    v_ptr,
    out_ptr,  # [S, N, H], contiguous; written if there is one split
    acc_ptr,
    statistics_ptr,
    table_ptr,  # [S, pages]
    context_len_ptr,  # [S]
    shared_len_ptr,  # [S], or None
    slots_ptr,  # [S], or None, and then so are the next three
    q_weight_ptr,  # [H], or None without a norm, like the next
    k_weight_ptr,
    cos_sin_ptr,  # [S, H]
    cos_sin_stride,
    eps,
    table_width,
    cache_rows,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride: tl.constexpr,
    k_head_stride,
    v_stride: tl.constexpr,
    v_head_stride,
    scale,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,  # whether a sequence may have several
    GROUP: tl.constexpr,  # query heads a kv head
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    sinks_ptr=None,  # [N], if there is one split
    WINDOW: tl.constexpr = 0,
    FACTOR: tl.constexpr = 0.0,
    OFFSET: tl.constexpr = 0.0,  # of the norms' weights
    addresses_ptr=None,  # where the result is stored for other ranks, by the last kernel
    state_ptr=None,
    rank=0,
    RANKS: tl.constexpr = 1,
):
    """One split of one sequence, continuing where its group stopped."""
    kv_head, sequence, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split * SPLIT
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    table_ptr += sequence.to(tl.int64) * table_stride
    keys = Keys(k_ptr, v_ptr, k_stride, v_stride, table_ptr, 0, 0, 0)
    if PDL:
        triton_prefetch.prefetch_table(table_ptr, begin, table_width, PAGE_SIZE, SPLIT)
    if AHEAD > 0:
        stored = tl.load(context_len_ptr + sequence, cache_modifier=".cg") - 1
        wanted = begin
        if WINDOW > 0:
            wanted = tl.maximum(begin, first_tile(stored, WINDOW, BLOCK_L))
        last = tl.minimum(stored, begin + SPLIT)
        lane = tl.arange(0, AHEAD)
        triton_prefetch.prefetch_positions(keys, wanted + lane, last, table_width, cache_rows, PAGE_SIZE, HEAD_DIM)
        if q_weight_ptr is not None:
            triton_prefetch.prefetch_rows(q_weight_ptr + lane * 0, lane == 0, HEAD_DIM)
            triton_prefetch.prefetch_rows(k_weight_ptr + lane * 0, lane == 0, HEAD_DIM)
    pdl.release_and_wait(PDL, RANKS > 1)
    context = tl.load(context_len_ptr + sequence)
    end = context
    if SPLITS:
        if begin >= context:
            return
        end = tl.minimum(context, begin + SPLIT)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(context - WINDOW, 0)
        begin = tl.maximum(begin, lowest // BLOCK_L * BLOCK_L)
        if (begin >= end) & SPLITS:
            return
    row_M = tl.arange(0, BLOCK_M)
    sequences, kv_heads = tl.num_programs(1), tl.num_programs(0)
    heads, mask_M, head_M = kv_heads * GROUP, row_M < GROUP, kv_head * GROUP + row_M
    if slots_ptr is not None:
        is_key_M = row_M == GROUP
        head_M = tl.where(is_key_M, heads + kv_head, head_M)
        qkv_ptr = q_ptr + sequence.to(tl.int64) * q_stride
        q_MH = rotate_heads(
            qkv_ptr, cos_sin_ptr + sequence.to(tl.int64) * cos_sin_stride, head_M, is_key_M, mask_M | is_key_M,
            q_weight_ptr, k_weight_ptr, eps, HEAD_DIM, BLOCK_M, BLOCK_H, OFFSET,
        )  # fmt: skip
        value_ptr = qkv_ptr + (heads + kv_heads + kv_head) * HEAD_DIM
        _store_token(end == context, q_MH, is_key_M, value_ptr, keys, slots_ptr + sequence, HEAD_DIM)
    else:
        sequence_M = tl.zeros((BLOCK_M,), tl.int32) + sequence
        q_MH = load_queries(q_ptr, sequence_M, head_M, q_stride, q_head_stride, mask_M, HEAD_DIM, BLOCK_H)

    state_M = (split * sequences + sequence).to(tl.int64) * heads + head_M
    states = tl.num_programs(2).to(tl.int64) * sequences * heads
    state = empty_state(BLOCK_M, BLOCK_H)
    start = begin
    if shared_len_ptr is not None:
        start = tl.minimum(tl.load(shared_len_ptr + sequence) // BLOCK_L * BLOCK_L, end)
        start = tl.maximum(start, begin)
        found_M = row_M < tl.where(start > begin, GROUP, 0)
        state = load_state(acc_ptr, statistics_ptr, state_M, found_M, states, HEAD_DIM, BLOCK_H)
    last_M = tl.zeros((BLOCK_M,), tl.int32) + ((context if WINDOW > 0 else end) - 1)
    FORM: tl.constexpr = AttentionForm(HEAD_DIM, BLOCK_H, 0, 0, WINDOW, FACTOR, PAGE_SIZE)
    state = attend(state, (q_MH, q_MH), last_M, start, end, keys, scale, True, FORM, lowest)
    if sinks_ptr is not None:
        state = add_sinks(state, sinks_ptr, head_M, mask_M)
    if SPLITS:
        store_state(acc_ptr, statistics_ptr, state_M, mask_M, states, state, HEAD_DIM)
    else:
        _, sum_M, acc_MH = state
        out_MH = acc_MH / sum_M[:, None]
        if RANKS > 1:
            _store_to_peers(out_MH, state_M, mask_M, addresses_ptr, state_ptr, rank, RANKS, HEAD_DIM, out_ptr)
        store_rows(out_ptr, out_MH, state_M * HEAD_DIM, mask_M, HEAD_DIM)


@triton.jit(do_not_specialize=["states", "rank"])
def _merge_kernel(
    out_ptr,  # [S, N, H], contiguous
    acc_ptr,
    statistics_ptr,
    context_len_ptr,  # [S]
    states,
    PDL: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_H: tl.constexpr,
    sinks_ptr=None,  # [N]
    WINDOW: tl.constexpr = 0,
    addresses_ptr=None,  # where the result is stored for other ranks
    state_ptr=None,
    rank=0,
    RANKS: tl.constexpr = 1,
):
    """Merge a sequence's splits, left to right, for the heads of one kv head."""
    pdl.release_and_wait(PDL, RANKS > 1)
    kv_head, sequence = tl.program_id(0), tl.program_id(1)
    sequences, heads = tl.num_programs(1), tl.num_programs(0) * GROUP
    row_M = tl.arange(0, BLOCK_M)
    mask_M, state_M = row_M < GROUP, sequence.to(tl.int64) * heads + kv_head * GROUP + row_M
    state = empty_state(BLOCK_M, BLOCK_H)
    split_M = state_M
    context = tl.load(context_len_ptr + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context - WINDOW, 0) // SPLIT * SPLIT
        split_M += (begin // SPLIT).to(tl.int64) * sequences * heads
    for _ in range(begin, context, SPLIT):
        split = load_state(acc_ptr, statistics_ptr, split_M, mask_M, states, HEAD_DIM, BLOCK_H)
        state = merge_states(state, split)
        split_M += sequences * heads
    if sinks_ptr is not None:
        state = add_sinks(state, sinks_ptr, kv_head * GROUP + row_M, mask_M)
    _, sum_M, acc_MH = state
    out_MH = acc_MH / sum_M[:, None]
    if RANKS > 1:
        _store_to_peers(out_MH, state_M, mask_M, addresses_ptr, state_ptr, rank, RANKS, HEAD_DIM, out_ptr)
    store_rows(out_ptr, out_MH, state_M * HEAD_DIM, mask_M, HEAD_DIM)


def _choose_tile(rows: int, programs: int, key_bytes: int) -> AttentionTile:
    """The tile for `rows` query rows in each of `programs` programs; `key_bytes` is the size of a tile of keys and
    values.

    A program waits for one tile after another. With few programs per multiprocessor, more tiles are in flight; with
    many, a program has fewer warps, which then wait less for each other, if their registers suffice.
    """
    resident = triton.cdiv(programs, MULTIPROCESSORS)  # programs per multiprocessor
    warps = 2 if resident > 1 and key_bytes <= 32 << 10 else 4
    stages = 5
    if resident > 2 or programs <= FEW_PROGRAMS:
        stages = 3
    elif resident > 1:
        stages = 4
    size = block_size(rows)
    return AttentionTile(size, max(size // 16, warps), max(_fit_stages(stages, resident * key_bytes), 3))


def _choose_group_tile(rows: int, groups: int, key_bytes: int) -> AttentionTile:
    """The tile for up to `groups` groups, counted per kv head and split, of `rows` query rows each; usually half of
    the groups are empty. Tiles are small as long as all of them run at once."""
    if groups * triton.cdiv(rows, MIN_BLOCK) <= 2 * MULTIPROCESSORS:
        return AttentionTile(MIN_BLOCK, 4, max(_fit_stages(5, key_bytes), 3))
    size = block_size(min(rows, MAX_GROUP_ROWS))
    return AttentionTile(size, max(size // 16, 4), 3)


def _fit_stages(stages: int, key_bytes: int) -> int:
    """`stages`, or as many as fit in shared memory, which holds one tile fewer than there are stages."""
    return min(stages, 1 + SHARED_BYTES // key_bytes)


class FusedProjection(NamedTuple):
    """Fused projections of the tokens, [S, (N + 2K) * H], and what rotates and stores them (`attention_decode`)."""

    qkv_SE: Tensor
    rotation: Rotation
    slots_S: Tensor
    weight_offset: float


class Destination(NamedTuple):
    """Where the result goes.

    Attributes:
        out_SNH: contiguous; None: new memory.
        peers: other ranks, for which the last kernel that is launched stores it as [S, N * H].
    """

    out_SNH: Tensor | None = None
    peers: Peers | None = None


NEW_MEMORY = Destination()


def decode(
    queries: Tensor | FusedProjection,
    cache: KVPages,
    contexts: Contexts,
    groups: PrefixGroups = NO_GROUPS,
    scores: AttentionScores = PLAIN,
    to: Destination = NEW_MEMORY,
) -> Tensor:
    """See `attention.operator.attention_paged`, for queries [S, N, H] whose row s is sequence s's last token; for
    `FusedProjection`, see `operator.attention_decode`."""
    projected = isinstance(queries, FusedProjection)
    q, rotation, slots_S, offset = queries if projected else (queries, None, None, 0.0)
    sequences, (_, page_size, kv_heads, head_dim) = q.shape[0], cache.k_cache.shape
    heads, device = rotation.num_heads if rotation else q.shape[1], q.device
    group, splits = heads // kv_heads, max(triton.cdiv(contexts.max_context_len, KEY_SPLIT), 1)
    programs, block_h = kv_heads * sequences * splits, block_size(head_dim)
    k_RKH, v_RKH = (unit_inner(pages.view(-1, *pages.shape[2:])) for pages in cache)
    q = aligned_rows(q).view(sequences, -1, head_dim) if projected else unit_inner(q)
    block_table, group_rows_CW = unit_inner(contexts.block_table), groups.group_rows_CW
    grouped = group_rows_CW is not None and group_rows_CW.numel() > 0
    assert not (grouped and projected), "what groups read is rotated before"
    state_shape = (splits, sequences, heads) if grouped or splits > 1 else (0,)
    out_SNH = to.out_SNH
    if out_SNH is None:
        out_SNH = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=device)
    acc = torch.empty((*state_shape, head_dim), dtype=torch.float32, device=device)
    statistics = torch.empty((2, *state_shape), dtype=torch.float32, device=device)
    strides = (block_table.stride(0), *(stride for x in (q, k_RKH, v_RKH) for stride in x.stride()[:2]))
    factor, options = triton_scores.score_arguments(scores, head_dim)
    scale, last = factor * math.log2(math.e), {**triton_scores.sink_arguments(scores), **peer_arguments(to.peers)}
    dims = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_H": block_h, "SPLIT": KEY_SPLIT, **pdl.options(q)}
    options |= {**dims, "PAGE_SIZE": page_size}
    key_bytes = 2 * KEY_TILE * block_h * q.element_size()
    if grouped:
        count, width = group_rows_CW.shape
        tile = _choose_group_tile(width * group, kv_heads * count * splits, key_bytes)
        tiles = count * triton.cdiv(width * group, MIN_BLOCK)  # of the kernel with a tile of keys a warp
        by_warp = hopper_decode.pays_for_groups(kv_heads * tiles * splits, contexts.max_context_len)
        members = (group_rows_CW.contiguous(), groups.shared_len_S, sequences)
        arguments = (q, k_RKH, v_RKH, acc, statistics, block_table, *members, *strides, scale)
        if by_warp and hopper_decode.supports(q, (k_RKH, v_RKH), MIN_BLOCK, page_size, scores):
            grid = (kv_heads, tiles, splits)
            hopper_decode.run_groups(grid, (*arguments, block_table.shape[1]), {"WIDTH": width, **options})
        else:
            grid = (kv_heads, count * triton.cdiv(width * group, tile.query_rows), splits)
            _group_kernel[grid](
                *arguments, WIDTH=width, BLOCK_M=tile.query_rows, num_warps=tile.warps, num_stages=tile.stages,
                **options, **({"context_len_ptr": contexts.context_len_S} if scores.window else {}),
            )  # fmt: skip
    bounds = block_table.shape[1], k_RKH.shape[0]
    ahead = triton_prefetch.keys_per_program(programs, k_RKH, v_RKH) if dims["PDL"] and not grouped else 0
    options |= {"AHEAD": ahead, "SPLITS": splits > 1, **({"OFFSET": offset} if offset else {})}
    options |= {} if splits > 1 else last
    operands = (q, k_RKH, v_RKH, out_SNH, acc, statistics, block_table, contexts.context_len_S)
    others = (*_rotation_arguments(rotation, slots_S), *bounds, *strides, scale)
    grid, rows = (kv_heads, sequences, splits), group + projected
    by_warp = not grouped and hopper_decode.pays(programs, contexts.max_context_len)
    if by_warp and hopper_decode.supports(q, (k_RKH, v_RKH), rows, page_size, scores):
        hopper_decode.run(grid, (*operands, *others), options)
    else:
        rows, warps, stages = _choose_tile(rows, programs, key_bytes)[:3]
        _decode_kernel[grid](
            *operands, groups.shared_len_S if grouped else None, *others, BLOCK_M=rows, num_warps=warps,
            num_stages=stages, **options,
        )  # fmt: skip
    if splits > 1:
        _merge_kernel[kv_heads, sequences](
            out_SNH, acc, statistics, contexts.context_len_S, statistics.numel() // 2,
            BLOCK_M=triton.next_power_of_2(group), num_warps=1, **dims, **last,
            **({"WINDOW": scores.window} if scores.window else {}),
        )  # fmt: skip
    return out_SNH


def _rotation_arguments(x: Rotation | None, slots_S: Tensor | None) -> tuple[Tensor | float | None, ...]:
    """`_decode_kernel`'s arguments from `slots_ptr` to `eps`."""
    if x is None:
        return (None,) * 6
    cos_sin_SH = aligned_rows(x.cos_sin_TH)
    weights = (None if weight is None else aligned_rows(weight) for weight in (x.q_weight_H, x.k_weight_H))
    return slots_S, *weights, cos_sin_SH, cos_sin_SH.stride(0), x.eps


def attention_decode(
    qkv_SE: Tensor,
    rotation: Rotation,
    cache: KVPages,
    slots_S: Tensor,
    contexts: Contexts,
    groups: PrefixGroups = NO_GROUPS,
    scores: AttentionScores = PLAIN,
    weight_offset: float = 0.0,
    peers: Peers | None = None,
) -> Tensor:
    if groups.group_rows_CW is None or groups.group_rows_CW.numel() == 0:
        projection = FusedProjection(qkv_SE, rotation, slots_S, weight_offset)
        return decode(projection, cache, contexts, NO_GROUPS, scores, Destination(peers=peers))
    q_SNH = qk_norm_rope_write_kv(qkv_SE, rotation, cache, slots_S, weight_offset)  # two programs read each query
    return decode(q_SNH, cache, contexts, groups, scores, Destination(peers=peers))
