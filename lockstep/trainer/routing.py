"""Mixture of experts in the trainer: parity of the choices, how busy the experts are, and the loss that balances them.

Shape suffixes: T packed tokens, C completion tokens, L layers with experts, E experts, N choices a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..models import ModelConfig, Routing
from ..types import PackedBatch

# The statistics that a model with experts has besides, before a count an expert.
STATISTICS = ("routed_differently", "prompt_tokens", "prompt_routed_differently", "aux_loss")


@dataclass(frozen=True)
class RoutingResult:
    """What one update (or one check) found of the routing.

    Attributes:
        choices_checked: experts compared with the generator's: a token's are those of every layer and slot.
        tokens_different: tokens with any other expert, or the same in another order.
        prompt_tokens_checked, prompt_tokens_different: of the prompts' tokens, once for each micro-batch they are in.
        load_imbalance: tokens of a layer's busiest expert over its experts' mean, averaged over layers; 1 is even.
        min_expert_tokens, max_expert_tokens: of the experts of all layers. These three are of the sequences that are
            trained on, prompt and response of each, so of a check they are 0.
        aux_loss: the load-balancing loss before its coefficient, averaged over the update's micro-batches, each by its
            packed tokens; None when it is off.
    """

    choices_checked: int
    tokens_different: int
    prompt_tokens_checked: int
    prompt_tokens_different: int
    load_imbalance: float
    min_expert_tokens: int
    max_expert_tokens: int
    aux_loss: float | None

    @property
    def compared(self) -> tuple[int, int, int, int]:
        return self.choices_checked, self.tokens_different, self.prompt_tokens_checked, self.prompt_tokens_different

    def metrics(self) -> dict[str, float]:
        found = {
            "parity/tokens_routed_differently": self.tokens_different,
            "parity/prompt_tokens_routed_differently": self.prompt_tokens_different,
            "moe/load_imbalance": self.load_imbalance,
            "moe/expert_tokens/min": self.min_expert_tokens,
            "moe/expert_tokens/max": self.max_expert_tokens,
        }
        return found if self.aux_loss is None else {**found, "moe/aux_loss": self.aux_loss}


class Routed(NamedTuple):
    """The routing of a batch: scores [T, E] a layer, the experts of all of them, and which tokens are no padding."""

    logits: Sequence[Tensor]
    experts_TN: Tensor
    valid_T: Tensor


def statistics_of(config: ModelConfig) -> int:
    """Float64 elements that a step's routing is added up in: `STATISTICS`, then the loads [L, E]."""
    return len(STATISTICS) + config.moe_layers * config.moe.num_experts if config.moe and config.moe_layers else 0


def routed(routes: Sequence[Routing], batch: PackedBatch) -> Routed:
    experts_TN = torch.cat([routing.experts_TK for routing in routes], dim=1)
    rows_T = torch.arange(experts_TN.shape[0], device=experts_TN.device)
    return Routed([routing.logits_TE for routing in routes], experts_TN, rows_T < batch.cu_seqlens[-1])


def trained_loads(batch: PackedBatch, r: Routed) -> Tensor:
    """How many tokens of the sequences that are trained on chose each expert, int64 [L, E], a shared prompt's once for
    each of its responses, so that packing has no part in it. Of a batch that has no share none, as its one token is
    there because a shard has no more."""
    layout = batch.cu_seqlens, batch.prefix_start_S, batch.prefix_len_S
    times_T = ops.times_in_sequences(batch.tokens_T, *layout) * (batch.share > 0)
    return ops.expert_loads(r.experts_TN, times_T, len(r.logits), r.logits[0].shape[1])


def compare(batch: PackedBatch, r: Routed, statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Digests of the experts that each completion token was predicted after, int32 [C], and where they are not the
    generator's, bool [C]; those of the prompts' tokens are counted. `ValueError` when the batch does not have the
    generator's."""
    if batch.old_route_C is None or batch.old_route_T is None:
        raise ValueError("parity of a mixture of experts cannot be checked without the generator's route digests")
    route_T = ops.route_digest(r.experts_TN)
    route_C = route_T.index_select(0, batch.logit_rows_C)
    known_T = batch.old_route_T >= 0
    statistics["prompt_tokens"].add_(known_T.sum())
    statistics["prompt_routed_differently"].add_((known_T & (route_T != batch.old_route_T)).sum())
    elsewhere_C = route_C != batch.old_route_C
    statistics["routed_differently"].add_((elsewhere_C & batch.valid_C).sum())
    return route_C, elsewhere_C


def load_balancing_loss(r: Routed) -> Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4) over all layers together, as in
    `transformers`: E times the sum over experts of the share of tokens that chose it, times its mean probability.

    Both are means over valid packed tokens and layers; the loss is K when all experts have the same.
    """
    loads_LE = ops.expert_loads(r.experts_TN, r.valid_T, len(r.logits), r.logits[0].shape[1])
    probabilities_LE = torch.stack([ops.router_probabilities(logits_TE, r.valid_T) for logits_TE in r.logits])
    rows = r.valid_T.sum() * len(r.logits)
    return (loads_LE.sum(0) / rows * (probabilities_LE.sum(0) / rows)).sum() * loads_LE.shape[1]


def balance(biases: Sequence[Tensor], loads: Tensor, rate: float, applied: Tensor) -> None:
    """Move each expert's bias by `rate` towards its layer's mean load: up when it had fewer tokens, down when more
    (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        biases: float32 [E] a layer, written where `applied` (bool, 0-dim).
        loads: tokens of every layer's experts, float64 [L * E].
    """
    for bias_E, load_E in zip(biases, loads.chunk(len(biases)), strict=True):
        towards_E = torch.sign(load_E.sum() - load_E * len(load_E)).to(bias_E.dtype)
        bias_E.copy_(torch.where(applied, bias_E + rate * towards_E, bias_E))


def spread(loads_LE: Tensor) -> Tensor:
    """The load imbalance, and the fewest and the most tokens of an expert, [3], float64."""
    layers, experts = loads_LE.shape
    imbalance = loads_LE.amax(1) / (loads_LE.sum(1) / experts).clamp(min=1e-9)
    return torch.stack((imbalance.sum() / layers, loads_LE.min(), loads_LE.max()))
