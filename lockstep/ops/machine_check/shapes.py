"""The shapes of a decoder's products and attention, as the check of the machine (`check.py`) takes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..logprobs.operator import CHUNK
from ..tables.linear_table import Kind


class Product(NamedTuple):
    """`rows` x `depth` times `columns` x `depth`; `columns` counts the weight's rows, gate and up together."""

    kind: Kind
    rows: int
    columns: int
    depth: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rows}x{self.columns}x{self.depth}"


class HeadShape(NamedTuple):
    """The shape of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"attention {self.heads}/{self.kv_heads}x{self.head_dim}"


class LatentHeadShape(NamedTuple):
    """The shape of a latent attention layer; without a `q_rank`, queries are projected at once."""

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    q_rank: int | None = None

    def __str__(self) -> str:
        return f"latent attention {self.heads}x({self.kv_rank}+{self.rope_dim})"


class ExpertShape(NamedTuple):
    """The shape of a mixture of experts: how many there are, the width of one, and that of all shared ones together."""

    number: int
    feed_forward: int
    shared: int = 0


Shapes = dict[tuple[int, int], Kind]  # by columns and depth


def decoder_products(
    rows: Collection[int],
    trained: Collection[int],
    scored: Collection[int],
    hidden: int,
    heads: HeadShape | LatentHeadShape,
    feed_forward: int,
    vocabulary: int,
    experts: ExpertShape | None = None,
) -> list[Product]:
    """The products of a decoder.

    Args:
        rows: tokens of a pass without gradient: decode and prefill buckets.
        trained: packed tokens of a pass with gradient, whose operators run separately.
        scored: rows of the LM head, which sees a chunk of them at a time.
        feed_forward: width of the layers without experts; 0 where all layers have them.
    """
    shapes = _latent(hidden, heads) if isinstance(heads, LatentHeadShape) else _attention(hidden, heads)
    if feed_forward:
        shapes |= {(2 * feed_forward, hidden): "norm_gate_up", (hidden, feed_forward): "linear_add"}
    if experts is not None:
        shapes = _experts(hidden, experts) | shapes
    fused_kinds = [Product(kind, m, n, k) for m in sorted({*rows}) for (n, k), kind in shapes.items()]
    plain = [Product("linear", m, n, k) for m in sorted({*trained}) for n, k in shapes]
    routers = [] if experts is None else [Product("linear_fp32", m, experts.number, hidden) for m in {*rows, *trained}]
    chunks = {piece for m in scored for piece in (min(m, CHUNK), m % CHUNK) if piece}
    scores = [Product("linear_fp32", m, vocabulary, hidden) for m in sorted(chunks)]
    return [*fused_kinds, *plain, *sorted(routers), *scores]


def _attention(hidden: int, heads: HeadShape) -> Shapes:
    qkv, attended = (heads.heads + 2 * heads.kv_heads) * heads.head_dim, heads.heads * heads.head_dim
    return {(qkv, hidden): "norm_linear", (hidden, attended): "linear_add"}


def _latent(hidden: int, heads: LatentHeadShape) -> Shapes:
    """The down-projection, the queries' own, a head's two products around the attention, and the output."""
    queries = heads.heads * (heads.nope_dim + heads.rope_dim)
    shapes: Shapes = {((heads.q_rank or queries) + heads.kv_rank + heads.rope_dim, hidden): "norm_linear"}
    if heads.q_rank is not None:
        shapes[queries, heads.q_rank] = "norm_linear"
    shapes |= {(heads.kv_rank, heads.nope_dim): "linear", (heads.v_dim, heads.kv_rank): "linear"}
    return shapes | {(hidden, heads.heads * heads.v_dim): "linear_add"}


def _experts(hidden: int, experts: ExpertShape) -> Shapes:
    """An expert's two products, and those of the shared ones."""
    shapes: Shapes = {(2 * experts.feed_forward, hidden): "linear", (hidden, experts.feed_forward): "linear"}
    if experts.shared:
        shapes |= {(2 * experts.shared, hidden): "linear", (hidden, experts.shared): "linear_add"}
    return shapes
