"""Mixture of experts: routing, dispatch to experts and combination of their results; and routing statistics: a digest
per token, by which the roles are compared, and each expert's load and router probability.

Each token's choice and result are functions of its own row only, whatever tokens are beside it and however many go to
an expert. There are no floating-point atomics and no values that the host must know.

Shape suffixes: T tokens, E experts, K slots (chosen experts) per token, R = T * K rows sorted by expert, D hidden dim,
L layers with experts, N = L * K choices per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.operator import linear_fp32, matmul
from ..operator import SAME, like, operator, save, saved_values
from ..records import RouteSettings

_DIGEST_BASE = 0x2545F4F5  # 5 modulo 8: powers of it are odd, and two of them differ in their low bits
_DIGEST_BITS = 31


def _router_backward(ctx, grad_TE: Tensor):
    x_TD, weight_ED = ctx.saved_tensors
    grad_TE = grad_TE.to(x_TD.dtype)
    return matmul(grad_TE, weight_ED), matmul(grad_TE.t(), x_TD)


@operator(
    cuda=SAME,
    fake=lambda x_TD, weight_ED: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=torch.float32),
    backward=_router_backward,
)
def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Router logits, float32 [T, E]: the C1 product's accumulator, never rounded."""
    return linear_fp32(x_TD, weight_ED)


@operator(cuda=SAME, fake=like(1))
def route_backward(
    grad_TK: Tensor, logits_TE: Tensor, experts_TK: Tensor, sigmoid: bool, normalize: bool, scale: float
) -> Tensor:
    """Gradient of `route`'s weights for the logits, float32 [T, E]; the choice itself has none."""
    scores_TE = _scores(logits_TE, sigmoid)
    grad_TK = grad_TK * scale
    if normalize:
        chosen_TK = scores_TE.gather(1, experts_TK)
        total_T1 = _sum_in_order(chosen_TK)
        grad_TK = (grad_TK - (grad_TK * chosen_TK).sum(1, keepdim=True) / total_T1) / total_T1
    grad_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK, grad_TK)  # a token's experts are distinct
    if sigmoid:
        return grad_TE * scores_TE * (1 - scores_TE)
    return scores_TE * (grad_TE - (grad_TE * scores_TE).sum(1, keepdim=True))


def _route_setup(ctx, inputs, output) -> None:
    save(ctx, [inputs[0], output[1], inputs[3], *inputs[6:]])
    ctx.mark_non_differentiable(output[1])


@operator(
    cuda="triton_routing:route",
    fake=lambda logits_TE, bias_E, settings: tuple(
        logits_TE.new_empty(logits_TE.shape[0], settings.slots, dtype=dtype) for dtype in (torch.float32, torch.int64)
    ),
    setup=_route_setup,
    backward=lambda ctx, grad_TK, _: route_backward(grad_TK.contiguous(), *saved_values(ctx)),
)
def route(logits_TE: Tensor, bias_E: Tensor | None, settings: RouteSettings) -> tuple[Tensor, Tensor]:
    """The weights of each token's experts, float32 [T, K], and the experts' indices, int64 [T, K], best first.

    Scores are the softmax of the float32 logits (Shazeer et al. 2017), or their sigmoid. With a float32 bias, experts
    are chosen by score + bias and weighted by the score alone (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). On ties
    the lower index wins.
    """
    scores_TE = _scores(logits_TE, settings.sigmoid)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if settings.groups > 1:
        grouped = choice_TE.unflatten(1, (settings.groups, -1))
        best_two = grouped.gather(2, _top_indices(grouped, min(2, grouped.shape[2])))
        kept = _top_indices(best_two.sum(2), settings.kept_groups)
        outside = torch.ones_like(best_two[..., 0], dtype=torch.bool).scatter_(1, kept, False)
        choice_TE = grouped.masked_fill(outside.unsqueeze(2), float("-inf")).flatten(1)
    experts_TK = _top_indices(choice_TE, settings.slots)
    weights_TK = scores_TE.gather(1, experts_TK)
    if settings.normalize:
        weights_TK = weights_TK / _sum_in_order(weights_TK)
    return weights_TK * settings.scale, experts_TK


def _scores(logits_TE: Tensor, sigmoid: bool) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-logits_TE)) if sigmoid else torch.softmax(logits_TE, dim=1)


