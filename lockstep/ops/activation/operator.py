"""The gated product. Inputs are read as float32, and the result is rounded once.

Activations are of one form, `gate * sigmoid(x)`, computed as `gate / (1 + exp(-x))`:

- `silu`: x is the gate (Shazeer 2020, arXiv 2002.05202);
- `gelu_tanh`: GELU with its tanh written as a sigmoid, x is 2 sqrt(2 / pi) (gate + 0.044715 gate^3) (Hendrycks and
  Gimpel 2016, arXiv 1606.08415);
- `swiglu_clamped`: the gate is clamped to at most 7, the other factor to [-7, 7], and 1 is added to that; x is 1.702
  times the gate (gpt-oss, arXiv 2508.10925, section 2).

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..operator import like, operator, saved_values
from ..records import ACTIVATIONS, SILU

GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.07135481627159843
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@operator(native=native.silu_mul_backward, cuda="triton:silu_mul_backward", fake=like(1))
def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    """Gradient of `silu_mul` for its input, [T, 2F], given that of its result, [T, F]."""
    (gate, up), grad = _factors(gate_up_TE, activation), grad_TF.float()
    sigmoid = torch.sigmoid(_sigmoid_argument(gate, activation))
    active = gate * sigmoid
    rising = active * (1 - sigmoid)
    if activation == "gelu_tanh":
        rising = rising * (gate * gate * (3 * GELU_CUBIC) + GELU_LINEAR)
    if activation == "swiglu_clamped":
        rising = rising * SWIGLU_ALPHA
    grad_gate, grad_up = grad * up * (sigmoid + rising), grad * active
    if activation == "swiglu_clamped":
        given_gate, given_up = gate_up_TE.chunk(2, dim=1)
        grad_gate, grad_up = grad_gate * (given_gate <= SWIGLU_LIMIT), grad_up * (given_up.abs() <= SWIGLU_LIMIT)
    return torch.cat((grad_gate, grad_up), dim=1).to(gate_up_TE.dtype)


@operator(
    native=native.silu_mul,
    cuda="triton:silu_mul",
    fake=lambda gate_up_TE, *_: gate_up_TE.new_empty(gate_up_TE.shape[0], gate_up_TE.shape[1] // 2),
    backward=lambda ctx, grad_TF: silu_mul_backward(grad_TF, *saved_values(ctx)),
)
def silu_mul(gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    """`silu(gate) * up` of a fused [T, 2F] projection (gate first), [T, F] in its dtype; or the same with another of
    `ACTIVATIONS`. Any other activation is a ValueError.

    It is written `x / (1 + exp(-x))` since torch's own silu differs between its vector body and its scalar tail.
    """
    gate, up = _factors(gate_up_TE, activation)
    return (gate / (torch.exp(-_sigmoid_argument(gate, activation)) + 1.0) * up).to(gate_up_TE.dtype)


def _factors(gate_up_TE: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gate and the other factor, clamped where the activation says so, float32."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
    gate, up = gate_up_TE.float().chunk(2, dim=1)
    if activation == "swiglu_clamped":
        return gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1.0
    return gate, up


def _sigmoid_argument(gate: Tensor, activation: str) -> Tensor:
    """The argument of the sigmoid."""
    if activation == "gelu_tanh":
        return gate * (gate * gate * GELU_CUBIC + GELU_LINEAR)
    if activation == "swiglu_clamped":
        return gate * SWIGLU_ALPHA
    assert activation == SILU
    return gate
