"""SAPO: soft adaptive policy optimization (arXiv 2511.20347)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .algorithm import Algorithm, not_clipped
from .policy_terms import TokenValues

_SATURATION = 100.0  # well beyond where a float32 sigmoid becomes exactly 1, with a gradient of 0


@dataclass(frozen=True)
class SAPO(Algorithm):
    """`-4 / tau sigmoid(tau (r - 1)) A` with a token's ratio `r`: a soft gate in place of the clip, where `tau` is
    `sapo_temperature_pos` if `A > 0` and `sapo_temperature_neg` otherwise; the mean over each sequence, then over
    sequences."""

    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        log_ratio_C, positive_C = values.logprob_C - values.old_logprob_C, values.advantage_C > 0
        # Beyond these bounds the gate is flat, and within them the exponential cannot overflow.
        bound_pos = math.log1p(_SATURATION / self.sapo_temperature_pos)
        bound_neg = math.log1p(_SATURATION / self.sapo_temperature_neg)
        log_ratio_C = torch.where(positive_C, log_ratio_C.clamp(max=bound_pos), log_ratio_C.clamp(max=bound_neg))
        tau_C = torch.where(positive_C, self.sapo_temperature_pos, self.sapo_temperature_neg)
        gate_C = torch.sigmoid(tau_C * torch.expm1(log_ratio_C)) * 4 / tau_C
        return -gate_C * values.advantage_C, not_clipped(gate_C)
