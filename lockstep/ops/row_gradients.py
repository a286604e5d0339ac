"""What backward kernels of row operators share: weight gradients that programs left in rows of their own are folded.

The number of rows alone fixes the order of additions. Nothing is under the forward's contract.

Shape suffixes: D model dim, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FOLD_ROWS, FOLD_BLOCK, FOLD_WARPS = 512, 8, 8


@triton.jit
def _fold_kernel(partial_ptr, out_ptr, programs, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        mask = (program < programs)[:, None] & (column < width)[None, :]
        total += tl.load(partial_ptr + program[:, None] * stride + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < width)


def _fold(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over programs, [D] in `dtype`."""
    programs, width = partial_PD.shape
    out_D = torch.empty(width, dtype=dtype, device=partial_PD.device)
    _fold_kernel[(triton.cdiv(width, FOLD_BLOCK),)](
        partial_PD, out_D, programs, width, partial_PD.stride(0), ROWS=FOLD_ROWS, BLOCK=FOLD_BLOCK, num_warps=FOLD_WARPS
    )
    return out_D
