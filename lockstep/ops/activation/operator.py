"""The SiLU-gated product. Inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..operator import operator, saved


@operator(
    "lockstep::silu_mul_backward",
    native=native.silu_mul_backward,
    cuda="triton:silu_mul_backward",
    fake=lambda grad_TF, gate_up_TE: torch.empty_like(gate_up_TE),
)
def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """Gradient of `silu_mul` for its input, [T, 2F]."""
    gate, up = gate_up_TE.float().chunk(2, dim=1)
    grad = grad_TF.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((grad_gate, grad * silu), dim=1).to(gate_up_TE.dtype)


@operator(
    "lockstep::silu_mul",
    native=native.silu_mul,
    cuda="triton:silu_mul",
    fake=lambda gate_up_TE: gate_up_TE.new_empty(gate_up_TE.shape[0], gate_up_TE.shape[1] // 2),
    backward=lambda ctx, grad_TF: silu_mul_backward(grad_TF, *saved(ctx)),
)
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused [T, 2F] projection (gate first), [T, F] (Shazeer 2020).

    `x / (1 + exp(-x))`: torch's own silu differs between its vector body and scalar tail.
    """
    gate, up = gate_up_TE.float().chunk(2, dim=1)
    return (gate / (torch.exp(-gate) + 1.0) * up).to(gate_up_TE.dtype)
