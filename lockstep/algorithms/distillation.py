"""On-policy distillation (Agarwal et al. 2023, arXiv 2306.13649; Thinking Machines Lab 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .algorithm import Algorithm, any_group, every_sample, mean_over_tokens, nowhere
from .policy_terms import TokenValues


@dataclass(frozen=True)
class Distillation(Algorithm):
    """Reverse KL from a frozen teacher `q` of the same tokens, on what the model samples: `w sg(log p - log q)`, `w`
    the token's probability in the model over that in the distribution it was sampled from; the mean over all tokens.

    It is the estimate from the sampled token, as the field has it (thinkingmachines.ai/blog/on-policy-distillation): a
    policy gradient whose advantage is each token's own `log q - log p`. In the mean over the tokens that a position can
    have, value and gradient are those of KL(p || q) there, which TRL's `DistillationTrainer` sums over the vocabulary
    (its `beta` 1): at any temperature and after any number of updates. Of p and q at temperature 1; what filters left
    out is missing. Later positions are taken as given, a discount of 0. Rewards are reported and not learned from."""

    has_kl: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = True

    advantages = every_sample
    keep = any_group
    weights = mean_over_tokens

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        assert values.ref_logprob_C is not None
        weight_C = torch.exp(values.model_logprob_C - values.old_logprob_C)
        divergence_C = (values.model_logprob_C - values.ref_logprob_C).detach()
        return weight_C * divergence_C, nowhere(weight_C)
