"""Linear layers with what stands before and after them, on a GPU: by the table, one kernel or the separate ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backend, linear_table
from ..linear_table import AsyncChoice, Choice, Kind
from . import rows
from .linear import product

try:
    from . import linear_async
except ImportError:  # Triton without Gluon
    linear_async = None  # type: ignore[assignment]


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.linear`."""
    backend.check_dtype(x_TK)
    choice = _choose("linear", x_TK, weight_NK)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK)
    if isinstance(choice, AsyncChoice):
        return linear_async.product(x_TK, weight_NK, choice, ahead=False)
    return product(x_TK, weight_NK, choice)


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
    choice = _choose("linear_add", x_TK, weight_NK)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK).add_(residual_TN)
    if isinstance(choice, AsyncChoice):
        return linear_async.product(x_TK, weight_NK, choice, residual_MN=residual_TN)
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
    choice = _choose(kind, x_TD, weight_ED)
    normed_TD = rows.rms_norm(x_TD, norm_D, eps)
    if isinstance(choice, AsyncChoice):
        return linear_async.product(normed_TD, weight_ED, choice, gated=gated)
    if choice:
        return product(normed_TD, weight_ED, choice, gated=gated)
    out_TE = backend.cublaslt_linear(normed_TD, weight_ED)
    return rows.silu_mul(out_TE) if gated else out_TE


def _choose(kind: Kind, x_TK: Tensor, weight_NK: Tensor) -> Choice | AsyncChoice | None:
    """By the table; by its rule where the kernel of the table cannot run."""
    choice = linear_table.choose(kind, x_TK.shape[0], *weight_NK.shape)
    if isinstance(choice, AsyncChoice) and not (linear_async and linear_async.usable(weight_NK)):
        return linear_table.by_rule(kind, x_TK.shape[0], weight_NK.shape[0])
    return choice
