"""Linear layers with what stands before and after them, on a GPU: by the table, one kernel or the separate ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backend, linear_table
from ..linear_table import Kind
from . import rows
from .linear import product


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.linear`."""
    backend.check_dtype(x_TK)
    choice = linear_table.choose("linear", x_TK.shape[0], *weight_NK.shape)
    return product(x_TK, weight_NK, choice) if choice else backend.cublaslt_linear(x_TK, weight_NK)


def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.linear_fp32`."""
    backend.check_dtype(x_TK)
    choice = linear_table.choose("linear_fp32", x_TK.shape[0], *weight_NK.shape)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK, torch.float32)
    return product(x_TK, weight_NK, choice, torch.float32)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """See `fused.linear_add`."""
    backend.check_dtype(x_TK)
    choice = linear_table.choose("linear_add", x_TK.shape[0], *weight_NK.shape)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK).add_(residual_TN)
    return product(x_TK, weight_NK, choice, residual_MN=residual_TN)


def norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ND: Tensor, eps: float) -> Tensor:
    """See `fused.norm_linear`."""
    return _norm_product("norm_linear", x_TD, norm_D, weight_ND, eps)


def norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """See `fused.norm_gate_up`."""
    return _norm_product("norm_gate_up", x_TD, norm_D, weight_ED, eps)


def _norm_product(kind: Kind, x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    backend.check_dtype(x_TD)
    gated = kind == "norm_gate_up"
    choice = linear_table.choose(kind, x_TD.shape[0], *weight_ED.shape)
    normed_TD = rows.rms_norm(x_TD, norm_D, eps)
    if choice:
        return product(normed_TD, weight_ED, choice, gated=gated)
    out_TE = backend.cublaslt_linear(normed_TD, weight_ED)
    return rows.silu_mul(out_TE) if gated else out_TE
