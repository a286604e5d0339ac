"""PPO with a critic: proximal policy optimization (arXiv 1707.06347), with clipped values as in OpenAI's baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..config import LossConfig
from .advantage import Rewards, generalized_advantages, whiten_tokens
from .algorithm import keep_every_group, mean_over_tokens, unit_advantages
from .grpo import GRPO
from .policy_terms import TokenValues


@dataclass(frozen=True)
class PPO(GRPO):
    """`grpo`'s loss with per-token advantages, plus `vf_coef` times the critic's loss, `max((v - R)^2, (clip(v, v_old -
    cliprange_value, v_old + cliprange_value) - R)^2) / 2`; the mean over all tokens.

    The critic is a value head on the policy's last hidden states, initialized to zeros; its gradient flows into the
    policy. `v_old` and the advantages are computed before the step's first update, by generalized advantage estimation
    (arXiv 1506.02438): `A_t = d_t + gamma lam A_t+1`, `d_t = r_t + gamma v_t+1 - v_t`. The reward `r` of a turn is at
    its last token, and with `use_kl_in_reward`, `beta` times each token's KL estimate is subtracted. `R = A + v_old`;
    advantages are then whitened over the step's tokens. Names and defaults are those of `PPOConfig` in TRL 1.12, the
    last that has it, where `epsilon` is `cliprange` and `beta` is `kl_coef`; defaults here are a `beta` of 0 and a
    `kl_estimator` of k3."""

    vf_coef: float = 0.1
    cliprange_value: float = 0.2

    has_critic: ClassVar[bool] = True

    advantages = unit_advantages
    keep = keep_every_group
    weights = mean_over_tokens

    def estimate(
        self, config: LossConfig, rewards: Rewards, values: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        advantages: list[list[float]] = []
        returns: list[list[float]] = []
        for rewards_of_sample, values_of_sample in zip(rewards, values, strict=True):
            estimates = generalized_advantages(rewards_of_sample, values_of_sample, config.gamma, config.lam)
            advantages.append(estimates)
            returns.append([a + v for a, v in zip(estimates, values_of_sample, strict=True)])
        return whiten_tokens(advantages), returns

    def corrected_loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        loss_C, clipped_C = super().corrected_loss(values)
        return loss_C + self.vf_coef * self.value_loss(values), clipped_C

    def value_loss(self, values: TokenValues) -> Tensor:
        """The critic's loss, [C]."""
        value_C, old_C, return_C = values.value_C, values.old_value_C, values.return_C
        assert value_C is not None and old_C is not None and return_C is not None
        clipped_C = torch.clamp(value_C, old_C - self.cliprange_value, old_C + self.cliprange_value)
        return 0.5 * torch.maximum((value_C - return_C).square(), (clipped_C - return_C).square())
