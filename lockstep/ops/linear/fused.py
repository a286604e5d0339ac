"""Linear layers fused with their neighbours: the same bits as the separate operators, in fewer kernels.

Each rounds where the separate operators round (`docs/numerics.md`). With gradients enabled those run, because their
backward passes are separate; without, one operator runs, and on a GPU the shape decides how much of it is one kernel.

Shape suffixes: T rows, D model dim, E fused projection, F feed-forward dim, K depth, N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation.operator import silu_mul
from ..norm.operator import rms_norm
from ..operator import operator
from .operator import linear


def norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """`linear(rms_norm(x, norm, eps), weight)`, [T, E]."""
    if torch.is_grad_enabled():
        return linear(rms_norm(x_TD, norm_D, eps), weight_ED)
    return _norm_linear(x_TD, norm_D, weight_ED, eps)


def norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """`silu_mul(linear(rms_norm(x, norm, eps), weight))`: the weight is [2F, D], gate rows first; [T, F]."""
    if torch.is_grad_enabled():
        return silu_mul(linear(rms_norm(x_TD, norm_D, eps), weight_ED))
    return _norm_gate_up(x_TD, norm_D, weight_ED, eps)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """`residual + linear(x, weight)`, [T, N]: both the product and the sum are rounded."""
    if torch.is_grad_enabled():
        return residual_TN + linear(x_TK, weight_NK)
    return _linear_add(x_TK, weight_NK, residual_TN)


@operator(
    "lockstep::norm_linear",
    cuda="kernels:norm_linear",
    fake=lambda x_TD, norm_D, weight_ED, eps: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0]),
)
def _norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return linear.on_cpu[x_TD.dtype](rms_norm.on_cpu[x_TD.dtype](x_TD, norm_D, eps), weight_ED)


@operator(
    "lockstep::norm_gate_up",
    cuda="kernels:norm_gate_up",
    fake=lambda x_TD, norm_D, weight_ED, eps: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0] // 2),
)
def _norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return silu_mul.on_cpu[x_TD.dtype](
        linear.on_cpu[x_TD.dtype](rms_norm.on_cpu[x_TD.dtype](x_TD, norm_D, eps), weight_ED)
    )


@operator(
    "lockstep::linear_add",
    cuda="kernels:linear_add",
    fake=lambda x_TK, weight_NK, residual_TN: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]),
)
def _linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    return linear.on_cpu[x_TK.dtype](x_TK, weight_NK).add_(residual_TN)
