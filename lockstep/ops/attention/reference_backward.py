"""Backward of packed attention in plain torch: segments of like shape are padded together and done densely.

Shape suffixes: B segments of one batch, Q padded queries, L padded keys, K kv heads, G query heads a kv head, H head
dim.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from ..embedding.operator import accumulate_rows
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
            accumulate_rows(grad_q, layout.token_BQ.flatten(), dq)
            accumulate_rows(grad_k, layout.row_BL.flatten(), dk)
            accumulate_rows(grad_v, layout.row_BL.flatten(), dv)
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
    """Gradients [B * Q, N, H], [B * L, K, H] twice, float32; padded rows are exactly zero."""
    token_BQ, row_BL, bias_BQL = layout
    batch, queries = token_BQ.shape
    heads, head_dim = q_TNH.shape[1:]
    kv_heads = k_TKH.shape[1]
    group, scale = heads // kv_heads, head_dim**-0.5

    def grouped(x_TNH: Tensor) -> Tensor:  # [B * K, G * Q, H]
        x = x_TNH[token_BQ.flatten()].view(batch, queries, kv_heads, group, head_dim)
        return x.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, group * queries, head_dim)

    def keyed(x_TKH: Tensor) -> Tensor:  # [B * K, L, H]
        x = x_TKH[row_BL.flatten()].view(batch, -1, kv_heads, head_dim)
        return x.transpose(1, 2).reshape(batch * kv_heads, -1, head_dim)

    def by_row(x: Tensor) -> Tensor:  # [B * L, K, H]
        return x.float().view(batch, kv_heads, -1, head_dim).transpose(1, 2).reshape(-1, kv_heads, head_dim)

    q, grad, k, v = grouped(q_TNH), grouped(grad_TNH), keyed(k_TKH), keyed(v_TKH)
    scores = torch.bmm(q, k.transpose(1, 2)).float().mul_(scale).view(batch, kv_heads, group, queries, -1)
    p = torch.softmax(scores.add_(bias_BQL[:, None, None]), dim=-1).nan_to_num_(0.0)
    p = p.view(batch * kv_heads, group * queries, -1)
    dp = torch.bmm(grad, v.transpose(1, 2)).float()
    ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p).mul_(scale).to(q.dtype)
    dq = torch.bmm(ds, k).float().view(batch, kv_heads, group, queries, head_dim)
    dq = dq.permute(0, 3, 1, 2, 4).reshape(-1, heads, head_dim)
    dk = by_row(torch.bmm(ds.transpose(1, 2), q))
    dv = by_row(torch.bmm(p.to(q.dtype).transpose(1, 2), grad))
    return dq, dk, dv
