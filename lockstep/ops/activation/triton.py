"""The gated product and its gradient on a GPU: float32 inside, each result rounded once to the input's dtype.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..records import SILU
from ..rows import aligned_rows, load_halves, store_halves, unit_inner
from . import operator

SILU_BLOCK = 1024
GELU_LINEAR, GELU_CUBIC = tl.constexpr(operator.GELU_LINEAR), tl.constexpr(operator.GELU_CUBIC)
SWIGLU_ALPHA, SWIGLU_LIMIT = tl.constexpr(operator.SWIGLU_ALPHA), tl.constexpr(operator.SWIGLU_LIMIT)


@triton.jit
def _factors(gate, up, ACTIVATION: tl.constexpr):
    """The gate and the other factor, clamped where the activation says so; NaN stays NaN."""
    if ACTIVATION == "swiglu_clamped":
        gate = tl.where(gate > SWIGLU_LIMIT, SWIGLU_LIMIT, gate)
        up = tl.where(up > SWIGLU_LIMIT, SWIGLU_LIMIT, tl.where(up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, up)) + 1.0
    return gate, up


@triton.jit
def _sigmoid_argument(gate, ACTIVATION: tl.constexpr):
    """The argument of the sigmoid."""
    if ACTIVATION == "gelu_tanh":
        gate = gate * (gate * gate * GELU_CUBIC + GELU_LINEAR)
    elif ACTIVATION == "swiglu_clamped":
        gate = gate * SWIGLU_ALPHA
    else:
        tl.static_assert(ACTIVATION == "silu")
    return gate


@triton.jit
def _gate_slope(gate, active, sigmoid, ACTIVATION: tl.constexpr):
    """The gate times the derivative of the sigmoid with respect to the gate."""
    rising = active * (1.0 - sigmoid)
    if ACTIVATION == "gelu_tanh":
        rising = rising * (gate * gate * (3 * GELU_CUBIC) + GELU_LINEAR)
    elif ACTIVATION == "swiglu_clamped":
        rising = rising * SWIGLU_ALPHA
    return rising


@triton.jit
def apply_gate(gate, up, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` in float32."""
    gate, up = _factors(gate, up, ACTIVATION)
    return tl.div_rn(gate, tl.exp(-_sigmoid_argument(gate, ACTIVATION)) + 1.0) * up


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    gate_up_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    pdl.release_and_wait(PDL)
    gate, up = load_halves(gate_up_ptr + row * gate_up_stride + column, mask, WIDTH)
    out = apply_gate(gate, up, ACTIVATION)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    gate_up_TE = aligned_rows(gate_up_TE)
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    out_TF = torch.empty((rows, width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        gate_up_TE, out_TF, gate_up_TE.stride(0),
        ACTIVATION=activation, WIDTH=width, BLOCK=SILU_BLOCK, **pdl.options(gate_up_TE, num_warps=4),
    )  # fmt: skip
    return out_TF


@triton.jit
def _silu_mul_backward_kernel(
    grad_ptr,
    gate_up_ptr,
    out_ptr,
    grad_stride,
    stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    given_gate, given_up = load_halves(gate_up_ptr + row * stride + column, mask, WIDTH)
    gate, up = _factors(given_gate, given_up, ACTIVATION)
    sigmoid = tl.div_rn(1.0, tl.exp(-_sigmoid_argument(gate, ACTIVATION)) + 1.0)
    active = gate * sigmoid
    grad_gate = grad * up * (sigmoid + _gate_slope(gate, active, sigmoid, ACTIVATION))
    if ACTIVATION == "swiglu_clamped":
        grad_gate = tl.where(given_gate <= SWIGLU_LIMIT, grad_gate, 0.0)
        grad = tl.where(tl.abs(given_up) <= SWIGLU_LIMIT, grad, 0.0)
    store_halves(out_ptr + row * (2 * WIDTH) + column, grad_gate, grad * active, mask, WIDTH)


def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    grad_TF, gate_up_TE = unit_inner(grad_TF), unit_inner(gate_up_TE)
    rows, width = grad_TF.shape
    out_TE = torch.empty((rows, 2 * width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_backward_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        grad_TF, gate_up_TE, out_TE, grad_TF.stride(0), gate_up_TE.stride(0),
        ACTIVATION=activation, WIDTH=width, BLOCK=SILU_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out_TE
