"""Linear layers with what stands before and after them, on a GPU."""

from __future__ import annotations

from torch import Tensor

from ..norm.triton import rms_norm
from .kernels import product


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.operator.linear`."""
    return product("linear", x_TK, weight_NK)


def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.operator.linear_fp32`."""
    return product("linear_fp32", x_TK, weight_NK)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """See `linear.fused.linear_add`."""
    return product("linear_add", x_TK, weight_NK, residual_TN)


def norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """See `linear.fused.norm_linear`."""
    return product("norm_linear", rms_norm(x_TD, norm_D, eps), weight_ED)


def norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """See `linear.fused.norm_gate_up`."""
    return product("norm_gate_up", rms_norm(x_TD, norm_D, eps), weight_ED)