def _top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the largest `count` values of the last dim, descending, ties in ascending order of index. Values are
    packed with their inverted index into one integer, so no two are equal and `torch.topk` has no choice."""
    bits = (values + 0.0).view(torch.int32).long()  # -0 becomes 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(values.shape[-1], device=values.device)
    key = (ordered << 32) | (0xFFFFFFFF - index)
    return 0xFFFFFFFF - (key.topk(count, dim=-1).values & 0xFFFFFFFF)


def _sum_in_order(weights_TK: Tensor) -> Tensor:
    """Row sums added slot by slot, [T, 1]."""
    total_T1 = weights_TK[:, :1]
    for slot in range(1, weights_TK.shape[1]):
        total_T1 = total_T1 + weights_TK[:, slot : slot + 1]
    return total_T1


@operator(
    cuda="triton_routing:dispatch_plan",
    fake=lambda experts_TK, experts: (
        experts_TK.new_empty(experts_TK.shape[0] * experts_TK.shape[1]),
        torch.empty_like(experts_TK),
        experts_TK.new_empty(experts + 1, dtype=torch.int32),
    ),
)
def dispatch_plan(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort of rows by expert: an expert's rows are in the order of their tokens.

    Returns:
        order_R, int64: row r is slot `order[r] % K` of token `order[r] // K`. row_TK, int64: its inverse.
        offsets, int32 [E + 1]: expert e has rows `offsets[e]:offsets[e + 1]`.
    """
    flat = experts_TK.flatten()
    sorted_R, order_R = flat.sort(stable=True)
    rows = torch.arange(len(flat), device=flat.device)
    row_TK = torch.empty_like(order_R).scatter_(0, order_R, rows).view(experts_TK.shape)
    bounds = torch.arange(experts + 1, device=flat.device)
    return order_R, row_TK, torch.searchsorted(sorted_R, bounds, out_int32=True)


def _dispatch_backward(ctx, grad_RD: Tensor):
    (row_TK,) = saved_values(ctx)
    return combine(grad_RD, row_TK, torch.ones(row_TK.shape, device=row_TK.device))


