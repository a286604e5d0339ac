"""The policy step as functions of tensors, which run eagerly and are captured as graphs.

State is passed in and updated in place: gradients and a step's statistics accumulate.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..algorithms import Algorithm, TokenValues
from ..models import Decoder, PackedAttention, Routing
from ..types import PackedBatch
from . import routing

# Accumulated on the device over the micro-batches of one update: sums, and for `diff_max` a maximum. `scored` counts
# trained and checked tokens; those that were compared with the generator's are `identical` or `different`.
STATISTICS = ("loss", "tokens", "clipped", "kl", "entropy", "scored", "identical", "different", "diff_max")
MAXIMA = (STATISTICS.index("diff_max"),)


class Scored(NamedTuple):
    """The results of a batch's forward pass, without gradient: both log-probs [C]; if the support is wanted, the hidden
    rows that predict the tokens [C, D] and its thresholds [C]; if experts were compared, their digests [C]."""

    logprob_C: Tensor
    model_logprob_C: Tensor
    rows_CD: Tensor | None = None
    threshold_C: Tensor | None = None
    route_C: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._asdict().items() if tensor is not None}


def statistics_by_name(values: Tensor) -> dict[str, Tensor]:
    """Views of the statistics by name. `values` is float64: an element for each and, with experts, their "loads" at the
    end, layer by layer."""
    known = statistic_names(values)
    found = {name: values[i] for i, name in enumerate(known)}
    return found if known is STATISTICS else {**found, "loads": values[len(known) :]}


def statistic_names(values: Tensor) -> tuple[str, ...]:
    return STATISTICS if len(values) == len(STATISTICS) else STATISTICS + routing.STATISTICS


def result_names(values: Tensor) -> tuple[str, ...]:
    own, loads = statistic_names(values), ("load_imbalance", "min_expert_tokens", "max_expert_tokens")
    return own + ("grad_norm", "applied") + (() if own is STATISTICS else loads)


def push_results(values: Tensor, results: Tensor, grad_norm: Tensor, applied: Tensor, experts: int) -> None:
    """Push an update's results for the host (`result_names`) and its number onto the front of `results`, which drops
    the oldest row, and clear the statistics.

    Args:
        results: float64, a row for each update, the latest first (`result.Results`).
        grad_norm, applied: 0-dim.
        experts: the number of experts in a layer that has some; 0 for a dense model.
    """
    count = len(STATISTICS) + len(routing.STATISTICS) * (experts > 0)
    parts = [values[:count], grad_norm.view(1), applied.view(1)]
    if experts:
        parts.append(routing.load_spread(values[count:].view(-1, experts)))
    number, older = results[0, -1:] + 1, results[:-1].view(-1)
    results.view(-1).copy_(torch.cat((*parts, number, older)))  # promoted to float64
    values.zero_()


def predicting_rows(model: Decoder, batch: PackedBatch, routes: list[Routing] | None = None) -> Tensor:
    """The hidden rows that predict the completion tokens, [C, D]; `routes` as in `Decoder`."""
    packed = ops.Packed(batch.cu_seqlens, batch.prefix_start_S, batch.prefix_len_S, batch.max_len)
    hidden_TD = model(batch.tokens_T, batch.positions_T, PackedAttention(packed, model.masks), routes)
    return ops.gather_rows(hidden_TD, batch.logit_rows_C)


def critic_values(model: Decoder, rows_CD: Tensor) -> Tensor:
    """The value head's outputs for hidden rows, float32 [C], by the router's product, which sums in a fixed order."""
    assert model.value_head is not None, "a critic without a value head"
    (own_CD,) = model.spread.local_rows(rows_CD)
    return model.spread.gather_scalars(rows_CD.shape[0], ops.router_logits(own_CD, model.value_head).flatten())[0]


def token_logprobs(model: Decoder, rows_CD: Tensor, batch: PackedBatch) -> ops.TokenLogprobs:
    """`ops.token_logprobs` of a batch, for the hidden rows that predict its tokens.

    Each tensor-parallel rank scores its share of the rows, and the results are all-gathered. The loss is then computed
    whole on every rank; its gradients below the head are of a rank's own rows and are summed over the ranks.
    """
    spread, cut = model.spread, model.placements.get("lm_head")  # a tied head is the embedding, which is replicated
    head_VD = model.lm_head if cut is None else spread.gather_weight_rows(model.lm_head)
    given = rows_CD, batch.targets_C, batch.temperature_C, batch.top_k_C, batch.top_p_C, batch.min_p_C
    own_CD, targets_C, *filters = spread.local_rows(*given)
    support_CB = None if batch.support_C is None else spread.local_rows(batch.support_C)[0]
    found = ops.token_logprobs(own_CD, head_VD, targets_C, ops.Filters(*filters), support_CB, batch.truncated)
    return ops.TokenLogprobs(*spread.gather_scalars(rows_CD.shape[0], *found))


def score(
    model: Decoder, batch: PackedBatch, with_routing: bool = True
) -> tuple[Tensor, ops.TokenLogprobs, routing.BatchRouting | None]:
    """The hidden rows that predict the completion tokens, [C, D], the tokens' log-probs, and the routing if it is
    wanted and the model has experts."""
    routes: list[Routing] | None = [] if with_routing and model.config.moe_layers else None
    rows_CD = predicting_rows(model, batch, routes)
    scores = token_logprobs(model, rows_CD, batch)
    return rows_CD, scores, routing.batch_routing(routes, batch) if routes else None


def forward(
    model: Decoder, values: Tensor, batch: PackedBatch, algorithm: Algorithm, with_kl: bool, with_support: bool
) -> tuple[Tensor, Scored]:
    """`sum(weight * loss)`, to be differentiated with respect to the parameters; adds the batch's statistics to
    `values`. `with_kl`: include the KL term. `with_support`: also return what the sampled support is computed from."""
    statistics = statistics_by_name(values)
    rows_CD, scores, routed = score(model, batch)
    value_C = None if model.value_head is None else critic_values(model, rows_CD)
    loss = _loss(model, statistics, batch, (scores, routed, value_C), algorithm, with_kl)
    with torch.no_grad():
        scored = _record(statistics, batch, scores, routed)
    return loss, _with_support(scored, rows_CD, scores) if with_support else scored


def check(model: Decoder, values: Tensor, batch: PackedBatch, with_support: bool = False) -> Scored:
    """`forward` without the loss."""
    statistics = statistics_by_name(values)
    rows_CD, scores, routed = score(model, batch)
    scored = _record(statistics, batch, scores, routed)
    return _with_support(scored, rows_CD, scores) if with_support else scored


def _with_support(scored: Scored, rows_CD: Tensor, scores: ops.TokenLogprobs) -> Scored:
    return scored._replace(rows_CD=rows_CD.detach(), threshold_C=scores.threshold_C)


def _loss(
    model: Decoder,
    statistics: dict[str, Tensor],
    batch: PackedBatch,
    found: tuple[ops.TokenLogprobs, routing.BatchRouting | None, Tensor | None],
    algorithm: Algorithm,
    with_kl: bool,
) -> Tensor:
    """The weighted sum to differentiate, from log-probs, routing and values. Also adds the loss's statistics."""
    scores, routed, value_C = found
    given = batch.old_logprob_C, batch.advantage_C, batch.cu_completions, batch.ref_logprob_C
    of_critic = value_C, batch.old_value_C, batch.return_C
    values = TokenValues(scores.logprob_C, scores.model_logprob_C, *given, *of_critic)
    loss_C, clipped_C = algorithm.corrected_loss(values)
    if with_kl:
        kl_C = algorithm.kl(values, batch.ref_logprob_C)
        statistics["kl"].add_(_total(kl_C, batch.valid_C))
        loss_C = loss_C + algorithm.beta * kl_C
    if value_C is not None and not algorithm.has_critic:
        loss_C = loss_C + 0.0 * value_C  # supervised steps: gives the value head a gradient, of 0
    loss = (batch.weight_C * loss_C).sum()
    if routed is not None:
        statistics["loads"].add_(routing.trained_loads(batch, routed).flatten())
        if algorithm.router_aux_loss_coef > 0:
            aux_loss = routing.load_balancing_loss(routed) * batch.share.sum()  # a mean weighted by packed tokens
            statistics["aux_loss"].add_(aux_loss.detach())
            loss = loss + algorithm.router_aux_loss_coef * model.spread.count_gradient_once(aux_loss)
    statistics["loss"].add_(loss.detach())
    statistics["tokens"].add_(batch.valid_C.sum())
    statistics["clipped"].add_(clipped_C.sum())  # padding has advantage 0 and is never clipped
    return loss


