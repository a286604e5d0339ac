"""The SiLU-gated product. Inputs are read as float32, and the result is rounded once.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..operator import operator


@operator("lockstep::silu_mul")
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused [T, 2F] projection (gate first), [T, F] (Shazeer 2020)."""
    return (native if native.usable(gate_up_TE) else reference).silu_mul(gate_up_TE)


@silu_mul.register_kernel("cuda")
def _(gate_up_TE: Tensor) -> Tensor:
    from . import triton as activation_triton

    return activation_triton.silu_mul(gate_up_TE)


@silu_mul.register_fake
def _(gate_up_TE: Tensor) -> Tensor:
    return gate_up_TE.new_empty(gate_up_TE.shape[0], gate_up_TE.shape[1] // 2)


def _silu_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _silu_backward(ctx, grad_TF: Tensor):
    (gate_up_TE,) = ctx.saved_tensors
    return silu_mul_backward(grad_TF, gate_up_TE)


silu_mul.register_autograd(_silu_backward, setup_context=_silu_setup)


@operator("lockstep::silu_mul_backward")
def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """Gradient of `silu_mul` for its input, [T, 2F]."""
    path = native if native.usable(grad_TF, gate_up_TE) else reference
    return path.silu_mul_backward(grad_TF, gate_up_TE)


@silu_mul_backward.register_kernel("cuda")
def _(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    from . import triton_backward

    return triton_backward.silu_mul(grad_TF, gate_up_TE)


@silu_mul_backward.register_fake
def _(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    return torch.empty_like(gate_up_TE)
