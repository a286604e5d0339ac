"""What is kept of a model's routing: a word a token to compare the roles by, how busy each expert is, and its balance.

Shape suffixes: T tokens, L layers with experts, E experts, K slots a token in a layer, N = L * K choices a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import SAME, operator, saved

_BASE = 0x2545F4F5  # 5 modulo 8: powers of it are odd, and two of them differ in their low bits
_BITS = 31


@operator(
    "lockstep::route_digest",
    cuda=SAME,
    fake=lambda experts_TN: experts_TN.new_empty(experts_TN.shape[0], dtype=torch.int32),
)
def route_digest(experts_TN: Tensor) -> Tensor:
    """A word of 31 bits for each token's experts, in order, int32 [T].

    It is the sum of `experts[t, n] * base ** (n + 1)` modulo 2 ** 31. With fewer than 2 ** 14 experts and choices, two
    rows that differ in one place, or by an exchange of two places, never have the same word; others have it by a chance
    of about 2 ** -31.

    Args:
        experts_TN: int64.
    """
    mask = (1 << _BITS) - 1
    base_N = torch.full((experts_TN.shape[1],), _BASE, dtype=torch.int64, device=experts_TN.device)
    powers_N = base_N.cumprod(0) & mask  # it wraps around, modulo 2 ** 64
    return ((experts_TN * powers_N).sum(1) & mask).int()


@operator(
    "lockstep::expert_loads",
    cuda=SAME,
    fake=lambda experts_TN, valid_T, layers, experts: experts_TN.new_empty(layers, experts),
)
def expert_loads(experts_TN: Tensor, valid_T: Tensor, layers: int, experts: int) -> Tensor:
    """How many of the valid tokens chose each expert, int64 [L, E].

    Args:
        experts_TN: int64, the layers side by side. valid_T: bool.
    """
    first_L1 = torch.arange(layers, device=experts_TN.device).unsqueeze(1) * experts
    places_TLK = experts_TN.unflatten(1, (layers, -1)) + first_L1
    ones_TLK = valid_T.long().view(-1, 1, 1).expand_as(places_TLK)
    counts = torch.zeros(layers * experts, dtype=torch.int64, device=experts_TN.device)
    return counts.scatter_add_(0, places_TLK.flatten(), ones_TLK.flatten()).view(layers, experts)  # integers: exact


@operator(
    "lockstep::router_probabilities_backward",
    cuda=SAME,
    fake=lambda grad_E, logits_TE, valid_T: torch.empty_like(logits_TE),
)
def router_probabilities_backward(grad_E: Tensor, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Gradient for the scores, float32 [T, E]."""
    weighted_TE = torch.softmax(logits_TE, dim=1)
    centered_TE = grad_E - (weighted_TE * grad_E).sum(1, keepdim=True)
    return torch.where(valid_T.unsqueeze(1), weighted_TE * centered_TE, 0.0)


@operator(
    "lockstep::router_probabilities",
    cuda=SAME,
    fake=lambda logits_TE, valid_T: logits_TE.new_empty(logits_TE.shape[1]),
    backward=lambda ctx, grad_E: router_probabilities_backward(grad_E.contiguous(), *saved(ctx)),
)
def router_probabilities(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """The softmax of the router's scores summed over the valid tokens, float32 [E], differentiable.

    Args:
        logits_TE: float32 from `router_logits`. valid_T: bool.
    """
    return torch.where(valid_T.unsqueeze(1), torch.softmax(logits_TE, dim=1), 0.0).sum(0)
