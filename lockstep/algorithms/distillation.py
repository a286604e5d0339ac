"""On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Thinking Machines Lab 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .algorithm import Algorithm, keep_every_group, mean_over_tokens, not_clipped, unit_advantages
from .policy_terms import TokenValues


@dataclass(frozen=True)
class Distillation(Algorithm):
    """Reverse KL from a frozen teacher `q` with the same vocabulary, on tokens that the model samples: `w sg(log p -
    log q)`, where `w` is a token's probability in the model over that in the distribution it was sampled from; the mean
    over all tokens.

    This is the usual single-sample estimate (thinkingmachines.ai/blog/on-policy-distillation): a policy gradient whose
    advantage is each token's `log q - log p`. In expectation over the token sampled at a position, value and gradient
    are those of KL(p || q), which TRL's `DistillationTrainer` (`beta` 1) sums over the vocabulary, at any sampling
    temperature and after any number of updates; p and q are at temperature 1, and tokens that filters exclude are
    missing. Effects on later positions are ignored (a discount of 0). Rewards are reported, not learned from."""

    has_kl: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = True

    advantages = unit_advantages
    keep = keep_every_group
    weights = mean_over_tokens

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        assert values.ref_logprob_C is not None
        weight_C = torch.exp(values.model_logprob_C - values.old_logprob_C)
        divergence_C = (values.model_logprob_C - values.ref_logprob_C).detach()
        return weight_C * divergence_C, not_clipped(weight_C)
