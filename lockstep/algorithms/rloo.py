"""RLOO: REINFORCE leave-one-out, Back to Basics (arXiv 2402.14740), with the clip of TRL's `RLOOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..config import LossConfig
from .advantage import Rewards, leave_one_out, normalize_over_step
from .grpo import GRPO
from .policy_terms import TokenValues, clipped_surrogate


@dataclass(frozen=True)
class RLOO(GRPO):
    """`-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)` with ratios of whole sequences, `log r = sum_t(logprob_t -
    old_t)`, and `A` the reward less the mean of the others in the group; the mean over sequences. With
    `normalize_advantages`, these are normalized by the step's mean and standard deviation. The paper's KL term is
    `use_kl_in_reward` with `kl_estimator` k1."""

    whole_sequences: ClassVar[bool] = True

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        advantages = [[leave_one_out(reward, group) for reward in group] for group in rewards]
        return normalize_over_step(advantages) if config.normalize_advantages else advantages

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C = values.sequence_sum(values.logprob_C - values.old_logprob_C)
        return clipped_surrogate(log_ratio_C, values.advantage_C, self.epsilon, self.upper)
