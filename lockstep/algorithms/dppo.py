"""DPPO: divergence proximal policy optimization, Rethinking the Trust Region (arXiv 2602.04879)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .grpo import GRPO
from .losses import TokenValues

_MOST = 1 - 2**-24  # keeps the logarithm of 1 - p finite


@dataclass(frozen=True)
class DPPO(GRPO):
    """`-M r A`, where `M` leaves out a token that moves on from the policy that sampled it once it is far: `A > 0`,
    `r > 1` and a divergence above `epsilon_high`, or `A < 0`, `r < 1` and one above `epsilon`. The divergence is that
    of "this token or another": total variation `|p - q|` (binary_tv) or `KL(q || p)` (binary_kl), `q` the probability
    when sampled; the mean over each sequence, then over sequences."""

    divergence_type: str = "binary_tv"

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C, advantage_C = values.logprob_C - values.old_logprob_C, values.advantage_C
        divergence_C = self.divergence(values)
        above_C = (advantage_C > 0) & (log_ratio_C > 0) & (divergence_C > self.upper)
        below_C = (advantage_C < 0) & (log_ratio_C < 0) & (divergence_C > self.epsilon)
        masked_C = above_C | below_C
        ratio_C = torch.exp(torch.where(masked_C, 0.0, log_ratio_C))  # never 0 * inf
        return -advantage_C * torch.where(masked_C, 0.0, ratio_C), masked_C

    def divergence(self, values: TokenValues) -> Tensor:
        """Of the two outcomes, without gradient, [C]."""
        now_C, then_C = (x.detach().exp().clamp(max=_MOST) for x in (values.logprob_C, values.old_logprob_C))
        if self.divergence_type == "binary_tv":
            return (now_C - then_C).abs()
        log_ratio_C = (values.logprob_C - values.old_logprob_C).detach()
        return -then_C * log_ratio_C + (1 - then_C) * (torch.log1p(-then_C) - torch.log1p(-now_C))
