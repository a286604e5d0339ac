"""What travels together. An operator's arguments are records in Python and their fields, in a row, in its schema."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """How a fused projection becomes rotated queries and keys.

    Attributes:
        q_weight_H, k_weight_H: weights of the RMSNorm a head, both or neither.
        cos_sin_TH: float32 [T, H]; cosines in the first half, sines in the second (`rope_table`).
    """

    q_weight_H: Tensor | None
    k_weight_H: Tensor | None
    cos_sin_TH: Tensor
    num_heads: int
    num_kv_heads: int
    eps: float
