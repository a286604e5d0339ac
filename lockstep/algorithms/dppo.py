"""DPPO: divergence proximal policy optimization, Rethinking the Trust Region (arXiv 2602.04879)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ALGORITHM_TABLE
from .algorithm import mean_over_tokens
from .grpo import GRPO
from .policy_terms import TokenValues

_MAX_PROBABILITY = 1 - 2**-24  # keeps the logarithm of 1 - p finite


@dataclass(frozen=True)
class DPPO(GRPO):
    """`-M sg(min(r, clip_ratio_c)) A logprob`, the mean over all tokens. The mask `M` drops a token that would move
    further from the policy that sampled it: `A > 0`, `r > 1` and a divergence above `epsilon_high`, or `A < 0`, `r < 1`
    and a divergence above `epsilon`. The divergence is between the binary distributions of "this token or another":
    total variation `|p - q|` (binary_tv) or `KL(q || p)` (binary_kl), with `q` the probability when sampled. The capped
    ratio has a stop-gradient (`sg`).

    Names and defaults are those of `DPPOConfig` in TRL 1.8 (removed since), except that `epsilon_high` defaults to
    `epsilon`, and that there are no divergences over the most likely tokens (`topk_tv`, `topk_kl`), whose log-probs are
    not recorded."""

    epsilon: float = ALGORITHM_TABLE["dppo"].epsilon
    divergence_type: str = "binary_tv"
    clip_ratio_c: float = 20.0

    weights = mean_over_tokens

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C, advantage_C = (values.logprob_C - values.old_logprob_C).detach(), values.advantage_C
        divergence_C = self.divergence(values)
        above_C = (advantage_C > 0) & (log_ratio_C > 0) & (divergence_C > self.upper)
        below_C = (advantage_C < 0) & (log_ratio_C < 0) & (divergence_C > self.epsilon)
        masked_C = above_C | below_C
        ratio_C = torch.exp(log_ratio_C.clamp(max=math.log(self.clip_ratio_c)))
        return -advantage_C * torch.where(masked_C, 0.0, ratio_C) * values.logprob_C, masked_C

    def divergence(self, values: TokenValues) -> Tensor:
        """The divergence between the binary distributions, without gradient, [C]."""
        p_C = values.logprob_C.detach().exp().clamp(max=_MAX_PROBABILITY)
        q_C = values.old_logprob_C.detach().exp().clamp(max=_MAX_PROBABILITY)
        if self.divergence_type == "binary_tv":
            return (p_C - q_C).abs()
        log_ratio_C = (values.logprob_C - values.old_logprob_C).detach()
        return -q_C * log_ratio_C + (1 - q_C) * (torch.log1p(-q_C) - torch.log1p(-p_C))
