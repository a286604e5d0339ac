"""One program does all additions of an element, in order. Semantics: `ops/fold/operator.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 1024, 4


@triton.jit
def _fold_rows_kernel(
    total_ptr, rows_ptr, size, rows, stride, cell, DTYPE: tl.constexpr, HAS_CELLS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.load(total_ptr + at, mask=inside, other=0.0)
    cell_total = tl.zeros([BLOCK], DTYPE)
    row_ptr = rows_ptr + at
    for row in range(rows):
        x = tl.load(row_ptr, mask=inside, other=0.0).to(DTYPE)
        row_ptr += stride
        if HAS_CELLS:
            cell_total += x
            if (row + 1) % cell == 0 or row == rows - 1:
                total += cell_total
                cell_total = tl.zeros([BLOCK], DTYPE)
        else:
            total += x
    tl.store(total_ptr + at, total, mask=inside)


def fold_rows(total: Tensor, rows_RN: Tensor, cell: int = 0) -> None:
    rows = rows_RN.view(-1, total.numel())
    assert total.is_contiguous() and rows.stride(1) == 1, "totals and rows have their elements side by side"
    dtype = tl.float64 if total.dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(total.numel(), BLOCK),)
    sizes = total.numel(), len(rows), rows.stride(0), max(cell, 1)
    _fold_rows_kernel[grid](total, rows, *sizes, DTYPE=dtype, HAS_CELLS=cell > 0, BLOCK=BLOCK, num_warps=NUM_WARPS)
