"""RMSNorm. Each element is a function of its own row; inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import operator
from . import backward


def _rms_setup(ctx, inputs, output) -> None:
    x_TD, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x_TD, weight_D)


def _rms_backward(ctx, grad_TD: Tensor):
    x_TD, weight_D = ctx.saved_tensors
    if x_TD.is_cuda:
        return *backward.rms_norm(grad_TD, x_TD, weight_D, ctx.eps), None
    grad_x, grad_w = _norm_backward(x_TD.float(), weight_D.float(), grad_TD.float(), ctx.eps)
    return grad_x.to(x_TD.dtype), grad_w.sum(0).to(weight_D.dtype), None


@operator(
    "lockstep::rms_norm",
    native=native.rms_norm,
    cuda="triton:rms_norm",
    fake=lambda x_TD, weight_D, eps: torch.empty_like(x_TD),
    setup=_rms_setup,
    backward=_rms_backward,
)
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019)."""
    return reference.rms_norm(x_TD, weight_D, eps).to(x_TD.dtype)


def _norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm for the input and, per row and still unreduced, for the weight (float32)."""
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    weighted = grad * weight
    grad_x = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, grad * normed
