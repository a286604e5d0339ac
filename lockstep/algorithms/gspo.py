"""GSPO: group sequence policy optimization (arXiv 2507.18071), equations 5 to 7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .grpo import GRPO
from .policy_terms import TokenValues, clipped_surrogate


@dataclass(frozen=True)
class GSPO(GRPO):
    """`grpo` with one ratio per sequence, the geometric mean of its tokens' ratios: `-min(s A, clip(s, 1 - epsilon, 1 +
    epsilon_high) A)`, `log s = mean_t(logprob_t - old_t)`; the mean over sequences. The paper clips at 3e-4 below and
    4e-4 above."""

    whole_sequences: ClassVar[bool] = True

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C = values.sequence_mean(values.logprob_C - values.old_logprob_C)
        return clipped_surrogate(log_ratio_C, values.advantage_C, self.epsilon, self.upper)
