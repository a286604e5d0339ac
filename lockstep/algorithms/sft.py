"""Supervised fine-tuning: the cross-entropy of worked examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .algorithm import Algorithm, mean_over_tokens, not_clipped
from .policy_terms import TokenValues


@dataclass(frozen=True)
class SFT(Algorithm):
    """`-log p` in the model's own distribution; the mean over all tokens."""

    has_kl: ClassVar[bool] = False

    weights = mean_over_tokens

    def loss(self, values: TokenValues) -> tuple[Tensor, Tensor]:
        return -values.model_logprob_C, not_clipped(values.model_logprob_C)
