"""`sequence_sum` on a GPU: one program per sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


@triton.jit
def _sequence_sum_kernel(values_ptr, cu_ptr, out_ptr, BLOCK: tl.constexpr):
    """Each lane adds up every `BLOCK`-th token of the sequence, in order; then the lanes are added up."""
    start = tl.load(cu_ptr + tl.program_id(0))
    end = tl.load(cu_ptr + tl.program_id(0) + 1)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(start, end, BLOCK):
        row = first + lane
        total += tl.load(values_ptr + row, mask=row < end, other=0.0)
    whole = tl.zeros((BLOCK,), tl.float32) + tl.sum(total, axis=0)
    for first in range(start, end, BLOCK):
        row = first + lane
        tl.store(out_ptr + row, whole, mask=row < end)


def sequence_sum(values_C: Tensor, cu_completions: Tensor) -> Tensor:
    values_C = values_C.contiguous()
    out_C = torch.zeros_like(values_C)
    grid = (cu_completions.shape[0] - 1,)
    _sequence_sum_kernel[grid](values_C, cu_completions, out_C, BLOCK=BLOCK, num_warps=WARPS)
    return out_C
