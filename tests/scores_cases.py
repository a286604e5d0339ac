"""Attention with windows, sinks, a scale and a soft cap in both roles' layouts, and what it must give, in float64."""

from __future__ import annotations

from typing import Any

import torch
from flex_cases import Case, same_bits
from flex_cases import invariant as invariant_in_layouts
from torch import Tensor

from lockstep import ops
from lockstep.ops.records import PLAIN, AttentionScores

SINKS = torch.tensor([0.5, -3.0, 4.0, 30.0])
SCORES = {
    "plain": PLAIN,
    "window of 1": AttentionScores(window=1),
    "window of 20": AttentionScores(window=20),
    "window of a tile": AttentionScores(window=64),
    "window of 65": AttentionScores(window=65),
    "window beyond the context": AttentionScores(window=1000),
    "scale": AttentionScores(scale=0.7),
    "cap": AttentionScores(softcap=2.0),
    "sinks": AttentionScores(SINKS),
    "all": AttentionScores(SINKS, 77, 0.4, 5.0),
}


class ScoresCase(Case):
    """A `Case` whose masks are `AttentionScores`."""

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        return ops.attention_packed(q, k, v, ops.Packed(*args[:4]), AttentionScores(*args[4:]))

    def _paged(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        return ops.attention_paged(
            q, ops.KVPages(k, v), ops.Paged(*args[:5]), ops.NO_GROUPS, AttentionScores(*args[5:])
        )

    def exact(self, scores: Any) -> Tensor:
        return dense(self.q.double(), self.k.double(), self.v.double(), scores)


def invariant(case: ScoresCase, scores: AttentionScores, **others: Any) -> bool:
    """Whether every layout gives the bits of the whole sequence as one packed segment, and so do pages of which those
    before the window are gone."""
    return invariant_in_layouts(case, scores, **others)  # type: ignore[arg-type]


def dense(q: Tensor, k: Tensor, v: Tensor, scores: AttentionScores, prefix: int = 0) -> Tensor:
    """Attention of queries at positions `prefix` on over keys at 0 on, all at once."""
    group, (queries, heads, head_dim) = q.shape[1] // k.shape[1], q.shape
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    query, key = (torch.arange(n, device=q.device) for n in (queries, len(k)))
    seen = ops.visibility(scores.window, "")(prefix + query.unsqueeze(1), key)
    products = torch.einsum("qnh,knh->nqk", q, k) * (scores.scale or head_dim**-0.5)
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~seen, -torch.inf)
    if scores.sinks_N is not None:
        sinks = scores.sinks_N.to(q.dtype).view(heads, 1, 1).expand(heads, queries, 1)
        products = torch.cat((products, sinks), dim=2)
    return torch.einsum("nqk,knh->qnh", products.softmax(-1)[:, :, : len(k)], v)


def check_gradients(
    layout: tuple[int, list[tuple[int, int, int]]], scores: AttentionScores, device: str = "cpu"
) -> None:
    """Gradients in a layout of `flex_cases.LAYOUTS` are those of dense attention; twice the same, and zero in padding,
    which is NaN."""
    padding, segments = layout
    rows = sum(own for own, _, _ in segments)
    leaves = [torch.randn(rows + padding, heads, 16, device=device) for heads in (4, 2, 2)]
    grad = torch.randn(rows + padding, 4, 16, device=device)
    for x in (*leaves, grad):
        x[rows:] = torch.nan
        x.requires_grad_()
    if scores.sinks_N is not None:
        leaves.append(scores.sinks_N.to(device).requires_grad_())
    own, start, length = (
        torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*segments, strict=True)
    )
    cu_seqlens = torch.nn.functional.pad(own.cumsum(0).int(), (1, 0))
    by = ops.Packed(cu_seqlens, start, length, int((own + length).max()))
    ours = scores._replace(sinks_N=leaves[3]) if len(leaves) > 3 else scores
    found, again = (torch.autograd.grad(ops.attention_packed(*leaves[:3], by, ours), leaves, grad) for _ in range(2))

    exact_leaves, total = [x.double().detach().requires_grad_() for x in leaves], 0.0
    exact_scores = scores._replace(sinks_N=exact_leaves[3]) if len(leaves) > 3 else scores
    for (count, first, prefix), begin in zip(segments, cu_seqlens.tolist(), strict=False):
        at = torch.cat((torch.arange(first, first + prefix), torch.arange(begin, begin + count))).to(device)
        keys = (x[at] for x in exact_leaves[1:3])
        attended = dense(exact_leaves[0][begin : begin + count], *keys, exact_scores, prefix)
        total = total + (attended * grad[begin : begin + count].double()).sum()
    exact = torch.autograd.grad(total, exact_leaves)
    for i, (x, y, repeated) in enumerate(zip(found, exact, again, strict=True)):
        assert same_bits(x, repeated) and (i == 3 or not x[rows:].any())
        end = len(x) if i == 3 else rows
        torch.testing.assert_close(x[:end].double(), y[:end], atol=2e-5, rtol=1e-4)
