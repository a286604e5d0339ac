"""RMSNorm on a GPU: float32 inside, one rounding to the input's dtype. A program does one row.

Shape suffixes: T rows, D model dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..row_alignment import _warps, aligned_rows


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    pdl.begin(PDL)
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `norm.operator.rms_norm`."""
    x_TD, weight_D = aligned_rows(x_TD), aligned_rows(weight_D)
    rows, width = x_TD.shape
    out_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    _rms_norm_kernel[(rows,)](
        x_TD,
        weight_D,
        out_TD,
        x_TD.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **pdl.options(x_TD, num_warps=_warps(width, 8)),
    )
    return out_TD
