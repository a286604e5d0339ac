"""Linear layers with what stands before and after them, on a GPU: by the table, one kernel or the separate ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import backend, linear_table
from ..linear_table import AsyncChoice, Choice, Kernel, Kind
from . import rows
from .linear import product

try:
    from . import linear_async, linear_tma
except ImportError:  # Triton without Gluon
    linear_async = linear_tma = None  # type: ignore[assignment]


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.linear`."""
    backend.check_dtype(x_TK)
    choice = _choose("linear", x_TK, weight_NK)
    return _product(x_TK, weight_NK, choice, ahead=False) if choice else backend.cublaslt_linear(x_TK, weight_NK)


def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.linear_fp32`."""
    backend.check_dtype(x_TK)
    choice = linear_table.choose("linear_fp32", x_TK.shape[0], *weight_NK.shape)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK, torch.float32)
    assert isinstance(choice, Choice)
    return product(x_TK, weight_NK, choice, torch.float32)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """See `fused.linear_add`."""
    backend.check_dtype(x_TK)
    choice = _choose("linear_add", x_TK, weight_NK)
    if choice is None:
        return backend.cublaslt_linear(x_TK, weight_NK).add_(residual_TN)
    return _product(x_TK, weight_NK, choice, residual_MN=residual_TN)


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
    if choice:
        return _product(normed_TD, weight_ED, choice, gated=gated)
    out_TE = backend.cublaslt_linear(normed_TD, weight_ED)
    return rows.silu_mul(out_TE) if gated else out_TE


def _choose(kind: Kind, x_TK: Tensor, weight_NK: Tensor) -> Kernel | None:
    """By the table; by its rule where the kernel of the table cannot run."""
    choice = linear_table.choose(kind, x_TK.shape[0], *weight_NK.shape)
    if choice is None or isinstance(choice, Choice) or (linear_async and linear_async.usable(choice, weight_NK)):
        return choice
    return linear_table.by_rule(kind, x_TK.shape[0], weight_NK.shape[0])


def _product(x_TK: Tensor, weight_NK: Tensor, choice: Kernel, *, ahead: bool = True, **form: Any) -> Tensor:
    """By the kernel that the choice is for; `ahead` as in `linear_async.product`."""
    if isinstance(choice, Choice):
        return product(x_TK, weight_NK, choice, **form)
    if isinstance(choice, AsyncChoice):
        return linear_async.product(x_TK, weight_NK, choice, ahead=ahead, **form)
    return linear_tma.product(x_TK, weight_NK, choice, ahead=ahead, **form)
