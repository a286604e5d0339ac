"""Attention of one query token per sequence over a paged cache, for few programs: a tile of keys a warp.

The words of `triton_decode`'s kernels of sequences and of groups, whose arguments are these, with fewer waits. A
program goes through four tiles of 64 keys at a time, a super-tile, with as many warps. Each warp computes the scores,
the maxima and the row sums of one tile, as `triton_tiles.attend` does, so that warps meet once to exchange the maxima
of rows, and once to exchange probabilities, for all these tiles. The running shift, the sums and the output then go
through the tiles in order, the output with a quarter of its columns in each warp. A tile beyond the last position
multiplies by 1 and adds 0.

Keys and values arrive by asynchronous copies, in four units of equal size: one half of the columns of a super-tile's
keys, [W * L, H / 2], then the other; the values of its first two tiles, [2 * L, H], then of its last two. Each has its
own place in shared memory. While one is used, the third after it is requested, into the place of the one before, which
all warps have read by then. Positions come in blocks of 16, which lie in one page each, so that a thread looks up one
page for up to 16 rows.

An MMA gives a warp blocks of 8 columns, 8 W apart. So that these are the keys of one tile, key 8 i + n of tile w lies
in row 8 W i + 8 w + n of a unit of keys.

Shape suffixes: M query rows of a program, L keys of a tile, W tiles of a super-tile and warps, H head dim, R rows of
all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .. import pdl
from ..linear.hopper_common import barrier, store_to_peers
from ..records import AttentionScores
from ..rope.triton import head_weight, sum_columns
from ..rows import ALIGNMENT
from . import triton_prefetch
from .reference import KEY_TILE
from .triton_tiles import MULTIPROCESSORS, AttentionForm, Keys, key_rows, row_sum

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # depends on Triton's version

ROWS = 16  # query rows of a program
BLOCK = 16  # positions that lie in one page
WARPS = 4
HEAD_DIMS = (64, 128)
MAX_PROGRAMS = MULTIPROCESSORS  # the most programs for which it pays
MIN_CONTEXT = 64  # the longest context for which it does not pay
LONG_CONTEXT = 1024  # above this it pays for twice as many programs of groups

_M, _L, _W = gl.constexpr(ROWS), gl.constexpr(KEY_TILE), gl.constexpr(WARPS)
_BLOCK = gl.constexpr(BLOCK)
_SUPER = gl.constexpr(WARPS * KEY_TILE)  # keys of a super-tile
_LEAD = gl.constexpr(3)  # units on their way


@gluon.constexpr_function
def _only(layout, dim):
    """The layout of a vector along one dim of tensors with this layout."""
    for other in reversed(range(layout.rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def _key_layout(head_dim):
    """Of a copy of keys, [4, 2, W, 8, H / 2]: the rows of a unit as (i // 2, i % 2, w, n), in which a block of 16
    positions has one i // 2 and w."""
    lanes = head_dim // 16
    halves = 8 // lanes
    return gl.BlockedLayout([1, 2 // halves, 1, 8, 8], [4, halves, 1, 1, lanes], [1, 1, WARPS, 1, 1], [4, 3, 2, 1, 0])


@gluon.constexpr_function
def _value_layout(head_dim):
    """Of a copy of values, [8, 16, H]: blocks of 16 positions."""
    lanes = head_dim // 8
    along = lanes // 4  # warps along the blocks
    return gl.BlockedLayout([1, 4 * along, 8], [32 // lanes, 1, lanes], [along, WARPS // along, 1], [2, 1, 0])


@gluon.constexpr_function
def _rowwise(head_dim):
    """Of query rows, [M, H]."""
    lanes = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def _swizzled(columns):
    """Rows of so many elements in shared memory, of which 8 are read at a time without conflicts."""
    return gl.SwizzledSharedLayout(8, max(64 // columns, 1), min(columns // 8, 8), [1, 0])


@gluon.jit
def _axis(SIZE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """0 to SIZE - 1 along one dim, 1 along the others."""
    x = gl.arange(0, SIZE, layout=_only(layout, DIM))
    RANK: gl.constexpr = layout.rank
    for other in gl.static_range(RANK):
        if other != DIM:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def _positions(start, UNIT: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The first positions of a unit's blocks, in the layout of its copy; units 0 and 1 are keys, 2 and 3 values."""
    if UNIT < 2:
        keys: gl.constexpr = _key_layout(HEAD_DIM)
        return start + _axis(_W, 2, keys) * _L + _axis(4, 0, keys) * _BLOCK
    else:
        return start + (UNIT - 2) * 2 * _L + _axis(8, 0, _value_layout(HEAD_DIM)) * _BLOCK


@gluon.jit
def _find_rows(start, limit, pages, UNIT: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The cache's rows of a unit's blocks, any rows where a sequence has no such positions; the block table has page
    numbers of `limit` positions."""
    FORM: gl.constexpr = AttentionForm(HEAD_DIM, HEAD_DIM, 0, 0, 0, 0.0, PAGE_SIZE)
    return key_rows(_positions(start, UNIT, HEAD_DIM), limit, pages, FORM)


@gluon.jit
def _find_later_rows(start, limit, pages, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Of the units that are requested during the super-tile at `start`: its last one, and three of the next."""
    last = _find_rows(start, limit, pages, 3, HEAD_DIM, PAGE_SIZE)
    keys = _find_rows(start + _SUPER, limit, pages, 0, HEAD_DIM, PAGE_SIZE)
    values = _find_rows(start + _SUPER, limit, pages, 2, HEAD_DIM, PAGE_SIZE)
    return last, keys, keys, values


@gluon.jit
def _request(
    memory,
    pages,
    row,  # of `_find_rows`
    start,
    end,
    NUMBER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    MASKED: gl.constexpr,  # zeros from `end` on
):
    """Start loading a unit, whose number counts from the first one of the super-tile at `start` on."""
    UNIT: gl.constexpr = NUMBER % 4
    start += NUMBER // 4 * _SUPER
    if UNIT < 2:
        layout: gl.constexpr = _key_layout(HEAD_DIM)
        shape: gl.constexpr = [_SUPER, HEAD_DIM // 2]
        ptr, stride = pages.k_ptr + UNIT * (HEAD_DIM // 2), pages.k_stride
        inside, column = _axis(2, 1, layout) * 8 + _axis(8, 3, layout), _axis(HEAD_DIM // 2, 4, layout)
    else:
        layout: gl.constexpr = _value_layout(HEAD_DIM)
        shape: gl.constexpr = [2 * _L, HEAD_DIM]
        ptr, stride = pages.v_ptr, pages.v_stride
        inside, column = _axis(_BLOCK, 1, layout), _axis(HEAD_DIM, 2, layout)
    flat: gl.constexpr = gl.reshape(row + inside + column, shape).type.layout  # of the copy, in two dims
    along: gl.constexpr = gl.SliceLayout(1, flat)
    offset = gl.convert_layout(gl.reshape(row.to(gl.int64) + inside, [shape[0]]), along) * stride
    column = gl.arange(0, shape[1], layout=gl.SliceLayout(0, flat))
    at = ptr + offset[:, None] + column[None, :]
    if MASKED:
        exists = gl.reshape(inside < end - _positions(start, UNIT, HEAD_DIM), [shape[0]])
        _copy(memory[UNIT], at, mask=gl.convert_layout(exists, along)[:, None])
    else:
        _copy(memory[UNIT], at)
    async_copy.commit_group()


@gluon.jit
def _request_first(memory, pages, rows, begin, end, HEAD_DIM: gl.constexpr, MASKED: gl.constexpr):
    """Request the units that are on their way when the first super-tile begins."""
    for unit in gl.static_range(_LEAD):
        _request(memory, pages, rows[unit], begin, end, unit, HEAD_DIM, MASKED)


@gluon.jit
def _allocate(dtype: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Shared memory for each unit of a super-tile."""
    keys: gl.constexpr = _swizzled(HEAD_DIM // 2)
    values: gl.constexpr = _swizzled(HEAD_DIM)
    return (
        gl.allocate_shared_memory(dtype, [_SUPER, HEAD_DIM // 2], keys),
        gl.allocate_shared_memory(dtype, [_SUPER, HEAD_DIM // 2], keys),
        gl.allocate_shared_memory(dtype, [2 * _L, HEAD_DIM], values),
        gl.allocate_shared_memory(dtype, [2 * _L, HEAD_DIM], values),
    )


@gluon.jit
def _lanes(SIZE: gl.constexpr):
    """0 to SIZE - 1, for what is prefetched."""
    return gl.arange(0, SIZE, layout=gl.BlockedLayout([1], [32], [_W], [0]))


@gluon.jit
def _rotate_heads(
    qkv_ptr, angle_ptr, head, is_key, mask, q_weight_ptr, k_weight_ptr, eps, h, HEAD_DIM: gl.constexpr,
    OFFSET: gl.constexpr,
):  # fmt: skip
    """`rope.triton.rotate_heads` by the same expressions; all of [M, H]."""
    HALF: gl.constexpr = HEAD_DIM // 2
    is_first = h < HALF
    pair = gl.where(is_first, h + HALF, h - HALF)
    x = gl.load(qkv_ptr + head * HEAD_DIM + h, mask=mask, other=0.0).to(gl.float32)
    y = gl.load(qkv_ptr + head * HEAD_DIM + pair, mask=mask, other=0.0).to(gl.float32)
    cos = gl.load(angle_ptr + gl.where(is_first, h, h - HALF), mask=mask, other=0.0)
    sin = gl.load(angle_ptr + gl.where(is_first, h + HALF, h), mask=mask, other=0.0)
    if q_weight_ptr is not None:
        x_weight = head_weight(q_weight_ptr, k_weight_ptr, is_key, h, mask)
        y_weight = head_weight(q_weight_ptr, k_weight_ptr, is_key, pair, mask)
        squares = sum_columns(gl.where(is_first, x * x + y * y, 0.0), _M, HEAD_DIM)
        squares_M = gl.convert_layout(gl.reshape(squares, [_M]), gl.SliceLayout(1, x.type.layout))
        rstd = gl.rsqrt(squares_M / HEAD_DIM + eps)[:, None]
        if OFFSET != 0.0:
            x_weight, y_weight = x_weight + OFFSET, y_weight + OFFSET
        x, y = x * rstd * x_weight, y * rstd * y_weight
    return (x * cos + y * gl.where(is_first, -sin, sin)).to(qkv_ptr.dtype.element_ty)


@gluon.jit
def _weigh(score, most_shared, shift_M, scale, keys, MASKED: gl.constexpr):
    """Softmax of a super-tile of which `keys` positions exist: exponentials [W * M, L], row sums [W * M], the factors
    of the tiles, and the shift after them."""
    score_WML = gl.reshape(gl.permute(gl.reshape(score, [_M, _L // 8, _W, 8]), [2, 0, 1, 3]), [_W, _M, _L])
    layout: gl.constexpr = score_WML.type.layout
    along: gl.constexpr = _only(layout, 1)
    w = _axis(_W, 0, layout)
    if MASKED:
        score_WML = gl.where(_axis(_L, 2, layout) < keys - w * _L, score_WML, float("-inf"))
    most_shared.store(gl.reshape(gl.max(score_WML, axis=2), [_W * _M]))
    alphas, own_WM1 = (), 0.0  # of a warp's own tile
    for tile in gl.static_range(_W):
        new_M = gl.maximum(shift_M, most_shared.slice(tile * _M, _M).load(shift_M.type.layout) * scale)
        finite_M = gl.where(new_M == float("-inf"), 0.0, new_M)  # as in `triton_tiles.attend`
        alphas = alphas + (gl.exp2(shift_M - finite_M),)
        shift_M = new_M
        own_WM1 = gl.where(w == tile, gl.convert_layout(finite_M, along)[None, :, None], own_WM1)
    p_WML = gl.exp2(gl.fma(score_WML, scale, -own_WM1))
    p_RL = gl.reshape(p_WML, [_W * _M, _L])
    return p_RL, row_sum(p_RL, _W * _M), alphas, shift_M


@gluon.jit
def _attend(
    state, memory, exchange, pages, q_parts, start, end, limit, scale, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """`triton_tiles.attend` over one super-tile. `state` also has the rows of the units to request meanwhile."""
    shift_M, sum_M, acc_MH, rows = state
    most_shared, sum_shared, p_shared = exchange
    mma: gl.constexpr = acc_MH.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    along: gl.constexpr = shift_M.type.layout
    next_rows = _find_later_rows(start + _SUPER, limit, pages, HEAD_DIM, PAGE_SIZE)
    score = gl.zeros([_M, _SUPER], gl.float32, mma)
    for half in gl.static_range(2):
        async_copy.wait_group(_LEAD - 1)
        score = mma_v2(q_parts[half], memory[half].permute((1, 0)).load(right), score)
        _request(memory, pages, rows[half], start, end, half + _LEAD, HEAD_DIM, MASKED)
    p_RL, sum_R, alphas, shift_M = _weigh(score, most_shared, shift_M, scale, end - start, MASKED)
    sum_shared.store(sum_R)
    p_shared.store(p_RL.to(p_shared.dtype))
    for half in gl.static_range(2):
        async_copy.wait_group(_LEAD - 1)
        for tile in gl.static_range(2 * half, 2 * half + 2):
            sum_M = gl.fma(sum_M, alphas[tile], sum_shared.slice(tile * _M, _M).load(along))
            p_ML = p_shared.slice(tile * _M, _M).load(left)
            v_LH = memory[2 + half].slice(tile % 2 * _L, _L).load(right)
            acc_MH = mma_v2(p_ML, v_LH, acc_MH * alphas[tile][:, None])
        _request(memory, pages, rows[2 + half], start, end, 2 + half + _LEAD, HEAD_DIM, MASKED)
    return shift_M, sum_M, acc_MH, next_rows


@gluon.jit
def _attend_all(q, memory, pages, begin, end, limit, scale, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The state of query rows [M, H] after positions `begin` to `end`, of which the first units have been requested."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, _W], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    along: gl.constexpr = gl.SliceLayout(1, mma)
    q_shared = gl.allocate_shared_memory(q.dtype, [_M, HEAD_DIM], _swizzled(HEAD_DIM), q)
    HALF: gl.constexpr = HEAD_DIM // 2
    q_parts = q_shared.slice(0, HALF, dim=1).load(left), q_shared.slice(HALF, HALF, dim=1).load(left)

    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    most_shared = gl.allocate_shared_memory(gl.float32, [_W * _M], flat)
    sum_shared = gl.allocate_shared_memory(gl.float32, [_W * _M], flat)
    exchange = (most_shared, sum_shared, gl.allocate_shared_memory(q.dtype, [_W * _M, _L], _swizzled(_L)))
    rows = _find_later_rows(begin, limit, pages, HEAD_DIM, PAGE_SIZE)
    shift_M, sum_M = gl.full([_M], float("-inf"), gl.float32, along), gl.full([_M], 0.0, gl.float32, along)
    state = shift_M, sum_M, gl.zeros([_M, HEAD_DIM], gl.float32, mma), rows
    whole = begin + gl.maximum((end - begin) // _SUPER - 1, 0) * _SUPER  # up to here, no request passes the end
    for start in range(begin, whole, _SUPER):
        state = _attend(state, memory, exchange, pages, q_parts, start, end, limit, scale, HEAD_DIM, PAGE_SIZE, False)
    for start in range(whole, end, _SUPER):
        state = _attend(state, memory, exchange, pages, q_parts, start, end, limit, scale, HEAD_DIM, PAGE_SIZE, True)
    async_copy.wait_group(0)
    return state[0], state[1], state[2]


@gluon.jit
def _store_state(acc_ptr, statistics_ptr, state_M, mask_M, states, state, HEAD_DIM: gl.constexpr):
    """`triton_tiles.store_state`."""
    shift_M, sum_M, acc_MH = state
    gl.store(statistics_ptr + state_M, shift_M, mask=mask_M)
    gl.store(statistics_ptr + states + state_M, sum_M, mask=mask_M)
    layout: gl.constexpr = acc_MH.type.layout
    offset = (state_M * HEAD_DIM)[:, None] + _axis(HEAD_DIM, 1, layout)
    gl.store(acc_ptr + offset, acc_MH, mask=mask_M[:, None])


@gluon.jit(do_not_specialize=["sequences", "table_width"])
def _group_async_kernel(
    q_ptr,  # [S, N, H]
    k_ptr,  # [P * page_size, K, H]
    v_ptr,
    acc_ptr,
    statistics_ptr,
    table_ptr,  # [S, pages]
    group_rows_ptr,  # [C, WIDTH], contiguous
    shared_len_ptr,  # [S]
    sequences,
    table_stride,
    q_stride,
    q_head_stride,
    k_stride: gl.constexpr,
    k_head_stride,
    v_stride: gl.constexpr,
    v_head_stride,
    scale,
    table_width,
    PDL: gl.constexpr,
    WIDTH: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP: gl.constexpr,  # query heads a kv head
    HEAD_DIM: gl.constexpr,
    BLOCK_H: gl.constexpr,  # the same
):
    """`triton_decode._group_kernel`, with tiles of ROWS query rows."""
    rowwise: gl.constexpr = _rowwise(HEAD_DIM)
    along: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [1, _W], [16, 8]))
    TILES: gl.constexpr = (WIDTH * GROUP + _M - 1) // _M

    pdl.release_and_wait(PDL)
    kv_head, split = gl.program_id(0), gl.program_id(2)
    group_rows_ptr += gl.program_id(1) // TILES * WIDTH
    first = gl.load(group_rows_ptr)
    if first < 0:
        return
    begin = split * SPLIT
    end = gl.minimum(gl.load(shared_len_ptr + first) // _L * _L, begin + SPLIT)
    if end <= begin:
        return
    row_M = gl.program_id(1) % TILES * _M + gl.arange(0, _M, layout=along)
    member_M = row_M // GROUP
    sequence_M = gl.load(group_rows_ptr + member_M, mask=member_M < WIDTH, other=-1)
    if gl.max(sequence_M, axis=0) < 0:
        return

    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    pages = Keys(k_ptr, v_ptr, k_stride, v_stride, table_ptr + first.to(gl.int64) * table_stride, 0, 0, 0)
    limit = table_width * PAGE_SIZE
    keys = _find_rows(begin, limit, pages, 0, HEAD_DIM, PAGE_SIZE)
    first_rows = keys, keys, _find_rows(begin, limit, pages, 2, HEAD_DIM, PAGE_SIZE)
    memory = _allocate(k_ptr.dtype.element_ty, HEAD_DIM)
    if begin + _SUPER <= end:
        _request_first(memory, pages, first_rows, begin, end, HEAD_DIM, False)
    else:
        _request_first(memory, pages, first_rows, begin, end, HEAD_DIM, True)
    head_M = kv_head * GROUP + row_M % GROUP
    mask_M = sequence_M >= 0
    offset_M = sequence_M.to(gl.int64) * q_stride + head_M * q_head_stride
    queries: gl.constexpr = gl.SliceLayout(1, rowwise)
    at = q_ptr + gl.convert_layout(offset_M, queries)[:, None] + _axis(HEAD_DIM, 1, rowwise)
    q = gl.load(at, mask=gl.convert_layout(mask_M, queries)[:, None], other=0.0)
    state = _attend_all(q, memory, pages, begin, end, limit, scale, HEAD_DIM, PAGE_SIZE)
    heads = gl.num_programs(0) * GROUP
    state_M = (split * sequences + sequence_M).to(gl.int64) * heads + head_M
    states = gl.num_programs(2).to(gl.int64) * sequences * heads
    _store_state(acc_ptr, statistics_ptr, state_M, mask_M, states, state, HEAD_DIM)


@gluon.jit(do_not_specialize=["table_width", "cache_rows", "rank"])
def _decode_async_kernel(
    q_ptr,  # [S, N, H]; with slots, [S, (N + 2K) * H]
    k_ptr,  # [P * page_size, K, H]
    v_ptr,
    out_ptr,  # [S, N, H], contiguous; written if there is one split
    acc_ptr,
    statistics_ptr,
    table_ptr,  # [S, pages]
    context_len_ptr,  # [S]
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
    k_stride: gl.constexpr,
    k_head_stride,
    v_stride: gl.constexpr,
    v_head_stride,
    scale,
    PDL: gl.constexpr,
    AHEAD: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    SPLIT: gl.constexpr,
    SPLITS: gl.constexpr,  # whether a sequence may have several
    GROUP: gl.constexpr,  # query heads a kv head
    HEAD_DIM: gl.constexpr,
    BLOCK_H: gl.constexpr,  # the same
    OFFSET: gl.constexpr = 0.0,  # of the norms' weights
    addresses_ptr=None,  # where the result is stored for other ranks, if there is one split
    state_ptr=None,
    rank=0,
    RANKS: gl.constexpr = 1,
):
    """One split of one sequence."""
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, _W], [16, 8])
    along: gl.constexpr = gl.SliceLayout(1, mma)
    lanes: gl.constexpr = HEAD_DIM // 8
    rowwise: gl.constexpr = _rowwise(HEAD_DIM)

    kv_head, sequence, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    begin = split * SPLIT
    k_ptr += kv_head * k_head_stride
    v_ptr += kv_head * v_head_stride
    table_ptr += sequence.to(gl.int64) * table_stride
    pages = Keys(k_ptr, v_ptr, k_stride, v_stride, table_ptr, 0, 0, 0)
    if PDL:
        LINE: gl.constexpr = triton_prefetch.LINE_PAGES
        LINES: gl.constexpr = triton.next_power_of_2(triton.cdiv(SPLIT, PAGE_SIZE * LINE))
        page = begin // PAGE_SIZE + _lanes(LINES) * LINE
        triton_prefetch.prefetch_lines(table_ptr + page, page < table_width)
    if AHEAD > 0:
        stored = gl.load(context_len_ptr + sequence, cache_modifier=".cg") - 1
        last, position = gl.minimum(stored, begin + SPLIT), begin + _lanes(AHEAD)
        triton_prefetch.prefetch_positions(pages, position, last, table_width, cache_rows, PAGE_SIZE, HEAD_DIM)
    pdl.release_and_wait(PDL, RANKS > 1)
    context, limit = gl.load(context_len_ptr + sequence), table_width * PAGE_SIZE
    keys = _find_rows(begin, limit, pages, 0, HEAD_DIM, PAGE_SIZE)
    first_rows = keys, keys, _find_rows(begin, limit, pages, 2, HEAD_DIM, PAGE_SIZE)
    end = context
    if SPLITS:
        if begin >= context:
            return
        end = gl.minimum(context, begin + SPLIT)

    memory = _allocate(dtype, HEAD_DIM)
    if begin + _SUPER < context:  # the first loads do not reach the new token, and may begin before it is stored
        _request_first(memory, pages, first_rows, begin, end, HEAD_DIM, False)

    h, m = _axis(HEAD_DIM, 1, rowwise), _axis(_M, 0, rowwise)
    sequences, kv_heads = gl.num_programs(1), gl.num_programs(0)
    heads = kv_heads * GROUP
    m, h = m + h * 0, h + m * 0  # [M, H]
    if slots_ptr is not None:
        is_key, mask = m == GROUP, m <= GROUP
        head = gl.where(is_key, heads + kv_head, kv_head * GROUP + m)
        qkv_ptr = q_ptr + sequence.to(gl.int64) * q_stride
        q = _rotate_heads(
            qkv_ptr, cos_sin_ptr + sequence.to(gl.int64) * cos_sin_stride, head, is_key, mask, q_weight_ptr,
            k_weight_ptr, eps, h, HEAD_DIM, OFFSET,
        )  # fmt: skip
        if end == context:
            slot = gl.load(slots_ptr + sequence)
            value = gl.load(qkv_ptr + (heads + kv_heads + kv_head) * HEAD_DIM + h, mask=is_key, other=0.0)
            gl.store(v_ptr + slot * v_stride + h, value, mask=is_key)
            gl.store(k_ptr + slot * k_stride + h, q, mask=is_key)
            barrier()
    else:
        at = q_ptr + sequence.to(gl.int64) * q_stride + (kv_head * GROUP + m) * q_head_stride + h
        q = gl.load(at, mask=m < GROUP, other=0.0)
    if begin + _SUPER >= context:
        _request_first(memory, pages, first_rows, begin, end, HEAD_DIM, True)
    state = _attend_all(q, memory, pages, begin, end, limit, scale, HEAD_DIM, PAGE_SIZE)

    row_M = gl.arange(0, _M, layout=along)
    mask_M = row_M < GROUP
    state_M = (split * sequences + sequence).to(gl.int64) * heads + kv_head * GROUP + row_M
    if SPLITS:
        states = gl.num_programs(2).to(gl.int64) * sequences * heads
        _store_state(acc_ptr, statistics_ptr, state_M, mask_M, states, state, HEAD_DIM)
    else:
        value = (state[2] / state[1][:, None]).to(out_ptr.dtype.element_ty)
        if RANKS > 1:
            quads: gl.constexpr = gl.BlockedLayout([1, 4], [16 // lanes, 2 * lanes], [_W, 1], [1, 0])
            to_store = gl.convert_layout(value, quads)
            store_to_peers(to_store, state_M, mask_M, 0, HEAD_DIM, addresses_ptr, state_ptr, rank, RANKS)
        offset = (state_M * HEAD_DIM)[:, None] + _axis(HEAD_DIM, 1, mma)
        gl.store(out_ptr + offset, value, mask=mask_M[:, None])


def supports(q: Tensor, caches: Sequence[Tensor], rows: int, page_size: int, scores: AttentionScores) -> bool:
    """Whether this kernel computes `rows` query rows in a program, with caches [rows, K, H]. With a negative scale, the
    maximum of a tile beyond the last position would be infinite."""
    head_dim = caches[0].shape[2]
    plain = not (scores.window or scores.softcap) and scores.sinks_N is None and scores.scale >= 0
    if not (plain and rows <= ROWS and head_dim in HEAD_DIMS and page_size % BLOCK == 0 and pdl.has_wgmma(q)):
        return False
    dtypes = {x.dtype for x in (q, *caches)} == {torch.bfloat16}
    aligned = not any(x.data_ptr() % ALIGNMENT or stride % ALIGNMENT for x in caches for stride in x.stride()[:2])
    return dtypes and aligned


def pays(programs: int, max_context_len: int) -> bool:
    """Whether this kernel is the faster one."""
    return programs <= MAX_PROGRAMS and max_context_len > MIN_CONTEXT


def pays_for_groups(programs: int, max_context_len: int) -> bool:
    """Whether the kernel of groups is the faster one; usually half of the groups are empty."""
    return programs <= (4 if max_context_len > LONG_CONTEXT else 2) * MAX_PROGRAMS


def run(grid: tuple[int, int, int], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Launch the kernel with these positional arguments, constants and options."""
    _decode_async_kernel[grid](*arguments, num_warps=WARPS, **options)


def run_groups(grid: tuple[int, int, int], arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """The same of the kernel of groups."""
    _group_async_kernel[grid](*arguments, num_warps=WARPS, **options)
