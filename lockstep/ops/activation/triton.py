"""The SiLU-gated product and its gradient on a GPU: float32 inside, each result rounded once to the input's dtype.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..rows import aligned_rows, unit_inner

SILU_BLOCK = 1024


@triton.jit
def silu_gated(gate, up):
    """`silu(gate) * up` in float32."""
    return tl.div_rn(gate, tl.exp(-gate) + 1.0) * up


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    pdl.begin(PDL)
    gate = tl.load(gate_up_ptr + row * gate_up_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    out = silu_gated(gate, up)
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul`."""
    gate_up_TE = aligned_rows(gate_up_TE)
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    out_TF = torch.empty((rows, width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        gate_up_TE,
        out_TF,
        gate_up_TE.stride(0),
        WIDTH=width,
        BLOCK=SILU_BLOCK,
        **pdl.options(gate_up_TE, num_warps=4),
    )
    return out_TF


@triton.jit
def _silu_mul_backward_kernel(
    grad_ptr, gate_up_ptr, out_ptr, grad_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, tl.exp(-gate) + 1.0)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    out = out_ptr + row * (2 * WIDTH) + column
    tl.store(out, grad_gate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + WIDTH, (grad * silu).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul_backward`."""
    grad_TF, gate_up_TE = unit_inner(grad_TF), unit_inner(gate_up_TE)
    rows, width = grad_TF.shape
    out_TE = torch.empty((rows, 2 * width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_backward_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        grad_TF,
        gate_up_TE,
        out_TE,
        grad_TF.stride(0),
        gate_up_TE.stride(0),
        WIDTH=width,
        BLOCK=SILU_BLOCK,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return out_TE
