"""The SiLU-gated product. Inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import operator, saved


def _backward(ctx, grad_TF: Tensor):
    return silu_mul_backward(grad_TF, *saved(ctx))


@operator(
    "lockstep::silu_mul",
    native=native.silu_mul,
    cuda="triton:silu_mul",
    fake=lambda gate_up_TE: gate_up_TE.new_empty(gate_up_TE.shape[0], gate_up_TE.shape[1] // 2),
    backward=_backward,
)
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused [T, 2F] projection (gate first), [T, F] (Shazeer 2020)."""
    return reference.silu_mul(gate_up_TE)


@operator(
    "lockstep::silu_mul_backward",
    native=native.silu_mul_backward,
    cuda="triton_backward:silu_mul",
    fake=lambda grad_TF, gate_up_TE: torch.empty_like(gate_up_TE),
)
def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """Gradient of `silu_mul` for its input, [T, 2F]."""
    return reference.silu_mul_backward(grad_TF, gate_up_TE)
