"""RMSNorm. Each element is a function of its own row; inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, D model dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..operator import like, operator, saved_values


def _native_backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`rms_norm_backward` in C, with its bits."""
    out_TD, weight_1D = torch.empty(x_TD.shape), weight_D.unsqueeze(0)
    weight_1D = weight_1D + weight_offset if weight_offset else weight_1D
    grad_w = native.norm_backward(x_TD.contiguous(), weight_1D, grad_TD.unsqueeze(1), eps, out_TD)
    return out_TD, grad_w.squeeze(1).sum(0)


def _backward(ctx, grad_TD: Tensor):
    return rms_norm_backward(grad_TD, *saved_values(ctx))


@operator(native=native.rms_norm, cuda="triton:rms_norm", fake=like(0), backward=_backward)
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + weight_offset)` over the last dim (Zhang and Sennrich 2019),
    in x's dtype; the weight is [D].

    With an offset of 1, weights are stored relative to 1 (Gemma, arXiv 2403.08295); the sum is float32.
    """
    return normalize(x_TD, _factors(weight_D, weight_offset), eps).to(x_TD.dtype)


@operator(
    cuda="triton:norm_add",
    fake=like(0),
    composed=lambda x_TD, weight_D, residual_TD, eps, weight_offset=0.0: (
        residual_TD + rms_norm(x_TD, weight_D, eps, weight_offset)
    ),
)
def norm_add(x_TD: Tensor, weight_D: Tensor, residual_TD: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """`residual + rms_norm(x, weight, eps, weight_offset)`, [T, D], for layers with a norm at their end: both the norm
    and the sum are rounded. With gradients enabled, the separate operators run."""
    return rms_norm.on_cpu[x_TD.dtype](x_TD, weight_D, eps, weight_offset).add_(residual_TD)


@operator(native=_native_backward, cuda="triton:rms_norm_backward", fake=like(1, 2, contiguous=True))
def rms_norm_backward(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `rms_norm` for x, [T, D], and for the weight, [D]. Opaque to traces. Not under the forward's
    contract, but deterministic."""
    grad_x, grad_w = normalize_backward(x_TD.float(), _factors(weight_D, weight_offset), grad_TD.float(), eps)
    return grad_x.to(x_TD.dtype), grad_w.sum(0).to(weight_D.dtype)


def _factors(weight: Tensor, offset: float) -> Tensor:
    """The factors on normalized elements, float32."""
    return weight.float() + offset if offset else weight.float()


def normalize(x: Tensor, factors: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim; float32 result."""
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * factors


def normalize_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm for the input and, per row, not yet summed, for the weight (float32)."""
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    weighted = grad * weight
    grad_x = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, grad * normed
