"""Row statistics of logits and the sampler's draw, in plain torch for a CPU. Rows are independent.

Shape suffixes: C rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..records import Filters, RowStatistics, SampleKeys
from .philox import gumbel

MASS_SCALE = 2.0**42  # turns a probability relative to the largest into an integer; 2^21 of them sum to at most 63 bits


def statistics(
    logits_CV: Tensor, filters: Filters, support_CB: Tensor | None, truncated: bool, with_entropy: bool
) -> RowStatistics:
    """`RowStatistics` of the logits, float32 [C] each."""
    lse_C = _log_sum_exp(logits_CV)
    threshold_C = torch.full_like(lse_C, -torch.inf)
    sampled_lse_C = lse_C
    if truncated or support_CB is not None or bool((filters.temperature_C != 1).any()):
        z_CV = logits_CV / divisor(filters.temperature_C).unsqueeze(1)
        if support_CB is not None:
            z_CV = z_CV.masked_fill(~unpack_support(support_CB, z_CV.shape[1]), -torch.inf)
        elif truncated:
            threshold_C = support_threshold(z_CV, *filters[1:])
            z_CV = z_CV.masked_fill(z_CV < threshold_C.unsqueeze(1), -torch.inf)
        sampled_lse_C = _log_sum_exp(z_CV)
    entropy_C = torch.zeros_like(lse_C)
    if with_entropy:
        p_CV = torch.exp(logits_CV - lse_C.unsqueeze(1))
        finite_CV = logits_CV.masked_fill(logits_CV == -torch.inf, 0.0)  # where p is 0
        entropy_C = lse_C - (p_CV * finite_CV).sum(dim=1)
    return RowStatistics(lse_C, sampled_lse_C, threshold_C, entropy_C)


def _log_sum_exp(x_CV: Tensor) -> Tensor:
    """Of each row. A single one is computed twice: torch would divide its sum among threads, which changes its bits."""
    rows = x_CV.shape[0]
    return torch.logsumexp(x_CV.expand(2, -1) if rows == 1 else x_CV, dim=1)[:rows]


def scores(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, stats: RowStatistics) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets under the sampled distribution (0 at temperature 0, greedy) and the model's."""
    logit_C = logits_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1)
    sampled_C = logit_C / divisor(temperature_C) - stats.sampled_lse_C
    return torch.where(temperature_C > 0, sampled_C, 0.0), logit_C - stats.lse_C


def divisor(temperature_C: Tensor) -> Tensor:
    """What logits are divided by: the temperature, or 1 in greedy rows (temperature 0)."""
    return torch.where(temperature_C > 0, temperature_C, 1.0)


def support_threshold(z_CV: Tensor, top_k_C: Tensor, top_p_C: Tensor, min_p_C: Tensor) -> Tensor:
    """The smallest logit that the filters keep; every logit at least as large is kept, ties included.

    Top-k keeps logits no smaller than the k-th largest. Top-p keeps a logit if the mass of the strictly larger ones is
    below p of the mass that top-k kept; masses are integers, whose sum is exact in any order. Min-p keeps logits that
    are at least min_p times as likely as the largest.
    """
    vocabulary = z_CV.shape[1]
    sorted_CV = z_CV.sort(dim=1, descending=True).values
    k_C1 = top_k_C.clamp(min=1, max=vocabulary).long().unsqueeze(1)
    top_k_threshold_C1 = torch.where(top_k_C.unsqueeze(1) > 0, sorted_CV.gather(1, k_C1 - 1), -torch.inf)
    mass_CV = (torch.exp(sorted_CV - sorted_CV[:, :1]) * MASS_SCALE).long()
    upto_CV = mass_CV.masked_fill_(sorted_CV < top_k_threshold_C1, 0).cumsum(dim=1)
    target_C1 = torch.ceil(top_p_C.double().unsqueeze(1) * upto_CV[:, -1:].double()).long().clamp_(min=1)
    cut_C1 = (upto_CV < target_C1).sum(dim=1, keepdim=True).clamp_(max=vocabulary - 1)
    top_p_threshold_C1 = torch.where(top_p_C.unsqueeze(1) < 1, sorted_CV.gather(1, cut_C1), -torch.inf)
    min_p_threshold_C1 = sorted_CV[:, :1] + torch.log(min_p_C).unsqueeze(1)
    return torch.maximum(torch.maximum(top_k_threshold_C1, top_p_threshold_C1), min_p_threshold_C1).squeeze(1)


def draw(logits_CV: Tensor, temperature_C: Tensor, threshold_C: Tensor, keys: SampleKeys, greedy: bool) -> Tensor:
    """Sampled token ids, int64 [C]: Gumbel-max over the support, or the largest logit if the temperature is 0."""
    z_CV = logits_CV / divisor(temperature_C).unsqueeze(1)
    noisy_CV = z_CV + gumbel(*keys, z_CV.shape[1])
    token_C = noisy_CV.masked_fill_(z_CV < threshold_C.unsqueeze(1), -torch.inf).argmax(dim=1)
    return torch.where(temperature_C > 0, token_C, logits_CV.argmax(dim=1)) if greedy else token_C


def pack_support(kept_CV: Tensor) -> Tensor:
    """Booleans as bits, uint8 [C, ceil(V / 8)], least significant bit first."""
    padded_CB8 = torch.nn.functional.pad(kept_CV, (0, -kept_CV.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 2 ** torch.arange(8, device=kept_CV.device, dtype=torch.uint8)
    return (padded_CB8 * weights).sum(dim=2, dtype=torch.uint8)


def unpack_support(support_CB: Tensor, vocabulary: int) -> Tensor:
    """The inverse of `pack_support`, bool [C, V]."""
    bits = torch.arange(8, device=support_CB.device, dtype=torch.uint8)
    return ((support_CB.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocabulary].bool()
