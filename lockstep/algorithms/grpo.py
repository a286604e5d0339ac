"""GRPO: group relative policy optimization, DeepSeekMath (arXiv 2402.03300), equation 3."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..config import ALGORITHM_TABLE
from .algorithm import Algorithm
from .policy_terms import TokenValues, clipped_surrogate


@dataclass(frozen=True)
class GRPO(Algorithm):
    """`-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, with `r` a token's ratio of probabilities and `A` its
    sample's reward less the group's mean (divided by the deviation that `scale_rewards` names); the mean over each
    sequence, then over sequences. The clip is symmetric unless `epsilon_high` is given."""

    epsilon: float = ALGORITHM_TABLE["grpo"].epsilon
    epsilon_high: float | None = None

    @property
    def upper(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C = values.logprob_C - values.old_logprob_C
        return clipped_surrogate(log_ratio_C, values.advantage_C, self.epsilon, self.upper)
