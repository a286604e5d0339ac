"""The shapes of a decoder's products and attention, as the machine check (`check.py`) takes them."""

from __future__ import annotations

from typing import NamedTuple

from ..linear.choice import Kind


class Product(NamedTuple):
    """`rows` x `depth` times `columns` x `depth`, with a bias if `biased`; `columns` counts the weight's rows, gate and
    up together."""

    kind: Kind
    rows: int
    columns: int
    depth: int
    biased: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.rows}x{self.columns}x{self.depth}{' with bias' if self.biased else ''}"


class HeadShape(NamedTuple):
    """The shape of attention layers, and whether some of them have a window, sinks or their own scale."""

    heads: int
    kv_heads: int
    head_dim: int
    has_score_options: bool = False

    def __str__(self) -> str:
        options = ", windows and sinks" if self.has_score_options else ""
        return f"attention {self.heads}/{self.kv_heads}x{self.head_dim}{options}"


class LatentHeadShape(NamedTuple):
    heads: int
    kv_rank: int
    rope_dim: int

    def __str__(self) -> str:
        return f"latent attention {self.heads}x({self.kv_rank}+{self.rope_dim})"
