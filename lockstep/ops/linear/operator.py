"""Matrix products under contract C1: one float32 accumulator an output element, ascending K, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import SAME, operator


def _backward(ctx, grad_TN: Tensor):
    x_TK, weight_NK = ctx.saved_tensors
    return matmul(grad_TN, weight_NK), matmul(grad_TN.t(), x_TK)


@operator(
    "lockstep::linear",
    native=native.linear,
    cuda="cuda:linear",
    fake=lambda x_TK, weight_NK: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]),
    backward=_backward,
)
def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, [T, N] in x's dtype; a row's bits do not depend on how many rows there are."""
    return reference.linear(x_TK, weight_NK)


@operator(
    "lockstep::linear_fp32",
    cuda="cuda:linear_fp32",
    fake=lambda x_TK, weight_NK: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0], dtype=torch.float32),
)
def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same product with the float32 accumulator as its result (logits, router scores). No autograd."""
    return linear.on_cpu[torch.float32](x_TK.float(), weight_NK.float())


@operator(
    "lockstep::matmul",
    native=native.matmul,
    cuda=SAME,
    fake=lambda a_RD, b_DC: a_RD.new_empty(a_RD.shape[0], b_DC.shape[1]),
)
def matmul(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    """`a @ b` for backward passes: under no contract, but the same every time."""
    return a_RD @ b_DC
