"""Matrix products under contract C1: one float32 accumulator an output element, ascending K, one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backend, reference


@torch.library.custom_op("lockstep::linear", mutates_args=(), device_types="cpu")
def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, [T, N] in x's dtype; a row's bits do not depend on how many rows there are."""
    return reference.linear(x_TK, weight_NK)


@linear.register_kernel("cuda")
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return backend.cuda_linear(x_TK, weight_NK, x_TK.dtype)


@linear.register_fake
def _(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_TN: Tensor):
    x_TK, weight_NK = ctx.saved_tensors
    return grad_TN @ weight_NK, grad_TN.t() @ x_TK


linear.register_autograd(_backward, setup_context=_setup)


def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same product with the float32 accumulator as its result (logits, router scores). No autograd."""
    if x_TK.is_cuda:
        return backend.cuda_linear(x_TK, weight_NK, torch.float32)
    return reference.linear(x_TK.float(), weight_NK.float())
