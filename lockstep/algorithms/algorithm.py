"""`Algorithm`, the interface of an algorithm: from the rewards of a step's groups to a loss per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from ..config import LossConfig
from .advantage import Rewards, group_advantages
from .policy_terms import KL_ESTIMATORS, TokenValues, corrected_kl, truncated_weight


@dataclass(frozen=True)
class Algorithm:
    """A policy optimization algorithm. Subclass it as a frozen dataclass, in a separate file.

    The fields are all that the loss may read, and are part of the key of its stored graphs. A field that `LossConfig`
    has too takes its value from there, unless that is None; all others have their defaults. Methods that run on the
    host are given the whole configuration.
    """

    beta: float = 0.0
    kl_estimator: str = "k3"
    use_kl_in_reward: bool = False
    importance_sampling_mode: str | None = None
    importance_sampling_clip_max: float = 3.0
    use_bias_correction_kl: bool = True
    router_aux_loss_coef: float = 0.0

    has_kl: ClassVar[bool] = True  # the KL divergence from the reference can be added to the loss
    has_teacher: ClassVar[bool] = False  # the loss reads log-probs of `loss.teacher` (`TokenValues.ref_logprob_C`)
    has_critic: ClassVar[bool] = False  # a value head is trained too (`TokenValues.value_C`, `estimate`)
    whole_sequences: ClassVar[bool] = False  # the loss has sums over sequences (`TokenValues.sequence_sum`)

    @classmethod
    def from_config(cls, config: LossConfig) -> Self:
        """The algorithm with the settings of `config` that are fields of it."""
        given = {f.name: getattr(config, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def penalty(self, config: LossConfig, length: int, max_completion_length: int) -> float:
        """A term added to the reward of a completion of `length` tokens."""
        return 0.0

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        """Each sample's advantage. `rewards` has those of all groups of a step, on every rank."""
        return group_advantages(rewards, config.scale_rewards)

    def keep(self, rewards: Sequence[float]) -> bool:
        """Whether a group of samples with these rewards, at least one, gives a training signal."""
        return any(reward != rewards[0] for reward in rewards)

    def estimate(
        self, config: LossConfig, rewards: Rewards, values: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """For each of a step's samples, per-token advantages (if `has_token_advantages`), and returns, which a critic
        learns.

        Args:
            rewards: the reward of each token, for all samples of the step that are trained on, on every rank: a turn's
                reward is at its last token, the rest of the sample's at the very last; with `use_kl_in_reward`, `beta`
                times each token's KL estimate is subtracted.
            values: the critic's value before each token, computed before the step's first update; zeros without a
                critic.
        """
        raise NotImplementedError(f"{type(self).__name__} has a critic and does not say what it is to learn")

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        """The factor on token losses, one for each sequence, such that a mini-batch's loss is their plain sum.

        By default, the loss is the mean over each sequence, then over sequences.

        Args:
            lengths: the completion tokens of each sequence that is trained on, in all of a mini-batch's micro-batches.
            num_sequences: the sequences of the mini-batch, including masked ones.
            max_completion_length: the sampling limit.
        """
        return [1.0 / (length * num_sequences) for length in lengths]

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        """Each token's loss, float32 [C], differentiable in the log-probs; and whether it is clipped, bool [C].

        This method is traced, so it may use only torch operators, and no `if` on a tensor. Padding has advantage 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def kl(self, values: TokenValues, ref_logprob_C: Tensor) -> Tensor:
        """The estimated KL divergence from the reference, in nats per token."""
        estimator = KL_ESTIMATORS[self.kl_estimator]
        if self.use_bias_correction_kl:
            return corrected_kl(values, ref_logprob_C, estimator)
        return estimator(values.model_logprob_C, ref_logprob_C)

    def corrected_loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        """`loss`, or with `importance_sampling_mode` the loss with the current policy as the old one, times an
        importance weight that accounts for the policy that sampled, instead of the loss's ratio (decoupled PPO, arXiv
        2110.00641)."""
        if self.importance_sampling_mode is None:
            return self.loss(values)
        weight_C, cut_C = truncated_weight(values, self.importance_sampling_mode, self.importance_sampling_clip_max)
        loss_C, clipped_C = self.loss(values._replace(old_logprob_C=values.logprob_C.detach()))
        return weight_C * loss_C, clipped_C | cut_C

    @cached_property
    def has_token_advantages(self) -> bool:
        """Whether advantages are per token, by `estimate`; `advantages` then only decides what is trained on."""
        return self.has_critic

    @cached_property
    def indexes_sequences(self) -> bool:
        """Whether the loss needs to know which tokens belong to the same sequence."""
        return self.whole_sequences or (self.importance_sampling_mode or "").startswith("sequence")

    @cached_property
    def reads_reference(self) -> bool:
        """Whether an update needs the log-probs of a second, frozen model."""
        return self.has_teacher or self.kl_in_loss

    @cached_property
    def kl_in_loss(self) -> bool:
        """Whether the KL divergence from the reference is added to the loss."""
        return self.has_kl and self.beta > 0 and not self.use_kl_in_reward

    @cached_property
    def kl_in_reward(self) -> bool:
        """Whether the KL divergence from the reference is subtracted from the rewards."""
        return self.beta > 0 and self.use_kl_in_reward


def mean_over_tokens(
    _: Algorithm, lengths: Sequence[int], num_sequences: int, max_completion_length: int
) -> list[float]:
    """`Algorithm.weights` for the mean over all tokens."""
    total = sum(lengths)
    return [1.0 / total for _ in lengths]


def keep_every_group(_: Algorithm, rewards: Sequence[float]) -> bool:
    """`Algorithm.keep` for algorithms that learn from every group."""
    return True


def unit_advantages(_: Algorithm, config: LossConfig, rewards: Rewards) -> list[list[float]]:
    """`Algorithm.advantages`, all 1, for algorithms that get them from the loss or from `estimate`."""
    return [[1.0] * len(group) for group in rewards]


def not_clipped(like_C: Tensor) -> Tensor:
    """False for each token, for losses without clipping."""
    return torch.zeros_like(like_C, dtype=torch.bool)
