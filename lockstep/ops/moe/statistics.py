"""What is kept of a model's routing: a word a token to compare the roles by, how busy each expert is, and its balance.

Shape suffixes: T tokens, L layers with experts, E experts, K slots a token in a layer, N = L * K choices a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator

_BASE = 0x2545F4F5  # 5 modulo 8: powers of it are odd, and two of them differ in their low bits
_BITS = 31


@operator("lockstep::route_digest")
def route_digest(experts_TN: Tensor) -> Tensor:
    """A word of 31 bits for each token's experts, in order, int32 [T].

    It is the sum of `experts[t, n] * base ** (n + 1)` modulo 2 ** 31. With fewer than 2 ** 14 experts and choices, two
    rows that differ in one place, or by an exchange of two places, never have the same word; others have it by a chance
    of about 2 ** -31.

    Args:
        experts_TN: int64.
    """
    return _digest(experts_TN)


def _digest(experts_TN: Tensor) -> Tensor:
    mask = (1 << _BITS) - 1
    base_N = torch.full((experts_TN.shape[1],), _BASE, dtype=torch.int64, device=experts_TN.device)
    powers_N = base_N.cumprod(0) & mask  # it wraps around, modulo 2 ** 64
    return ((experts_TN * powers_N).sum(1) & mask).int()


route_digest.register_kernel("cuda")(_digest)


@route_digest.register_fake
def _(experts_TN: Tensor) -> Tensor:
    return experts_TN.new_empty(experts_TN.shape[0], dtype=torch.int32)


@operator("lockstep::expert_loads")
def expert_loads(experts_TN: Tensor, valid_T: Tensor, layers: int, experts: int) -> Tensor:
    """How many of the valid tokens chose each expert, int64 [L, E].

    Args:
        experts_TN: int64, the layers side by side. valid_T: bool.
    """
    return _loads(experts_TN, valid_T, layers, experts)


def _loads(experts_TN: Tensor, valid_T: Tensor, layers: int, experts: int) -> Tensor:
    first_L1 = torch.arange(layers, device=experts_TN.device).unsqueeze(1) * experts
    places_TLK = experts_TN.unflatten(1, (layers, -1)) + first_L1
    ones_TLK = valid_T.long().view(-1, 1, 1).expand_as(places_TLK)
    counts = torch.zeros(layers * experts, dtype=torch.int64, device=experts_TN.device)
    return counts.scatter_add_(0, places_TLK.flatten(), ones_TLK.flatten()).view(layers, experts)  # integers: exact


expert_loads.register_kernel("cuda")(_loads)


@expert_loads.register_fake
def _(experts_TN: Tensor, valid_T: Tensor, layers: int, experts: int) -> Tensor:
    return experts_TN.new_empty(layers, experts)


@operator("lockstep::router_probabilities")
def router_probabilities(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """The softmax of the router's scores summed over the valid tokens, float32 [E], differentiable.

    Args:
        logits_TE: float32 from `router_logits`. valid_T: bool.
    """
    return _probabilities(logits_TE, valid_T)


def _probabilities(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    return torch.where(valid_T.unsqueeze(1), torch.softmax(logits_TE, dim=1), 0.0).sum(0)


router_probabilities.register_kernel("cuda")(_probabilities)


@router_probabilities.register_fake
def _(logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    return logits_TE.new_empty(logits_TE.shape[1])


@operator("lockstep::router_probabilities_backward")
def router_probabilities_backward(grad_E: Tensor, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    """Gradient for the scores, float32 [T, E]."""
    return _probabilities_backward(grad_E, logits_TE, valid_T)


def _probabilities_backward(grad_E: Tensor, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    weighted_TE = torch.softmax(logits_TE, dim=1)
    centered_TE = grad_E - (weighted_TE * grad_E).sum(1, keepdim=True)
    return torch.where(valid_T.unsqueeze(1), weighted_TE * centered_TE, 0.0)


router_probabilities_backward.register_kernel("cuda")(_probabilities_backward)


@router_probabilities_backward.register_fake
def _(grad_E: Tensor, logits_TE: Tensor, valid_T: Tensor) -> Tensor:
    return torch.empty_like(logits_TE)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx, grad_E: Tensor):
    return router_probabilities_backward(grad_E.contiguous(), *ctx.saved_tensors), None


router_probabilities.register_autograd(_grad, setup_context=_setup)
