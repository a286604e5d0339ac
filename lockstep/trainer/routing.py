"""Mixture of experts in the trainer: parity of expert choices, expert loads, and load balancing.

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

# The additional statistics of a model with experts; the loads, a count for each expert, follow them.
STATISTICS = ("routed_differently", "prompt_tokens", "prompt_routed_differently", "aux_loss")


@dataclass(frozen=True)
class RoutingResult:
    """The routing results of one update (or one check).

    Attributes:
        choices_checked: expert choices compared with the generator's, counting every layer and slot of a token.
        tokens_different: tokens with a different expert anywhere, or the same experts in another order.
        prompt_tokens_checked, prompt_tokens_different: prompt tokens, counted once for each micro-batch they are in.
        load_imbalance: tokens of a layer's busiest expert over the mean of its experts, averaged over layers; 1 is
            even. This and the next two count the sequences trained on, prompt and response; after a check they are 0.
        min_expert_tokens, max_expert_tokens: the fewest and the most tokens of any expert of any layer.
        aux_loss: the load-balancing loss before its coefficient, averaged over the update's micro-batches, weighted by
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


class BatchRouting(NamedTuple):
    """The routing of a batch: each layer's router logits [T, E], all layers' choices, and which rows are no padding."""

    logits: Sequence[Tensor]
    experts_TN: Tensor
    valid_T: Tensor


def num_statistics(config: ModelConfig) -> int:
    """The number of float64 elements for a step's routing statistics: `STATISTICS`, then the loads [L, E]."""
    return len(STATISTICS) + config.moe_layers * config.moe.num_experts if config.moe and config.moe_layers else 0


def batch_routing(routes: Sequence[Routing], batch: PackedBatch) -> BatchRouting:
    experts_TN = torch.cat([routing.experts_TK for routing in routes], dim=1)
    rows_T = torch.arange(experts_TN.shape[0], device=experts_TN.device)
    return BatchRouting([routing.logits_TE for routing in routes], experts_TN, rows_T < batch.cu_seqlens[-1])


def trained_loads(batch: PackedBatch, r: BatchRouting) -> Tensor:
    """How many tokens of the sequences trained on chose each expert, int64 [L, E]. A shared prompt's tokens count once
    for each of its responses, so the loads do not depend on packing. A batch with share 0, the filler of a shard that
    has run out, counts nothing."""
    layout = batch.cu_seqlens, batch.prefix_start_S, batch.prefix_len_S
    times_T = ops.times_in_sequences(batch.tokens_T, *layout) * (batch.share > 0)
    return ops.expert_loads(r.experts_TN, times_T, len(r.logits), r.logits[0].shape[1])


def compare_routes(batch: PackedBatch, r: BatchRouting, statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compare expert choices with the generator's, and count differences in `statistics`. Returns digests of the
    experts at the row that predicts each completion token, int32 [C], and where they differ, bool [C]. Raises
    `ValueError` when the batch has no digests of the generator."""
    if batch.old_route_C is None or batch.old_route_T is None:
        raise ValueError("parity of a mixture of experts cannot be checked without the generator's route digests")
    route_T = ops.route_digest(r.experts_TN)
    route_C = route_T.index_select(0, batch.logit_rows_C)
    known_T = batch.old_route_T >= 0
    statistics["prompt_tokens"].add_(known_T.sum())
    statistics["prompt_routed_differently"].add_((known_T & (route_T != batch.old_route_T)).sum())
    rerouted_C = route_C != batch.old_route_C
    statistics["routed_differently"].add_((rerouted_C & batch.valid_C).sum())
    return route_C, rerouted_C


def load_balancing_loss(r: BatchRouting) -> Tensor:
    """The auxiliary loss of Switch Transformers (arXiv 2101.03961, equation 4) over all layers together, as in
    `transformers`: E times the sum over experts of the fraction of tokens that chose it times its mean probability.

    Both are means over valid packed tokens and layers. With N choices per token, the loss is N for even loads.
    """
    loads_LE = ops.expert_loads(r.experts_TN, r.valid_T, len(r.logits), r.logits[0].shape[1])
    probabilities_LE = torch.stack([ops.router_probabilities(logits_TE, r.valid_T) for logits_TE in r.logits])
    rows = r.valid_T.sum() * len(r.logits)
    return (loads_LE.sum(0) / rows * (probabilities_LE.sum(0) / rows)).sum() * loads_LE.shape[1]


def balance_biases(biases: Sequence[Tensor], loads: Tensor, rate: float, applied: Tensor) -> None:
    """Move each expert's bias by `rate` towards its layer's mean load: up when it had fewer tokens, down when more
    (Wang et al. 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Args:
        biases: float32 [E] a layer, written where `applied` (bool, 0-dim).
        loads: tokens of every layer's experts, float64 [L * E].
    """
    for bias_E, load_E in zip(biases, loads.chunk(len(biases)), strict=True):
        towards_E = torch.sign(load_E.sum() - load_E * len(load_E)).to(bias_E.dtype)
        bias_E.copy_(torch.where(applied, bias_E + rate * towards_E, bias_E))


def load_spread(loads_LE: Tensor) -> Tensor:
    """The load imbalance, the fewest, and the most tokens of an expert, float64 [3] (see `RoutingResult`)."""
    layers, experts = loads_LE.shape
    imbalance = loads_LE.amax(1) / (loads_LE.sum(1) / experts).clamp(min=1e-9)
    return torch.stack((imbalance.sum() / layers, loads_LE.min(), loads_LE.max()))
