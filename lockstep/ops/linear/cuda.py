"""Linear layers with what stands before and after them, on a GPU: by the table, one kernel or the separate ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..activation import triton as activation_triton
from ..norm import triton as norm_triton
from ..tables import linear_table
from ..tables.linear_table import AsyncChoice, Choice, Kernel, Kind
from . import cublas
from .triton import product

try:
    from . import hopper_async, hopper_tma
except ImportError:  # Triton without Gluon
    hopper_async = hopper_tma = None  # type: ignore[assignment]


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.operator.linear`."""
    cublas.check_dtype(x_TK)
    choice = _choose("linear", x_TK, weight_NK)
    return _product(x_TK, weight_NK, choice, ahead=False) if choice else cublas.cublaslt_linear(x_TK, weight_NK)


def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.operator.linear_fp32`."""
    cublas.check_dtype(x_TK)
    choice = linear_table.choose("linear_fp32", x_TK.shape[0], *weight_NK.shape)
    if choice is None:
        return cublas.cublaslt_linear(x_TK, weight_NK, torch.float32)
    assert isinstance(choice, Choice)
    return product(x_TK, weight_NK, choice, torch.float32)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """See `linear.fused.linear_add`."""
    cublas.check_dtype(x_TK)
    choice = _choose("linear_add", x_TK, weight_NK)
    if choice is None:
        return cublas.cublaslt_linear(x_TK, weight_NK).add_(residual_TN)
    return _product(x_TK, weight_NK, choice, residual_MN=residual_TN)


def norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ND: Tensor, eps: float) -> Tensor:
    """See `linear.fused.norm_linear`."""
    return _norm_product("norm_linear", x_TD, norm_D, weight_ND, eps)


def norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """See `linear.fused.norm_gate_up`."""
    return _norm_product("norm_gate_up", x_TD, norm_D, weight_ED, eps)


def _norm_product(kind: Kind, x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    cublas.check_dtype(x_TD)
    gated = kind == "norm_gate_up"
    choice = _choose(kind, x_TD, weight_ED)
    normed_TD = norm_triton.rms_norm(x_TD, norm_D, eps)
    if choice:
        return _product(normed_TD, weight_ED, choice, gated=gated)
    out_TE = cublas.cublaslt_linear(normed_TD, weight_ED)
    return activation_triton.silu_mul(out_TE) if gated else out_TE


def _choose(kind: Kind, x_TK: Tensor, weight_NK: Tensor) -> Kernel | None:
    """By the table; by its rule where the kernel of the table cannot run."""
    choice = linear_table.choose(kind, x_TK.shape[0], *weight_NK.shape)
    if choice is None or isinstance(choice, Choice) or (hopper_async and hopper_async.usable(choice, weight_NK)):
        return choice
    return linear_table.by_rule(kind, x_TK.shape[0], weight_NK.shape[0])


def _product(x_TK: Tensor, weight_NK: Tensor, choice: Kernel, *, ahead: bool = True, **form: Any) -> Tensor:
    """By the kernel that the choice is for; `ahead` as in `hopper_async.product`."""
    if isinstance(choice, Choice):
        return product(x_TK, weight_NK, choice, **form)
    if isinstance(choice, AsyncChoice):
        return hopper_async.product(x_TK, weight_NK, choice, ahead=ahead, **form)
    return hopper_tma.product(x_TK, weight_NK, choice, ahead=ahead, **form)
