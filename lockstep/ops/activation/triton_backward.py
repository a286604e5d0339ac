"""Backward of the SiLU-gated product: float32 inside, each gradient rounded once.

Shape suffixes: T rows, F feed-forward dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..row_alignment import unit_inner
from .triton import SILU_BLOCK


@triton.jit
def _silu_mul_kernel(grad_ptr, gate_up_ptr, out_ptr, grad_stride, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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


def silu_mul(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul_backward`."""
    grad_TF, gate_up_TE = unit_inner(grad_TF), unit_inner(gate_up_TE)
    rows, width = grad_TF.shape
    out_TE = torch.empty((rows, 2 * width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
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
