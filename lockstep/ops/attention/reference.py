"""Attention on a CPU: fixed key tiles at absolute positions, float32 throughout, one rounding at the end.

Queries are taken in blocks of `QUERY_BLOCK` tokens; blocks that need the same key tiles run together. A block computes
the scores of all its tiles, one softmax per split, then one product per tile, added in ascending order; splits are
merged left to right. A masked key has probability exactly 0 and a finite placeholder as its value, so nothing behind
the mask can reach the result. With a window, tiles before it are skipped; sinks come last.

The backward of packed attention is plain torch: segments of similar shape are padded into dense batches.

Which keys a query sees, beyond causality, is also said here: a sliding window, and a user's function by name. Operators
take a mask as a window and a name, which a graph can hold. The function with that name is registered here before
anything runs.

Shape suffixes: B query blocks, or segments of one batch, M query rows of a block (tokens x heads of a group), Q padded
queries, L keys, I either, N query heads, K kv heads, G query heads per kv head, H head dim.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..embedding.operator import accumulate_rows
from ..linear.operator import COLUMN_BLOCK
from ..records import PLAIN, AttentionScores, KVPages, Packed, Paged

KEY_TILE = 64
KEY_SPLIT = 4096  # a multiple of KEY_TILE
MAX_SEQUENCES = 65_534  # per call: a GPU grid's limit along the sequence axis, less one for the padding
QUERY_BLOCK = 32
ROW_BLOCK = 16  # measured: batched products of 16, 32, 48 ... rows agree bit for bit; of 4 they do not at a depth of 96
SCORE_BUDGET, BACKWARD_BUDGET = 1 << 23, 1 << 27  # score elements in flight
LENGTH_STEP = 32  # segments whose lengths round up to the same multiples of this run together in the backward

# Maps a query's and a key's absolute positions (int32 tensors that broadcast) to a bool tensor.
MaskFunction = Callable[[Tensor, Tensor], Tensor]

_REGISTERED: dict[str, MaskFunction] = {}


def register_mask(name: str, function: MaskFunction) -> None:
    """Make `function` available to operators as `name`. If the function changes, so should the name: what was compiled
    or checked under a name is kept."""
    _REGISTERED[name] = function


def visibility(window: int, mask: str) -> MaskFunction:
    """Returns the function that says whether a query at one position sees the key at another of its sequence.

    Args:
        window: how many of the last keys a query sees, its own included; 0: all.
        mask: a registered name; "": none.

    Raises:
        KeyError: nothing is registered under the name.
    """
    function = _REGISTERED[mask] if mask else None

    def visible(query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if window:
            seen = seen & (key > query - window)
        return seen if function is None else seen & function(query, key)

    return visible


class _Block(NamedTuple):
    """Queries in rows `row:row + length` of one sequence; the first has absolute position `position`."""

    sequence: int
    row: int
    position: int
    length: int


class _Keys(NamedTuple):
    """Keys and values; `rows`, which maps [B] sequences and [B, L] positions to their rows; how scores become weights;
    and which keys a query sees, if not simply all up to its own."""

    k_RKH: Tensor
    v_RKH: Tensor
    rows: Callable[[Tensor, Tensor], Tensor]
    scores: AttentionScores
    visible: MaskFunction | None


def packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    layout: Packed,
    scores: AttentionScores = PLAIN,
    visible: MaskFunction | None = None,
) -> Tensor:
    """See `attention.operator.attention_packed`; with `visible`, `flex.flex_packed`."""
    starts, prefix_len = layout.cu_seqlens.tolist(), layout.prefix_len_S.tolist()
    queries = [(starts[s], starts[s + 1] - starts[s], prefix_len[s]) for s in range(len(prefix_len))]
    start_S, prefix = layout.cu_seqlens[:-1].long(), layout.prefix_len_S.long()
    prefix_start = layout.prefix_start_S.long()

    def rows(sequence_B: Tensor, position_BL: Tensor) -> Tensor:
        own = (start_S - prefix)[sequence_B].unsqueeze(1)
        shared = prefix_start[sequence_B].unsqueeze(1)
        return position_BL + torch.where(position_BL < prefix[sequence_B].unsqueeze(1), shared, own)

    return _attend(q_TNH, _Keys(k_TKH, v_TKH, rows, scores, visible), queries)


def paged(
    q_TNH: Tensor, cache: KVPages, layout: Paged, scores: AttentionScores = PLAIN, visible: MaskFunction | None = None
) -> Tensor:
    """See `attention.operator.attention_paged`; with `visible`, `flex.flex_paged`."""
    starts, context = layout.cu_seqlens.tolist(), layout.context_len_S.tolist()
    lengths = [starts[s + 1] - starts[s] for s in range(len(context))]
    queries = [(starts[s], n, context[s] - n) for s, n in enumerate(lengths)]
    page_size = cache.k_cache.shape[1]

    def rows(sequence_B: Tensor, position_BL: Tensor) -> Tensor:
        pages = layout.block_table[sequence_B].gather(1, position_BL // page_size).long()
        return pages * page_size + position_BL % page_size

    k_RKH, v_RKH = (pages.flatten(0, 1) for pages in cache)
    return _attend(q_TNH, _Keys(k_RKH, v_RKH, rows, scores, visible), queries)


def _attend(q_TNH: Tensor, keys: _Keys, queries: list[tuple[int, int, int]]) -> Tensor:
    """Run all query blocks; `queries` holds (first row, length, first absolute position) of each sequence."""
    out_TNH = torch.zeros_like(q_TNH)
    by_tiles: dict[tuple[range, int], list[_Block]] = defaultdict(list)
    for sequence, (row, length, position) in enumerate(queries):
        for offset in range(0, length, QUERY_BLOCK):
            count = min(QUERY_BLOCK, length - offset)
            first = keys.scores.first_key(position + offset) // KEY_TILE
            tiles = range(first, (position + offset + count - 1) // KEY_TILE + 1)
            width = 1 if count == 1 else QUERY_BLOCK
            by_tiles[tiles, width].append(_Block(sequence, row + offset, position + offset, count))
    for (tiles, width), blocks in by_tiles.items():
        size = max(1, SCORE_BUDGET // (q_TNH.shape[1] * width * len(tiles) * KEY_TILE))
        for i in range(0, len(blocks), size):
            _attend_blocks(out_TNH, q_TNH, keys, blocks[i : i + size], width, tiles)
    return out_TNH


def _attend_blocks(out_TNH: Tensor, q_TNH: Tensor, keys: _Keys, blocks: list[_Block], width: int, tiles: range) -> None:
    """Blocks that need these key tiles, each `width` query tokens wide (short ones repeat their last token)."""
    sequence_B, row_B, position_B, count_B = torch.tensor(blocks).unbind(1)
    offset_W = torch.arange(width)
    query_BW = torch.minimum(offset_W, count_B.unsqueeze(1) - 1)  # within the block
    keys_L = torch.arange(tiles.start * KEY_TILE, tiles.stop * KEY_TILE)
    last_B1, window, visible = (position_B + count_B - 1).unsqueeze(1), keys.scores.window, keys.visible
    real_BL = torch.minimum(keys_L, last_B1)
    position_BW1 = (position_B.unsqueeze(1) + query_BW).unsqueeze(2)
    hidden_BWL = keys_L > position_BW1 if visible is None else ~visible(position_BW1.int(), keys_L.int())
    if window:
        real_BL = torch.maximum(real_BL, (position_B - window + 1).unsqueeze(1))
        hidden_BWL |= keys_L <= position_BW1 - window
    bias_BWL = torch.zeros(1).masked_fill(hidden_BWL, -torch.inf)
    token_BW = row_B.unsqueeze(1) + query_BW
    out = _softmax_attention(q_TNH[token_BW], keys, keys.rows(sequence_B, real_BL), bias_BWL, tiles.start * KEY_TILE)
    real = offset_W < count_B.unsqueeze(1)
    out_TNH.index_copy_(0, token_BW[real], out[real])


def _softmax_attention(q_BWNH: Tensor, keys: _Keys, key_rows_BL: Tensor, bias_BWL: Tensor, start: int) -> Tensor:
    """[B, W, N, H] in q's dtype: W query tokens per block over the block's key rows, at positions from `start` on.

    With a custom mask there are no splits, and a query may see any keys or none; in that case its output is zero.
    """
    k_RKH, v_RKH, _, scoring, masked = *keys[:4], keys.visible is not None
    blocks, width, heads, head_dim = q_BWNH.shape
    length, kv_heads = key_rows_BL.shape[1], k_RKH.shape[1]
    group = heads // kv_heads
    q = q_BWNH.float() * (scoring.scale or head_dim**-0.5)
    q = q.view(blocks, width, kv_heads, group, head_dim).transpose(1, 2)
    q = q.reshape(blocks * kv_heads, width * group, head_dim)
    padding = -q.shape[1] % ROW_BLOCK
    q = F.pad(q, (0, 0, 0, padding)) if padding else q

    rows = (key_rows_BL.unsqueeze(1) * kv_heads + _head_indices(kv_heads)).flatten()
    k = k_RKH.reshape(-1, head_dim).index_select(0, rows).float().view(-1, length, head_dim)
    v = v_RKH.reshape(-1, head_dim).index_select(0, rows).float().view(-1, length, head_dim)
    v = F.pad(v, (0, -head_dim % COLUMN_BLOCK)) if head_dim % COLUMN_BLOCK else v

    scores = soft_cap(torch.bmm(q, k.transpose(1, 2)), scoring.softcap)
    scores[:, : width * group].view(blocks, kv_heads, width, group, length).add_(bias_BWL[:, None, :, None])
    if masked:
        out, _ = _attend_split(scores, v)
    else:
        sinks = None if scoring.sinks_N is None else _sink_rows(scoring.sinks_N, q_BWNH, kv_heads, scores.shape[1])
        out = _attend_splits(scores, v, start, sinks)
    out = out[:, : width * group, :head_dim].view(blocks, kv_heads, width, group, head_dim)
    if masked:
        out = out.masked_fill((bias_BWL == -torch.inf).all(-1)[:, None, :, None, None], 0.0)
    return out.transpose(1, 2).reshape(blocks, width, heads, head_dim).to(q_BWNH.dtype)


def _sink_rows(sinks_N: Tensor, q_BWNH: Tensor, kv_heads: int, rows: int) -> Tensor:
    """The sink of each of `rows` rows of a block and kv head, 0 in padding; [batch, M, 1]."""
    blocks, width = q_BWNH.shape[:2]
    sinks = sinks_N.float().view(1, kv_heads, 1, -1).expand(blocks, -1, width, -1).reshape(blocks * kv_heads, -1, 1)
    return F.pad(sinks, (0, 0, 0, rows - sinks.shape[1]))


def _attend_splits(scores: Tensor, v: Tensor, first: int, sinks: Tensor | None) -> Tensor:
    """The output over keys from position `first` on, with the sinks joined."""
    if first // KEY_SPLIT == (first + v.shape[1] - 1) // KEY_SPLIT:
        out, p = _attend_split(scores, v)
        return out if sinks is None else out * _share_of_keys(*_statistics(scores, p), sinks)
    out, exp_sum, maximum = _merge_splits(scores, v, first)
    return out if sinks is None else out * _share_of_keys(exp_sum, maximum, sinks)


def _attend_split(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [batch, M, H] and probabilities from scores [batch, M, L] and values [batch, L, H] of one split."""
    p = torch.softmax(scores, dim=-1)
    out = torch.bmm(p[:, :, :KEY_TILE], v[:, :KEY_TILE])
    for tile in range(KEY_TILE, v.shape[1], KEY_TILE):
        out += torch.bmm(p[:, :, tile : tile + KEY_TILE], v[:, tile : tile + KEY_TILE])
    return out, p


