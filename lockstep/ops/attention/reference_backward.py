"""Backward of packed attention in plain torch: segments of like shape are padded together and done densely.

Shape suffixes: B segments of one batch, Q padded queries, L padded keys, I either, N query heads, K kv heads, G query
heads a kv head, H head dim.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from ..embedding.operator import accumulate_rows
from ..operator import in_c
from ..records import Packed
from .masks import MaskFunction

ROUND = 32  # segments whose lengths round up to the same multiples run together
SCORE_BUDGET = 1 << 27


def packed(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, by: Packed, visible: MaskFunction | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention.operator.attention_packed` (with `visible`, of `flex.flex_packed`) for q, k, v,
    accumulated in float32 in a fixed order."""
    grad_q = torch.zeros_like(q_TNH, dtype=torch.float32)
    grad_k = torch.zeros_like(k_TKH, dtype=torch.float32)
    grad_v = torch.zeros_like(v_TKH, dtype=torch.float32)
    starts, prefix_start, prefix_len = (x.tolist() for x in by[:3])
    batches: dict[tuple[int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    for s, (p_start, p_len) in enumerate(zip(prefix_start, prefix_len, strict=True)):
        length = starts[s + 1] - starts[s]
        if length:
            shape = (-(-length // ROUND) * ROUND, -(-(length + p_len) // ROUND) * ROUND)
            batches[shape].append((starts[s], length, p_start, p_len))
    for (queries, keys), segments in batches.items():
        size = max(1, SCORE_BUDGET // (q_TNH.shape[1] * queries * keys))
        for i in range(0, len(segments), size):
            table = torch.tensor(segments[i : i + size]).to(q_TNH.device)
            layout = _layout(table, queries, keys, visible)
            dq, dk, dv = _dense(grad_TNH, q_TNH, k_TKH, v_TKH, layout)
            accumulate_heads(grad_q, layout.token_BQ, dq)
            accumulate_heads(grad_k, layout.row_BL, dk)
            accumulate_heads(grad_v, layout.row_BL, dv)
    return grad_q.to(q_TNH.dtype), grad_k.to(k_TKH.dtype), grad_v.to(v_TKH.dtype)


class _Padded(NamedTuple):
    """Rows of the padded queries and keys, and the mask as a bias; padding points at the segment's first row."""

    token_BQ: Tensor
    row_BL: Tensor
    bias_BQL: Tensor


def _layout(table: Tensor, queries: int, keys: int, visible: MaskFunction | None) -> _Padded:
    start, length, prefix_start, prefix_len = (column.unsqueeze(1) for column in table.unbind(1))
    q = torch.arange(queries, device=table.device)
    k = torch.arange(keys, device=table.device)
    token_BQ = torch.where(q < length, start + q, start)
    row_BL = torch.where(k < prefix_len, prefix_start + k, start - prefix_len + k)
    row_BL = torch.where(k < prefix_len + length, row_BL, start)
    position_BQ1 = (prefix_len + q).unsqueeze(2)
    seen = k <= position_BQ1 if visible is None else visible(position_BQ1.int(), k.int())
    hidden = ~(seen & (q < length).unsqueeze(2))
    return _Padded(token_BQ, row_BL, torch.zeros(1, device=table.device).masked_fill(hidden, -torch.inf))


def _dense(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: _Padded
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [B, N, Q, H], [B, K, L, H] twice, float32; padded rows are exactly zero."""
    token_BQ, row_BL, bias_BQL = layout
    batch, queries = token_BQ.shape
    heads, head_dim = q_TNH.shape[1:]
    kv_heads = k_TKH.shape[1]
    scale = head_dim**-0.5
    rows, many = (batch * kv_heads, -1, head_dim), (batch, kv_heads, heads // kv_heads, queries, -1)
    q, grad = (gather_heads(x, token_BQ).view(rows) for x in (q_TNH, grad_TNH))  # [B * K, G * Q, H]
    k, v = (gather_heads(x, row_BL).view(rows) for x in (k_TKH, v_TKH))  # [B * K, L, H]
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).view(many)
    p = torch.softmax(scores.add_(bias_BQL[:, None, None]), dim=-1).nan_to_num_(0.0)
    p = p.view(*q.shape[:2], -1)
    dp = torch.bmm(grad, v.transpose(1, 2)).float()
    ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p).mul_(scale).to(q.dtype)
    dq, dk = torch.bmm(ds, k).float(), torch.bmm(ds.transpose(1, 2), q).float()
    dv = torch.bmm(p.to(q.dtype).transpose(1, 2), grad).float()
    of_kv = (batch, kv_heads, -1, head_dim)
    return dq.view(batch, heads, queries, head_dim), dk.view(of_kv), dv.view(of_kv)


def gather_heads(x_TNH: Tensor, rows_BI: Tensor) -> Tensor:
    """Rows of each segment, a head's side by side: [B, N, I, H]."""
    if in_c(x_TNH):
        return native.gather_heads(x_TNH, rows_BI)
    return x_TNH[rows_BI.flatten()].view(*rows_BI.shape, *x_TNH.shape[1:]).transpose(1, 2).contiguous()


def accumulate_heads(total_TNH: Tensor, rows_BI: Tensor, values_BNIH: Tensor) -> None:
    """`total[rows[b, i], n] += values[b, n, i]` in place, in the order of (b, i)."""
    if in_c(total_TNH):
        native.accumulate_heads(total_TNH, rows_BI, values_BNIH)
    else:
        accumulate_rows(total_TNH, rows_BI.flatten(), values_BNIH.transpose(1, 2).flatten(0, 1))
