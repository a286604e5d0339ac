"""What losses are made of, over per-token tensors.

A loss is a per-token value; its normalization is in the weights (`Algorithm.weights`). Nothing is clamped to hide
an overflow: the loss is then infinite or NaN, and the step is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops

KLEstimator = Callable[[Tensor, Tensor], Tensor]  # of the model's and the reference's log-probs, nats a token


class TokenValues(NamedTuple):
    """What a loss may look at, float32 [C] each: log-probs as the weights are now, of the sampled distribution and of
    the model's own; the sampled one when the token was generated; the advantage. `cu_completions` (None where
    `Algorithm.whole_sequences` does not ask for it) tells which tokens are of one sequence. `ref_logprob_C` is of the
    reference's or, with `Algorithm.has_teacher`, the teacher's own distribution. With
    `Algorithm.has_critic`: the value as the weights are now, the one before the step's first update, and the return."""

    logprob_C: Tensor
    model_logprob_C: Tensor
    old_logprob_C: Tensor
    advantage_C: Tensor
    cu_completions: Tensor | None = None
    ref_logprob_C: Tensor | None = None
    value_C: Tensor | None = None
    old_value_C: Tensor | None = None
    return_C: Tensor | None = None

    def sequence_sum(self, values_C: Tensor) -> Tensor:
        """For each token the sum over its sequence, [C]; 0 for padding."""
        assert self.cu_completions is not None, "for terms of whole sequences the class says whole_sequences = True"
        return ops.sequence_sum(values_C, self.cu_completions)

    def sequence_mean(self, values_C: Tensor) -> Tensor:
        """For each token the mean over its sequence, [C]; 0 for padding."""
        length_C = self.sequence_sum(torch.ones_like(values_C)).clamp(min=1)
        return self.sequence_sum(values_C) / length_C


def clipped_surrogate(
    log_ratio_C: Tensor, advantage_C: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, negated: `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, and where it clips.

    `r = exp(log_ratio)`, of the distribution that was sampled (Schulman et al. 2017, equation 7). The
    minimum clips from above where A > 0 and from below where A < 0, so the bound is put on `log r`, on that side
    alone: the same function, but the exponential overflows only where the objective does, and the gradient of a
    clipped token is 0 and never 0 * inf.
    """
    low = math.log1p(-epsilon) if epsilon < 1 else -math.inf
    bounded_C = torch.where(
        advantage_C >= 0, log_ratio_C.clamp(max=math.log1p(epsilon_high)), log_ratio_C.clamp(min=low)
    )
    clipped_C = (bounded_C != log_ratio_C) & (advantage_C != 0)
    return -advantage_C * torch.exp(bounded_C), clipped_C


def kl_k1(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """`model - ref`: unbiased, of either sign. Without a correction its gradient in a loss is 0 in the mean."""
    return model_logprob_C - ref_logprob_C


def kl_k2(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """Half the square of `kl_k1`: biased, never negative; on its own samples its gradient is that of the divergence."""
    return 0.5 * (model_logprob_C - ref_logprob_C).square()


def kl_k3(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """Estimate of KL(model || reference) from the model's own samples, nats a token, never negative: `exp(d) - 1 - d`
    with `d = ref - model`, Schulman's k3 (http://joschu.net/blog/kl-approx.html). `expm1` keeps its digits near 0. Of
    samples that another distribution drew it is biased; so is its gradient in any case."""
    difference_C = ref_logprob_C - model_logprob_C
    return torch.expm1(difference_C) - difference_C


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def corrected_kl(values: TokenValues, ref_logprob_C: Tensor, estimator: KLEstimator = kl_k3) -> Tensor:
    """The estimate times the probability of the token in the model over that in the distribution it was sampled from.

    In the mean over the tokens that a position can have, it is (k1, k3) KL(model || reference) of that position, and
    its gradient is the gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): at any temperature and after any number
    of updates. So is k2's, under a weight that has no gradient. Where filters left tokens out, their part of the sum is
    missing.
    """
    weight_C = torch.exp(values.model_logprob_C - values.old_logprob_C)
    if estimator is kl_k2:
        weight_C = weight_C.detach()
    return weight_C * estimator(values.model_logprob_C, ref_logprob_C)


def truncated_weight(values: TokenValues, mode: str, clip_max: float) -> tuple[Tensor, Tensor]:
    """The probability of what was sampled, now over then, cut at `clip_max` or left out above; and where it is.

    Of the token or, in the modes sequence_*, of its whole sequence. There is no gradient. Where nothing has changed it
    is exactly 1. (TRL's `vllm_importance_sampling_mode`; arXiv 2510.18855 leaves out, IcePop.)
    """
    log_ratio_C = (values.logprob_C - values.old_logprob_C).detach()
    if mode.startswith("sequence"):
        log_ratio_C = values.sequence_sum(log_ratio_C)
    bound = math.log(clip_max)
    above_C = log_ratio_C > bound
    weight_C = torch.exp(log_ratio_C.clamp(max=bound))
    if mode.endswith("mask"):
        weight_C = torch.where(above_C, 0.0, weight_C)
    return weight_C, above_C & (values.advantage_C != 0)