def _statistics(scores: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of exponentials relative to the largest score, and that score, [batch, M, 1]."""
    # the largest probability is exp(0) / sum
    return p.amax(dim=-1, keepdim=True).reciprocal(), scores.amax(dim=-1, keepdim=True)


def _merge_splits(scores: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output over several splits of keys from position `first` on, and its `_statistics`. Each split is weighted by
    its sum of exponentials; a split in which a row sees no key is skipped."""
    total, total_sum, total_max = torch.empty(0), torch.empty(0), torch.empty(0)
    for begin in range(first // KEY_SPLIT * KEY_SPLIT, first + v.shape[1], KEY_SPLIT):
        keys = slice(max(begin - first, 0), begin - first + KEY_SPLIT)
        split = scores[:, :, keys]
        out, p = _attend_split(split, v[:, keys])
        exp_sum, maximum = _statistics(split, p)
        if begin <= first:
            total, total_sum, total_max = out, exp_sum, maximum
            continue
        new_max = torch.maximum(total_max, maximum)
        before, after = total_sum * torch.exp(total_max - new_max), exp_sum * torch.exp(maximum - new_max)
        seen, new_sum = maximum != -torch.inf, before + after
        merged = (total * (before / new_sum) + out * (after / new_sum), new_sum, new_max)
        first_seen = total_max == -torch.inf  # splits before a window are NaN
        state, split_state = (total, total_sum, total_max), (out, exp_sum, maximum)
        total, total_sum, total_max = (
            torch.where(first_seen, y, torch.where(seen, z, x))
            for x, y, z in zip(state, split_state, merged, strict=True)
        )
    return total, total_sum, total_max


def _share_of_keys(exp_sum: Tensor, maximum: Tensor, sinks: Tensor) -> Tensor:
    """The share that keys have in the sum of exponentials once the sinks' are added."""
    highest = torch.maximum(maximum, sinks)
    key_sum = exp_sum * torch.exp(maximum - highest)
    return key_sum / (key_sum + torch.exp(sinks - highest))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`; x if the cap is 0. The tanh is that of Cephes (`tanhf`), since torch's own has other bits
    in a vector's tail."""
    if not cap:
        return x
    x = x / cap
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    for c in (-5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = p * z + c
    far = 1.0 - 2.0 / (torch.exp(2.0 * x.abs()) + 1.0)
    return cap * torch.where(x.abs() < 0.625, p * z * x + x, torch.where(x < 0, -far, far))


@functools.lru_cache(maxsize=8)
def _head_indices(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32).unsqueeze(1)


def packed_backward(
    tensors: Sequence[Tensor], layout: Packed, scores: AttentionScores = PLAIN, visible: MaskFunction | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention.operator.attention_packed` (with `visible`, of `flex.flex_packed`) for q, k, v and the
    sinks (empty if there are none), accumulated in float32 in a fixed order. `tensors` are the output's gradient, q, k
    and v."""
    grad_TNH, q_TNH, k_TKH, v_TKH = tensors
    if scores.window:
        assert visible is None
        visible = visibility(scores.window, "")
    sinks_N = q_TNH.new_empty(0) if scores.sinks_N is None else scores.sinks_N
    grad_sinks = torch.zeros_like(sinks_N, dtype=torch.float32)
    grad_q = torch.zeros_like(q_TNH, dtype=torch.float32)
    grad_k = torch.zeros_like(k_TKH, dtype=torch.float32)
    grad_v = torch.zeros_like(v_TKH, dtype=torch.float32)
    starts, prefix_start, prefix_len = (x.tolist() for x in layout[:3])
    batches: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for s, (p_start, p_len) in enumerate(zip(prefix_start, prefix_len, strict=True)):
        length = starts[s + 1] - starts[s]
        if length:
            shape = (-(-length // LENGTH_STEP) * LENGTH_STEP, -(-(length + p_len) // LENGTH_STEP) * LENGTH_STEP)
            batches[shape].append((starts[s], length, p_start, p_len))
    for (queries, keys), segments in batches.items():
        size = max(1, BACKWARD_BUDGET // (q_TNH.shape[1] * queries * keys))
        for i in range(0, len(segments), size):
            table = torch.tensor(segments[i : i + size]).to(q_TNH.device)
            padded = token_BQ, row_BL, _ = _pad_segments(table, queries, keys, visible)
            dq, dk, dv, dsinks_BN = _batch_gradients(grad_TNH, q_TNH, k_TKH, v_TKH, padded, scores)
            grad_sinks += dsinks_BN.sum(0)
            for total, rows, values in ((grad_q, token_BQ, dq), (grad_k, row_BL, dk), (grad_v, row_BL, dv)):
                accumulate_rows(total, rows.flatten(), values.transpose(1, 2).flatten(0, 1))  # in the order of (b, i)
    return grad_q.to(q_TNH.dtype), grad_k.to(k_TKH.dtype), grad_v.to(v_TKH.dtype), grad_sinks.to(sinks_N.dtype)


class _PaddedSegments(NamedTuple):
    """Rows of the padded queries and keys, and the mask as a bias; padding refers to the segment's first row."""

    token_BQ: Tensor
    row_BL: Tensor
    bias_BQL: Tensor


def _pad_segments(table: Tensor, queries: int, keys: int, visible: MaskFunction | None) -> _PaddedSegments:
    start, length, prefix_start, prefix_len = (column.unsqueeze(1) for column in table.unbind(1))
    q = torch.arange(queries, device=table.device)
    k = torch.arange(keys, device=table.device)
    token_BQ = torch.where(q < length, start + q, start)
    row_BL = torch.where(k < prefix_len, prefix_start + k, start - prefix_len + k)
    row_BL = torch.where(k < prefix_len + length, row_BL, start)
    position_BQ1 = (prefix_len + q).unsqueeze(2)
    seen = k <= position_BQ1 if visible is None else visible(position_BQ1.int(), k.int())
    hidden = ~(seen & (q < length).unsqueeze(2))
    return _PaddedSegments(token_BQ, row_BL, torch.zeros(1, device=table.device).masked_fill(hidden, -torch.inf))


def _batch_gradients(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, segments: _PaddedSegments, scoring: AttentionScores
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for q [B, N, Q, H], k and v [B, K, L, H], and the sinks [B, N] or [0], float32; padded rows are exactly
    zero."""
    token_BQ, row_BL, bias_BQL = segments
    batch, queries = token_BQ.shape
    heads, head_dim = q_TNH.shape[1:]
    kv_heads = k_TKH.shape[1]
    scale, cap = scoring.scale or head_dim**-0.5, scoring.softcap
    shape, score_shape = (batch * kv_heads, -1, head_dim), (batch, kv_heads, heads // kv_heads, queries, -1)
    q, grad = (_gather_heads(token_BQ, x).view(shape) for x in (q_TNH, grad_TNH))  # [B * K, G * Q, H]
    k, v = (_gather_heads(row_BL, x).view(shape) for x in (k_TKH, v_TKH))  # [B * K, L, H]
    scores = soft_cap(torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).view(score_shape), cap)
    slope = (1.0 - (scores / cap) ** 2).view(*q.shape[:2], -1) if cap else None
    p, p_sink = _softmax_with_sinks(scores.add_(bias_BQL[:, None, None]), scoring.sinks_N)
    p = p.nan_to_num_(0.0).view(*q.shape[:2], -1)
    dp = torch.bmm(grad, v.transpose(1, 2)).float()
    delta = (p * dp).sum(-1, keepdim=True)
    dsinks = p_sink.flatten() if scoring.sinks_N is None else -(p_sink * delta.view(p_sink.shape)).sum(-1).flatten(1)
    ds = dp.sub_(delta).mul_(p)
    ds = (ds if slope is None else ds.mul_(slope)).mul_(scale).to(q.dtype)
    dq, dk = torch.bmm(ds, k).float(), torch.bmm(ds.transpose(1, 2), q).float()
    dv = torch.bmm(p.to(q.dtype).transpose(1, 2), grad).float()
    kv_shape = (batch, kv_heads, -1, head_dim)
    return dq.view(batch, heads, queries, head_dim), dk.view(kv_shape), dv.view(kv_shape), dsinks


def _softmax_with_sinks(scores: Tensor, sinks_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Probabilities of keys, [B, K, G, Q, L], and of the sinks, [B, K, G, Q] or [0]."""
    if sinks_N is None:
        return torch.softmax(scores, dim=-1), scores.new_empty(0)
    sinks = sinks_N.float().view(scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
    p = torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)
    return p[..., :-1].contiguous(), p[..., -1]


def _gather_heads(rows_BI: Tensor, x_TNH: Tensor) -> Tensor:
    """Each segment's rows, grouped by head: [B, N, I, H]."""
    return x_TNH[rows_BI].transpose(1, 2).contiguous()
