"""Dr. GRPO: Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .grpo import GRPO


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """`grpo` with a constant instead of each sequence's length: the sum of token losses, divided by
    `max_completion_length * sequences`."""

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        return [1.0 / (max_completion_length * num_sequences) for _ in lengths]