@operator(
    cuda="triton_routing:dispatch",
    fake=lambda x_TD, order_R, row_TK: x_TD.new_empty(order_R.shape[0], x_TD.shape[1]),
    setup=lambda ctx, inputs, output: save(ctx, inputs[2:3]),
    backward=_dispatch_backward,
)
def dispatch(x_TD: Tensor, order_R: Tensor, row_TK: Tensor) -> Tensor:
    """A copy of its token for each row, [R, D]. The backward adds a token's rows in slot order."""
    return x_TD.index_select(0, order_R // row_TK.shape[1])


def _combine_grad(ctx, grad_TD: Tensor):
    y_RD, row_TK, weights_TK = ctx.saved_tensors
    order_R = torch.empty_like(row_TK.flatten())
    order_R = order_R.scatter(0, row_TK.flatten(), torch.arange(row_TK.numel(), device=row_TK.device))
    grad_y_RD, grad_R = combine_backward(grad_TD.contiguous(), y_RD, order_R, weights_TK)
    return grad_y_RD, None, grad_R.index_select(0, row_TK.flatten()).view(row_TK.shape)


@operator(
    cuda="triton_routing:combine",
    fake=lambda y_RD, row_TK, weights_TK: y_RD.new_empty(row_TK.shape[0], y_RD.shape[1]),
    backward=_combine_grad,
)
def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The weighted sum of each token's rows, [T, D]: in float32, slot by slot, rounded once to y's dtype."""
    total_TD = y_RD.index_select(0, row_TK[:, 0]).float() * weights_TK[:, :1]
    for slot in range(1, row_TK.shape[1]):
        term_TD = y_RD.index_select(0, row_TK[:, slot]).float() * weights_TK[:, slot : slot + 1]
        total_TD = total_TD + term_TD
    return total_TD.to(y_RD.dtype)


@operator(
    cuda="triton_routing:combine_backward",
    fake=lambda grad_TD, y_RD, order_R, weights_TK: (
        torch.empty_like(y_RD),
        y_RD.new_empty(y_RD.shape[0], dtype=torch.float32),
    ),
)
def combine_backward(grad_TD: Tensor, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `combine` for its rows, [R, D] in their dtype, and for the weights, float32 [R] in row order."""
    grad_RD = grad_TD.index_select(0, order_R // weights_TK.shape[1]).float()
    weight_R1 = weights_TK.flatten().index_select(0, order_R).unsqueeze(1)
    return (grad_RD * weight_R1).to(y_RD.dtype), (grad_RD * y_RD.float()).sum(1)


@operator(cuda=SAME, fake=lambda experts_TN: experts_TN.new_empty(experts_TN.shape[0], dtype=torch.int32))
def route_digest(experts_TN: Tensor) -> Tensor:
    """A 31-bit digest of each token's experts (int64), in order, int32 [T]: the sum over n of `experts[t, n] * base **
    (n + 1)` modulo 2 ** 31.

    With fewer than 2 ** 14 experts and choices, two rows that differ in one place, or in the exchange of two places,
    never have the same digest; other rows do with a probability of about 2 ** -31.
    """
    mask = (1 << _DIGEST_BITS) - 1
    base_N = torch.full((experts_TN.shape[1],), _DIGEST_BASE, dtype=torch.int64, device=experts_TN.device)
    powers_N = base_N.cumprod(0) & mask  # wraps around modulo 2 ** 64
    return ((experts_TN * powers_N).sum(1) & mask).int()


@operator(cuda=SAME, fake=lambda experts_TN, times_T, layers, experts: experts_TN.new_empty(layers, experts))
def expert_loads(experts_TN: Tensor, times_T: Tensor, layers: int, experts: int) -> Tensor:
    """How many tokens chose each expert of each layer, int64 [L, E]. Token t counts `times_T[t]` times (int64 or bool);
    the choices of all layers (int64) are side by side."""
    first_L1 = torch.arange(layers, device=experts_TN.device).unsqueeze(1) * experts
    places_TLK = experts_TN.unflatten(1, (layers, -1)) + first_L1
    times_TLK = times_T.long().view(-1, 1, 1).expand_as(places_TLK)
    counts = torch.zeros(layers * experts, dtype=torch.int64, device=experts_TN.device)
    return counts.scatter_add_(0, places_TLK.flatten(), times_TLK.flatten()).view(layers, experts)  # integers: exact


@operator(
    cuda=SAME,
    fake=lambda tokens_T, cu_seqlens, prefix_start_S, prefix_len_S: torch.empty_like(tokens_T, dtype=torch.int64),
)
def times_in_sequences(tokens_T: Tensor, cu_seqlens: Tensor, prefix_start_S: Tensor, prefix_len_S: Tensor) -> Tensor:
    """How many sequences each packed token belongs to (`Packed`), int64 [T]: one; for a shared prefix, all that begin
    with it; for padding, none."""
    begin_S, shares_S = prefix_start_S.long(), (prefix_len_S > 0).long()
    changes = torch.zeros(len(tokens_T) + 1, dtype=torch.int64, device=tokens_T.device)
    changes.scatter_add_(0, begin_S, shares_S).scatter_add_(0, begin_S + prefix_len_S, -shares_S)  # integers: exact
    times_T = changes.cumsum(0)[:-1].clamp(min=1)
    return times_T * (torch.arange(len(tokens_T), device=tokens_T.device) < cu_seqlens[-1])


@operator(cuda=SAME, fake=like(1))
def router_probabilities_backward(grad_E: Tensor, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Gradient for the logits, float32 [T, E]."""
    weighted_TE = torch.softmax(logits_TE, dim=1)
    centered_TE = grad_E - (weighted_TE * grad_E).sum(1, keepdim=True)
    return torch.where(valid_T.unsqueeze(1), weighted_TE * centered_TE, 0.0)


@operator(
    cuda=SAME,
    fake=lambda logits_TE, valid_T: logits_TE.new_empty(logits_TE.shape[1]),
    backward=lambda ctx, grad_E: router_probabilities_backward(grad_E.contiguous(), *saved_values(ctx)),
)
def router_probabilities(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """The softmax of the router's float32 logits, summed over the valid tokens (bool), float32 [E], differentiable."""
    return torch.where(valid_T.unsqueeze(1), torch.softmax(logits_TE, dim=1), 0.0).sum(0)
