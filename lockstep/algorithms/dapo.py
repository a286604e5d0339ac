"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LossConfig
from .algorithm import mean_over_tokens
from .grpo import GRPO


@dataclass(frozen=True)
class DAPO(GRPO):
    """`grpo`'s loss with a higher upper clip (section 3.1), the mean over all tokens (3.3), and a penalty on
    completions close to the length limit (3.4)."""

    epsilon_high: float = 0.28  # section 4.1

    def penalty(self, config: LossConfig, length: int, max_completion_length: int) -> float:
        """The soft overlong punishment: 0 up to `overlong_buffer` tokens before the limit, then falling linearly to
        `-overlong_penalty` at the limit, and constant beyond; always 0 without a buffer (equation 13)."""
        excess = length - (max_completion_length - config.overlong_buffer)
        if config.overlong_buffer == 0 or excess <= 0:
            return 0.0
        return -config.overlong_penalty * min(excess / config.overlong_buffer, 1.0)

    weights = mean_over_tokens
