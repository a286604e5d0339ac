"""RMSNorm. Each element is a function of its own row; inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import operator
from . import backward


@operator("lockstep::rms_norm")
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019)."""
    if native.usable(x_TD, weight_D):
        return native.rms_norm(x_TD, weight_D, eps)
    return reference.rms_norm(x_TD, weight_D, eps).to(x_TD.dtype)


@rms_norm.register_kernel("cuda")
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    from . import triton as norm_triton

    return norm_triton.rms_norm(x_TD, weight_D, eps)


@rms_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x_TD)


def _rms_setup(ctx, inputs, output) -> None:
    x_TD, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x_TD, weight_D)


def _rms_backward(ctx, grad_TD: Tensor):
    x_TD, weight_D = ctx.saved_tensors
    if x_TD.is_cuda:
        return *backward.rms_norm(grad_TD, x_TD, weight_D, ctx.eps), None
    grad_x, grad_w = _norm_backward(x_TD.float(), weight_D.float(), grad_TD.float(), ctx.eps)
    return grad_x.to(x_TD.dtype), grad_w.sum(0).to(weight_D.dtype), None


rms_norm.register_autograd(_rms_backward, setup_context=_rms_setup)


def _norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm for the input and, per row and still unreduced, for the weight (float32)."""
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    weighted = grad * weight
    grad_x = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, grad * normed
