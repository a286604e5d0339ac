"""Linear layers fused with their neighbours: the same bits as the separate operators, in fewer kernels.

Each rounds where the separate operators round (`docs/numerics.md`). With gradients enabled those run, because their
backward passes are separate; without, one operator runs, and on a GPU the shape decides how much of it is one kernel.

Shape suffixes: T rows, D model dim, E fused projection, F feed-forward dim, K depth, N columns.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .. import native, reference
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


def _cpu_norm_linear(path: ModuleType, x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return path.linear(path.rms_norm(x_TD, norm_D, eps).to(x_TD.dtype), weight_ED)


@operator("lockstep::norm_linear")
def _norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return _cpu_norm_linear(native if native.usable(x_TD, weight_ED) else reference, x_TD, norm_D, weight_ED, eps)


@_norm_linear.register_kernel("cuda")
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    from . import cuda

    return cuda.norm_linear(x_TD, norm_D, weight_ED, eps)


@_norm_linear.register_fake
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0])


@operator("lockstep::norm_gate_up")
def _norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    path = native if native.usable(x_TD, weight_ED) else reference
    return path.silu_mul(_cpu_norm_linear(path, x_TD, norm_D, weight_ED, eps))


@_norm_gate_up.register_kernel("cuda")
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    from . import cuda

    return cuda.norm_gate_up(x_TD, norm_D, weight_ED, eps)


@_norm_gate_up.register_fake
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0] // 2)


@operator("lockstep::linear_add")
def _linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    path = native if native.usable(x_TK, weight_NK) else reference
    return path.linear(x_TK, weight_NK).add_(residual_TN)


@_linear_add.register_kernel("cuda")
def _(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    from . import cuda

    return cuda.linear_add(x_TK, weight_NK, residual_TN)


@_linear_add.register_fake
def _(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
