"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..config import LossConfig
from .advantage import overlong_penalty
from .algorithm import Algorithm, mean_over_tokens
from .losses import TokenValues, clipped_surrogate

EPSILON_HIGH = 0.28  # section 4.1


@dataclass(frozen=True)
class DAPO(Algorithm):
    """`grpo`'s loss with more room above than below (section 3.1), the mean over all tokens (3.3), and a penalty on
    completions that come near the limit (3.4)."""

    epsilon: float = 0.2
    epsilon_high: float | None = None

    def penalty(self, config: LossConfig, length: int, max_completion_length: int) -> float:
        return overlong_penalty(length, max_completion_length, config.overlong_buffer, config.overlong_penalty)

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        return mean_over_tokens(lengths)

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        high = EPSILON_HIGH if self.epsilon_high is None else self.epsilon_high
        log_ratio_C = values.logprob_C - values.old_logprob_C
        return clipped_surrogate(log_ratio_C, values.advantage_C, self.epsilon, high)
