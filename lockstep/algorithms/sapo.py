"""SAPO: soft adaptive policy optimization (arXiv 2511.20347)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm import Algorithm, nowhere
from .policy_terms import TokenValues

SATURATED = 100.0  # from far below here on a float32 sigmoid is 1 and flat


@dataclass(frozen=True)
class SAPO(Algorithm):
    """`-4 / tau sigmoid(tau (r - 1)) A` with the token's ratio `r`: a gate that closes smoothly, `tau` being
    `sapo_temperature_pos` where `A > 0` and `sapo_temperature_neg` elsewhere; the mean over each sequence, then over
    sequences."""

    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C, positive_C = values.logprob_C - values.old_logprob_C, values.advantage_C > 0
        ends = [math.log1p(SATURATED / t) for t in (self.sapo_temperature_pos, self.sapo_temperature_neg)]
        # The gate is flat beyond, and there the exponential cannot overflow.
        log_ratio_C = torch.where(positive_C, log_ratio_C.clamp(max=ends[0]), log_ratio_C.clamp(max=ends[1]))
        tau_C = torch.where(positive_C, self.sapo_temperature_pos, self.sapo_temperature_neg)
        gate_C = torch.sigmoid(tau_C * torch.expm1(log_ratio_C)) * 4 / tau_C
        return -gate_C * values.advantage_C, nowhere(gate_C)
