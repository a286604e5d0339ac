"""REINFORCE++ (arXiv 2501.03262), without a baseline and with the group's mean as baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..config import LossConfig
from .advantage import Rewards, group_centered_advantages, normalize_over_step, whiten_tokens
from .algorithm import keep_every_group, mean_over_tokens, unit_advantages
from .grpo import GRPO


@dataclass(frozen=True)
class ReinforcePP(GRPO):
    """`grpo`'s loss, the mean over all tokens. Advantages are rewards, normalized by the mean and standard deviation of
    the whole step, so one sample per prompt is enough. The paper's KL term is `use_kl_in_reward` with `kl_estimator`
    k1: advantages are then per token, `A_t = R - beta sum_{i >= t} KL_i`, normalized over the step's tokens. Without
    it, all tokens of a sample share one advantage, which counts once in mean and deviation, whatever the sample's
    length; in verl it counts once per token."""

    @cached_property
    def has_token_advantages(self) -> bool:
        return self.kl_in_reward

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        return unit_advantages(self, config, rewards) if self.has_token_advantages else normalize_over_step(rewards)

    def estimate(
        self, config: LossConfig, rewards: Rewards, values: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        returns = [list(accumulate(reversed(of_sample)))[::-1] for of_sample in rewards]
        return whiten_tokens(returns), returns

    keep = keep_every_group
    weights = mean_over_tokens


@dataclass(frozen=True)
class ReinforcePPBaseline(GRPO):
    """`reinforce_pp` with rewards less their group's mean, divided by the standard deviation of all these differences
    in the step. The paper's KL term is in the loss, with `kl_estimator` k2."""

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        return group_centered_advantages(rewards)

    weights = mean_over_tokens
