"""CISPO: clipped importance sampling policy optimization, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm import Algorithm, mean_over_tokens
from .policy_terms import TokenValues


@dataclass(frozen=True)
class CISPO(Algorithm):
    """`-sg(min(r, epsilon_high)) A logprob`, the mean over all tokens. The ratio is capped at `epsilon_high` itself,
    and a stop-gradient (`sg`) on it preserves every token's gradient."""

    epsilon_high: float = 5.0  # ScaleRL (arXiv 2510.13786)

    weights = mean_over_tokens

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        cap = math.log(self.epsilon_high) if self.epsilon_high > 0 else -math.inf
        log_ratio_C = (values.logprob_C - values.old_logprob_C).detach()
        ratio_C = torch.exp(log_ratio_C.clamp(max=cap))
        clipped_C = (log_ratio_C > cap) & (values.advantage_C != 0)
        return -ratio_C * values.advantage_C * values.logprob_C, clipped_C
