"""FlexAttention over packed segments and over a paged cache: one compiled kernel, two ways to find a sequence's tiles.

Both roles pass the kernel the same things: queries in blocks of 64 rows (tokens x heads of a group, tokens outermost)
of one sequence; keys and values as physical tiles of `KEY_TILE` rows, each at an absolute position of its sequence; and
for each block, the physical tiles that it reads, in ascending order of position. The cache's pages consist of such
tiles and are read in place. Packed segments are copied into tiles first, a shared prefix's whole tiles only once.

A row's bits then depend only on its keys' positions: the kernel takes tiles one after another with an online softmax,
and a tile of which a row sees nothing leaves its accumulators as they are (torch 2.11 and 2.13,
`_inductor/kernel/flex/templates`). To that end every tile is passed as partial, since the kernel would take all full
tiles after all partial ones; tile sizes, warps and stages are fixed; and the decode kernel, which splits keys, is off.

The places of queries and tiles are the same for all layers with one window, so they are computed once (`Tiles`).

Shape suffixes: T tokens, S sequences, N query heads, K kv heads, G query heads of a kv head, H head dim, B query
blocks, W tokens of a block, L tiles of a sequence, R physical tiles.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..embedding.operator import accumulate_rows
from ..operator import disable_duck_shapes, enable_autograd
from ..records import FlexMask, FlexSizes, KVPages, Packed, Paged
from .reference import KEY_TILE, visibility

KERNEL_OPTIONS = {
    "FORCE_USE_FLEX_ATTENTION": True,
    **{"fwd_BLOCK_M": 64, "fwd_BLOCK_N": KEY_TILE, "fwd_num_warps": 4, "fwd_num_stages": 2},
}


class BlockSize(NamedTuple):
    """Rows per block of queries, and per tile of keys and values."""

    rows: int
    tile: int


FORWARD = BlockSize(64, KEY_TILE)
BACKWARD = BlockSize(128, 128)  # divisible by the tiles that torch chooses for the backward kernel, on every GPU


class Tiles(NamedTuple):
    """Where queries and keys are. No size that is larger in other batches may be 1, which would cause a recompilation.

    Attributes:
        query_rows: for each row of the blocks, its row of q [T * N, H], int64 [K * B * rows]; where there is no token,
            another row of the block.
        out_rows: for each token and head, its row of the blocks, int64 [T * N]; for padding, a row that sees nothing.
        position: of each row of a head's blocks, int32 [B * rows]; -1 where there is no token.
        key_position: of each row of the tiles in the sequences that have it, int32 [R * tile].
        count_B, list_BL: number of physical tiles of each block, and the tiles in order, int32.
        key_rows: packed only: for each row of the tiles, its row of k and v, int64 [R * tile]; where there is none, a
            row of the same segment, so that no other segment's value can matter.
        key_targets: packed only: the same, but where there is no row, one past T. There are as many of those as a tile
            has rows, since adding very many rows to one index is slow.
    """

    query_rows: Tensor
    out_rows: Tensor
    position: Tensor
    key_position: Tensor
    count_B: Tensor
    list_BL: Tensor
    key_rows: Tensor
    key_targets: Tensor


class _QueryBlocks(NamedTuple):
    """Blocks of queries: how many tokens fit in one; each one's sequence, absolute position of its first token, and
    number of tokens; and three fields of `Tiles`."""

    width: int
    sequence_B: Tensor
    first_B: Tensor
    count_B: Tensor
    query_rows: Tensor
    out_rows: Tensor
    position: Tensor


def tiles_packed(layout: Packed, sizes: FlexSizes, window: int) -> list[Tensor]:
    """`Tiles` of packed segments, first for the forward pass, then for the backward pass."""
    return [*_tiles_packed(layout, sizes, window, FORWARD), *_tiles_packed(layout, sizes, window, BACKWARD)]


def _tiles_packed(layout: Packed, sizes: FlexSizes, window: int, size: BlockSize) -> Tiles:
    """A prefix's whole tiles are shared with the segment that it begins."""
    segments, device, tokens = layout.prefix_len_S.shape[0], layout.cu_seqlens.device, sizes.tokens
    (start_S, length_S), prefix_S = _segment_spans(layout.cu_seqlens, segments), layout.prefix_len_S.long()
    context_S = torch.where(length_S > 0, prefix_S + length_S, 0)
    shared_S = prefix_S // size.tile
    own_S = ((context_S + size.tile - 1) // size.tile - shared_S).clamp(min=0)
    end_S = own_S.cumsum(0)
    begin_S = end_S - own_S
    owner_S = (torch.searchsorted(start_S, layout.prefix_start_S.long(), right=True) - 1).clamp(0, segments - 1)
    tile_L = torch.arange(max(-(-layout.max_len // size.tile), 2), device=device)
    is_shared_SL = tile_L < shared_S.unsqueeze(1)
    table_SL = torch.where(is_shared_SL, begin_S[owner_S].unsqueeze(1), (begin_S - shared_S).unsqueeze(1)) + tile_L

    physical = tokens // size.tile + 2 * segments
    row = torch.arange(physical * size.tile, device=device)
    sequence = torch.searchsorted(end_S, row // size.tile, right=True).clamp(max=segments - 1)
    position = row + (shared_S - begin_S)[sequence] * size.tile
    key_position, real = position.int(), position < context_S[sequence]
    position = torch.minimum(position, context_S[sequence] - 1)
    in_prefix = position < prefix_S[sequence]
    key_rows = position + torch.where(in_prefix, layout.prefix_start_S.long()[sequence], (start_S - prefix_S)[sequence])
    key_rows = key_rows.clamp(0, tokens - 1)

    blocks = _query_blocks(start_S, length_S, prefix_S, sizes, size.rows)
    lists = _tile_lists(blocks, table_SL, physical, window, size.tile)
    targets = torch.where(real, key_rows, tokens + row % size.tile)
    return Tiles(*blocks[-3:], key_position, *lists, key_rows, targets)


def tiles_paged(layout: Paged, sizes: FlexSizes, pages: int, page_size: int, window: int) -> list[Tensor]:
    """`Tiles` of a cache of `pages` pages, which is read in place.

    Sequences that share a page have it at the same positions. An idle row may still refer to a page that belongs to
    another sequence by now, but it has only position 0, so the largest position that a page is given is the right one.
    """
    if page_size % KEY_TILE:
        raise ValueError(f"pages have {page_size} positions; flex attention reads multiples of {KEY_TILE}")
    each, context_S = page_size // KEY_TILE, layout.context_len_S.long()
    table = layout.block_table[:, : -(-layout.max_context_len // page_size)].long()
    table_SL = (table.unsqueeze(2) * each + torch.arange(each, device=table.device)).flatten(1)
    start_S, length_S = _segment_spans(layout.cu_seqlens, context_S.shape[0])
    blocks = _query_blocks(start_S, length_S, context_S - length_S, sizes, FORWARD.rows)
    lists = _tile_lists(blocks, table_SL, pages * each, window, KEY_TILE)
    tile_L = torch.arange(table_SL.shape[1], device=table.device).expand_as(table_SL)
    place_SL = torch.where(tile_L * KEY_TILE < context_S.unsqueeze(1), table_SL, pages * each)
    tile_R = table.new_full((pages * each + 1,), -1).scatter_reduce(0, place_SL.flatten(), tile_L.flatten(), "amax")
    key_position = tile_R[:-1].unsqueeze(1) * KEY_TILE + torch.arange(KEY_TILE, device=table.device)
    none = table.new_empty(0), table.new_empty(0)
    return [*blocks[-3:], key_position.flatten().int(), *lists, *none]


def _segment_spans(cu_seqlens: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    """First rows and lengths. To a trace the two sizes are unrelated, so neither is derived from the other."""
    s = torch.arange(segments, device=cu_seqlens.device)
    start_S = cu_seqlens[s].long()
    return start_S, cu_seqlens[s + 1] - start_S


def _query_blocks(start_S: Tensor, length_S: Tensor, before_S: Tensor, sizes: FlexSizes, rows: int) -> _QueryBlocks:
    """Cut sequences into blocks; `before_S` is the number of positions before each one's tokens. There is one block
    more than can be needed, which sees nothing."""
    tokens, heads, kv_heads = sizes
    group, segments, device = heads // kv_heads, start_S.shape[0], start_S.device
    width, end_of_S = rows // group, start_S + length_S
    blocks_S = (length_S + width - 1) // width
    end_S = blocks_S.cumsum(0)
    begin_S = end_S - blocks_S
    b = torch.arange(tokens // width + segments + 1, device=device)
    sequence_B = torch.searchsorted(end_S, b, right=True).clamp(max=segments - 1)
    offset_B = (b - begin_S[sequence_B]) * width
    count_B = (length_S[sequence_B] - offset_B).clamp(0, width)  # a block past the last one begins past its end

    r, head_K = torch.arange(rows, device=device), torch.arange(kv_heads, device=device) * group
    offset_BR = torch.minimum(r // group, (count_B - 1).unsqueeze(1))
    token_BR = (start_S[sequence_B] + offset_B).unsqueeze(1) + offset_BR
    query_rows_BR = token_BR.clamp(0, tokens - 1) * heads + r % group
    query_rows = (head_K[:, None, None] + query_rows_BR).flatten()

    t, per_head = torch.arange(tokens, device=device), b.shape[0] * rows
    sequence_T = torch.searchsorted(end_of_S, t, right=True).clamp(max=segments - 1)
    offset_T = t - start_S[sequence_T]
    row_T = (begin_S[sequence_T] + offset_T // width) * rows + offset_T % width * group
    inside_T1 = (t < end_of_S[-1]).unsqueeze(1)
    row_TG = torch.where(inside_T1, row_T.unsqueeze(1) + torch.arange(group, device=device), per_head - 1)
    head_row_K = torch.arange(kv_heads, device=device) * per_head
    out_rows = (head_row_K[:, None] + row_TG.unsqueeze(1)).flatten()
    first_B, token_R = before_S[sequence_B] + offset_B, r // group
    inside_BR = token_R < count_B.unsqueeze(1)  # a block may end early, and the group may not divide the rows
    position = torch.where(inside_BR, first_B.unsqueeze(1) + token_R, -1).flatten().int()
    return _QueryBlocks(width, sequence_B, first_B, count_B, query_rows, out_rows, position)


def _tile_lists(blocks: _QueryBlocks, table_SL: Tensor, physical: int, window: int, tile: int) -> tuple[Tensor, Tensor]:
    """`Tiles.count_B` and `list_BL`, from each sequence's physical tiles."""
    begin_B = torch.zeros_like(blocks.first_B)
    listed = table_SL.shape[1]
    if window:
        begin_B = (blocks.first_B - window + 1).clamp(min=0) // tile
        listed = min(listed, (window + blocks.width - 2) // tile + 2)
    end_B = (blocks.first_B + blocks.count_B - 1) // tile + 1
    count_B = torch.where(blocks.count_B > 0, end_B - begin_B, 0).clamp(min=0)
    index_L = torch.arange(max(listed, 2), device=table_SL.device)
    at_BL = (begin_B.unsqueeze(1) + index_L).clamp(max=table_SL.shape[1] - 1)
    list_BL = table_SL[blocks.sequence_B].gather(1, at_BL).clamp(0, physical - 1)
    return count_B.int(), list_BL.int()


def packed(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, mask: FlexMask) -> Tensor:
    if not _is_real(q_TNH):
        return q_TNH.new_empty(q_TNH.shape)
    tiles = Tiles(*mask.tiles[: len(Tiles._fields)])
    k, v = (_as_tiles(x.index_select(0, tiles.key_rows)) for x in (k_TKH, v_TKH))
    return _forward(q_TNH, k, v, tiles, mask)


def paged(q_TNH: Tensor, cache: KVPages, layout: Paged, mask: FlexMask) -> Tensor:
    if not _is_real(q_TNH):
        return q_TNH.new_empty(q_TNH.shape)
    k, v = (_as_tiles(pages.flatten(0, 1)) for pages in cache)
    return _forward(q_TNH, k, v, Tiles(*mask.tiles), mask)


def packed_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, mask: FlexMask
) -> tuple[Tensor, Tensor, Tensor]:
    """See `flex.flex_packed_backward`. Recomputes the forward, then runs torch's own backward, which uses no atomics
    here."""
    if not _is_real(q_TNH):
        return q_TNH.new_empty(q_TNH.shape), k_TKH.new_empty(k_TKH.shape), v_TKH.new_empty(v_TKH.shape)
    tiles = Tiles(*mask.tiles[len(Tiles._fields) :])
    k, v = (_as_tiles(x.index_select(0, tiles.key_rows)) for x in (k_TKH, v_TKH))
    q, grad = (_to_blocks(x, k, tiles) for x in (q_TNH, grad_TNH))
    grad = grad.masked_fill((tiles.position < 0).view(1, 1, -1, 1), 0.0)
    with enable_autograd():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _compiled_attend(mask.window, mask.mask, True)(*leaves, *tiles[2:6])
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    dq_TNH = _from_blocks(dq, q_TNH, tiles)
    padding_T = torch.arange(len(q_TNH), device=q_TNH.device) >= layout.cu_seqlens[-1]
    dk_TKH, dv_TKH = (_from_tiles(x, tiles, len(k_TKH)) for x in (dk, dv))
    return dq_TNH.masked_fill_(padding_T[:, None, None], 0.0), dk_TKH, dv_TKH


def _forward(q_TNH: Tensor, k: Tensor, v: Tensor, tiles: Tiles, mask: FlexMask) -> Tensor:
    """The queries' results, [T, N, H], from keys and values in tiles."""
    out = _compiled_attend(mask.window, mask.mask, False)(_to_blocks(q_TNH, k, tiles), k, v, *tiles[2:6])
    return _from_blocks(out, q_TNH, tiles)


def _to_blocks(x_TNH: Tensor, k: Tensor, tiles: Tiles) -> Tensor:
    """Token rows as blocks, [1, K, B * rows, H]."""
    return x_TNH.flatten(0, 1).index_select(0, tiles.query_rows).view(1, k.shape[1], -1, k.shape[3])


def _from_blocks(x: Tensor, like_TNH: Tensor, tiles: Tiles) -> Tensor:
    """Blocks as token rows, [T, N, H]."""
    return x.contiguous().view(-1, x.shape[3]).index_select(0, tiles.out_rows).view(like_TNH.shape)


def _as_tiles(x_RKH: Tensor) -> Tensor:
    """Rows of tiles in the kernel's layout, [1, K, R * tile, H]; both roles have the same strides."""
    return x_RKH.transpose(0, 1).unsqueeze(0)


def _from_tiles(x: Tensor, tiles: Tiles, tokens: int) -> Tensor:
    """Sums of the tiles' rows by source row, [T, K, H]: a prefix's last rows may be in several tiles."""
    values = x.squeeze(0).transpose(0, 1).flatten(1).float()
    total = accumulate_rows(values.new_zeros(tokens + BACKWARD.tile, values.shape[1]), tiles.key_targets, values)
    return total[:tokens].to(x.dtype).view(tokens, x.shape[1], -1)


@functools.cache
def _compiled_attend(window: int, mask: str, for_backward: bool) -> Callable[..., Tensor]:
    """Attention of blocks over tiles, in the blocks' layout, compiled once for all sizes.

    Torch limits how often one code object is compiled, so each of these has its own.
    """
    attend = _make_attend(window, mask, for_backward)
    own = types.FunctionType(attend.__code__.replace(), attend.__globals__, attend.__name__, None, attend.__closure__)
    compiled = torch.compile(own, dynamic=True, fullgraph=True)

    def attend(*tensors: Tensor) -> Tensor:
        with disable_duck_shapes():
            return compiled(*tensors)

    return attend


def _make_attend(window: int, mask: str, for_backward: bool) -> Callable[..., Tensor]:
    """The function that `_compiled_attend` compiles; its last arguments are fields of `Tiles`."""
    window_text = str(window)  # text, because Dynamo would make a closed-over integer another dynamic size

    def attend(
        q: Tensor, k: Tensor, v: Tensor, position: Tensor, key_position: Tensor, count_B: Tensor, list_BL: Tensor
    ) -> Tensor:
        size = BACKWARD if for_backward else FORWARD
        visible = visibility(int(window_text), mask)

        def mask_mod(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return visible(position[row], key_position[key])

        if for_backward:  # torch takes the lists' width to be the number of tiles
            physical = k.shape[2] // size.tile
            list_BL = F.pad(list_BL, (0, physical))[:, :physical].contiguous()
        block_mask = BlockMask.from_kv_blocks(
            count_B[None, None], list_BL[None, None], BLOCK_SIZE=(size.rows, size.tile), mask_mod=mask_mod,
            seq_lengths=(q.shape[2], k.shape[2]), compute_q_blocks=for_backward,
        )  # fmt: skip
        return flex_attention(q, k, v, block_mask=block_mask, kernel_options=KERNEL_OPTIONS)  # type: ignore[return-value]

    return attend


def _is_real(tensor: Tensor) -> bool:
    """Whether the tensor has real memory: a fake one must not reach code that launches kernels itself."""
    return type(tensor) in (Tensor, torch.nn.Parameter)
