"""What an algorithm is: from the rewards of a step's groups to a loss a token."""

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
    """One algorithm of policy optimization: subclass it in a file of its own, as a frozen dataclass.

    An object holds all that its loss may read, and is what stored graphs of the loss are found by. A field with the
    name of one of `LossConfig`'s has that one's value, or its own default where that is None; any other its default.
    The methods that do not run on the device are given the whole configuration.
    """

    beta: float = 0.0
    kl_estimator: str = "k3"
    use_kl_in_reward: bool = False
    importance_sampling_mode: str | None = None
    importance_sampling_clip_max: float = 3.0
    use_bias_correction_kl: bool = True
    router_aux_loss_coef: float = 0.0

    has_kl: ClassVar[bool] = True  # the KL divergence from the reference can be added to the loss
    has_teacher: ClassVar[bool] = False  # the loss reads what `loss.teacher` says (`TokenValues.ref_logprob_C`)
    has_critic: ClassVar[bool] = False  # a value head is trained too (`TokenValues.value_C`, `estimate`)
    whole_sequences: ClassVar[bool] = False  # the loss has terms of whole sequences (`TokenValues.sequence_sum`)

    @classmethod
    def of(cls, config: LossConfig) -> Self:
        given = {f.name: getattr(config, f.name, None) for f in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def penalty(self, config: LossConfig, length: int, max_completion_length: int) -> float:
        """What to add to the reward of a completion of `length` tokens."""
        return 0.0

    def advantages(self, config: LossConfig, rewards: Rewards) -> list[list[float]]:
        """Each sample's advantage, given the rewards of each group's samples: all groups of a step, on every rank."""
        return group_advantages(rewards, config.scale_rewards)

    def keep(self, rewards: Sequence[float]) -> bool:
        """Whether a group of samples with these rewards, at least one, has something to learn from."""
        return any(reward != rewards[0] for reward in rewards)

    def estimate(
        self, config: LossConfig, rewards: Rewards, values: Sequence[Sequence[float]]
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Where tokens have advantages of their own (`of_tokens`): each token's, and with a critic what that is to say
        of it, of the step's samples.

        Args:
            rewards: of each token of the samples that are trained on, all of a step, on every rank: a turn's with the
                turn's last, all else of the sample's with the last of all, and with `use_kl_in_reward` less `beta`
                times each token's estimate.
            values: for each what the critic said before each of its tokens, before the step's first update; zeros
                without a critic.
        """
        raise NotImplementedError(f"{type(self).__name__} has a critic and does not say what it is to learn")

    def weights(self, lengths: Sequence[int], num_sequences: int, max_completion_length: int) -> list[float]:
        """What multiplies each token's loss, one weight a sequence, such that the mini-batch's loss is the plain sum.

        By default the mean over each sequence, then over sequences.

        Args:
            lengths: completion tokens of each sequence of a mini-batch that is trained on, all micro-batches together.
            num_sequences: sequences that the mean is over, those that are masked too.
            max_completion_length: the sampling limit.
        """
        return [1.0 / (length * num_sequences) for length in lengths]

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        """Loss a token, float32 [C], to be differentiated by the log-probs; and where it is clipped, bool [C].

        It is traced: operators of torch alone, and no `if` on a tensor. Padding has an advantage of 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def kl(self, values: TokenValues, ref_logprob_C: Tensor) -> Tensor:
        """Estimate of the KL divergence from the reference, nats a token."""
        estimator = KL_ESTIMATORS[self.kl_estimator]
        if self.use_bias_correction_kl:
            return corrected_kl(values, ref_logprob_C, estimator)
        return estimator(values.model_logprob_C, ref_logprob_C)

    def corrected_loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        """`loss`, or with `importance_sampling_mode` a weight times the loss of an update that begins at the weights of
        now: the weight stands for the way from what sampled, in place of the loss's own ratio (decoupled PPO, arXiv
        2110.00641)."""
        if self.importance_sampling_mode is None:
            return self.loss(values)
        weight_C, cut_C = truncated_weight(values, self.importance_sampling_mode, self.importance_sampling_clip_max)
        loss_C, clipped_C = self.loss(values._replace(old_logprob_C=values.logprob_C.detach()))
        return weight_C * loss_C, clipped_C | cut_C

    @cached_property
    def of_tokens(self) -> bool:
        """Whether each token has an advantage of its own, by `estimate`, and those of `advantages` are for the choice
        of what is trained on."""
        return self.has_critic

    @cached_property
    def indexes_sequences(self) -> bool:
        """Whether the loss needs to know which tokens are of one sequence."""
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
        """Whether it is taken off the rewards."""
        return self.beta > 0 and self.use_kl_in_reward


def mean_over_tokens(
    _: Algorithm, lengths: Sequence[int], num_sequences: int, max_completion_length: int
) -> list[float]:
    """`Algorithm.weights` for the mean over all tokens."""
    total = sum(lengths)
    return [1.0 / total for _ in lengths]


def any_group(_: Algorithm, rewards: Sequence[float]) -> bool:
    """`Algorithm.keep` where there is something to learn from every group."""
    return True


def every_sample(_: Algorithm, config: LossConfig, rewards: Rewards) -> list[list[float]]:
    """`Algorithm.advantages` where every sample counts, and the loss or `estimate` says how much."""
    return [[1.0] * len(group) for group in rewards]


def nowhere(like_C: Tensor) -> Tensor:
    """False a token: a loss that clips nothing."""
    return torch.zeros_like(like_C, dtype=torch.bool)
