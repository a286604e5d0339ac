"""REINFORCE++ (arXiv 2501.03262), without a baseline and with that of the group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import LossConfig
from .advantage import Rewards, scaled, whitened
from .algorithm import mean_over_tokens
from .grpo import GRPO


@dataclass(frozen=True)
class ReinforcePP(GRPO):
    """`grpo`'s loss, the mean over all tokens; advantages are the rewards less the mean of the whole step's, over their
    deviation, so one sample a prompt is enough. The paper's KL term is `use_kl_in_reward` with `kl_estimator` k1."""

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        return whitened(rewards)

    def keep(self, rewards: Sequence[float]) -> bool:
        return True

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        return mean_over_tokens(lengths)


@dataclass(frozen=True)
class ReinforcePPBaseline(GRPO):
    """`reinforce_pp` with rewards less the group's mean, over the deviation of all of the step's such differences. The
    paper's KL term is in the loss, with `kl_estimator` k2."""

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        return scaled(rewards)

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        return mean_over_tokens(lengths)