def _record(
    statistics: dict[str, Tensor], batch: PackedBatch, scores: ops.TokenLogprobs, routed: routing.BatchRouting | None
) -> Scored:
    """Accumulate the entropy and, with `check_parity`, compare both log-probs and the expert choices bit by bit."""
    s, route_C = statistics, None
    s["entropy"].add_(_total(scores.entropy_C, batch.valid_C))
    s["scored"].add_(batch.valid_C.sum())
    logprob_C, model_logprob_C = scores.logprob_C.detach(), scores.model_logprob_C.detach()
    if batch.check_parity:
        difference_C = torch.maximum(
            (logprob_C - batch.old_logprob_C).abs(), (model_logprob_C - batch.old_model_logprob_C).abs()
        )
        different_C = bits_differ(logprob_C, batch.old_logprob_C)
        different_C = different_C | bits_differ(model_logprob_C, batch.old_model_logprob_C)
        different_C = different_C | (difference_C != 0)  # NaN is never identical, not even to the same bits
        if routed is not None:
            route_C, rerouted_C = routing.compare_routes(batch, routed, s)
            different_C = different_C | rerouted_C
        different_C = different_C & batch.valid_C
        s["identical"].add_((batch.valid_C ^ different_C).sum())
        s["different"].add_(different_C.sum())
        s["diff_max"].copy_(torch.maximum(s["diff_max"], torch.where(batch.valid_C, difference_C, 0.0).max()))
    return Scored(logprob_C, model_logprob_C, route_C=route_C)


def _total(values_C: Tensor, valid_C: Tensor) -> Tensor:
    """The sum over the valid rows, float64, detached."""
    return torch.where(valid_C, values_C.detach(), 0.0).sum(dtype=torch.float64)


def bits_differ(a_C: Tensor, b_C: Tensor) -> Tensor:
    """Where two vectors of 32-bit words have different bits."""
    return a_C.view(torch.int32) != b_C.view(torch.int32)
