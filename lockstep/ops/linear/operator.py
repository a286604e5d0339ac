"""Matrix products under contract C1: one float32 accumulator an output element, ascending K, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import operator


@operator("lockstep::linear")
def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, [T, N] in x's dtype; a row's bits do not depend on how many rows there are."""
    return _cpu_linear(x_TK, weight_NK)


@linear.register_kernel("cuda")
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    from . import cuda

    return cuda.linear(x_TK, weight_NK)


@linear.register_fake
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TN: Tensor):
    x_TK, weight_NK = ctx.saved_tensors
    return matmul(grad_TN, weight_NK), matmul(grad_TN.t(), x_TK)


linear.register_autograd(_backward, setup_context=_setup)


@operator("lockstep::linear_fp32")
def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same product with the float32 accumulator as its result (logits, router scores). No autograd."""
    return _cpu_linear(x_TK.float(), weight_NK.float())


@linear_fp32.register_kernel("cuda")
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    from . import cuda

    return cuda.linear_fp32(x_TK, weight_NK)


@linear_fp32.register_fake
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0], dtype=torch.float32)


def _cpu_linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return (native if native.usable(x_TK, weight_NK) else reference).linear(x_TK, weight_NK)


@operator("lockstep::matmul")
def matmul(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    """`a @ b` for backward passes: under no contract, but the same every time."""
    return native.matmul(a_RD, b_DC) if native.usable(a_RD, b_DC) else a_RD @ b_DC


@matmul.register_kernel("cuda")
def _(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    return a_RD @ b_DC


@matmul.register_fake
def _(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    return a_RD.new_empty(a_RD.shape[0], b_DC.shape[1])
