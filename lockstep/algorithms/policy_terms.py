"""Building blocks of losses, over per-token tensors.

A loss is a value per token, normalized by weights (`Algorithm.weights`). No clamp hides an overflow: the loss is then
infinite or NaN, and the step is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops

KLEstimator = Callable[[Tensor, Tensor], Tensor]  # (model's log-probs, reference's log-probs) -> nats per token


class TokenValues(NamedTuple):
    """What a loss may read, each float32 [C] except for `cu_completions`.

    Attributes:
        logprob_C, model_logprob_C: current log-probs, in the sampled distribution (after temperature and filters) and
            in the model's own.
        old_logprob_C: `logprob_C` when the token was generated.
        cu_completions: the boundaries of sequences; None unless `Algorithm.indexes_sequences`.
        ref_logprob_C: log-probs in the own distribution of the reference or, with `Algorithm.has_teacher`, the teacher.
        value_C, old_value_C, return_C: with `Algorithm.has_critic`, the current value, the value before the step's
            first update, and the return.
    """

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
        """For each token, the sum over its sequence, [C]; 0 for padding."""
        assert self.cu_completions is not None, "for terms of whole sequences the class says whole_sequences = True"
        return ops.sequence_sum(values_C, self.cu_completions)

    def sequence_mean(self, values_C: Tensor) -> Tensor:
        """For each token, the mean over its sequence, [C]; 0 for padding."""
        length_C = self.sequence_sum(torch.ones_like(values_C)).clamp(min=1)
        return self.sequence_sum(values_C) / length_C


def clipped_surrogate(
    log_ratio_C: Tensor, advantage_C: Tensor, epsilon: float, epsilon_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, negated: `-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`, and where it clips.

    `r = exp(log_ratio)`, in the sampled distribution (Schulman et al. 2017, equation 7). The minimum clips from above
    where A > 0 and from below where A < 0, so it is enough to bound `log r` on that side: the same function, but the
    exponential overflows only where the objective does, and the gradient of a clipped token is 0, never 0 * inf.
    """
    low = math.log1p(-epsilon) if epsilon < 1 else -math.inf
    bounded_C = torch.where(
        advantage_C >= 0, log_ratio_C.clamp(max=math.log1p(epsilon_high)), log_ratio_C.clamp(min=low)
    )
    clipped_C = (bounded_C != log_ratio_C) & (advantage_C != 0)
    return -advantage_C * torch.exp(bounded_C), clipped_C


def kl_k1(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """`model - ref`: unbiased, of either sign. As a loss, without correction, its gradient is 0 in expectation."""
    return model_logprob_C - ref_logprob_C


def kl_k2(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """Half the square of `kl_k1`: biased, never negative. On the model's samples its gradient is the divergence's."""
    return 0.5 * (model_logprob_C - ref_logprob_C).square()


def kl_k3(model_logprob_C: Tensor, ref_logprob_C: Tensor) -> Tensor:
    """`exp(d) - 1 - d` with `d = ref - model`, Schulman's k3 (http://joschu.net/blog/kl-approx.html): an estimate of
    KL(model || reference), never negative, unbiased on the model's own samples and biased on others; its gradient is
    always biased. `expm1` is accurate near 0."""
    difference_C = ref_logprob_C - model_logprob_C
    return torch.expm1(difference_C) - difference_C


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def corrected_kl(values: TokenValues, ref_logprob_C: Tensor, estimator: KLEstimator = kl_k3) -> Tensor:
    """The estimate times the token's probability in the model over that in the distribution it was sampled from.

    In expectation over the token sampled at a position, k1 and k3 then equal KL(model || reference) there, and their
    gradients equal its gradient (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), at any sampling temperature and after
    any number of updates. So does k2's gradient, if the weight has no gradient. Tokens that filters exclude are missing
    from the sum.
    """
    weight_C = torch.exp(values.model_logprob_C - values.old_logprob_C)
    if estimator is kl_k2:
        weight_C = weight_C.detach()
    return weight_C * estimator(values.model_logprob_C, ref_logprob_C)


def truncated_weight(values: TokenValues, mode: str, clip_max: float) -> tuple[Tensor, Tensor]:
    """The importance weight of each token, its probability now over that when sampled, without gradient; and where it
    exceeds `clip_max`: it is capped there, or set to 0 in the modes *_mask (as in IcePop, arXiv 2510.18855).

    In the modes sequence_* it is the weight of the whole sequence. It is exactly 1 if the policy has not changed. Modes
    are those of TRL's `vllm_importance_sampling_mode`.
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
