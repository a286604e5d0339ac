"""What kernels share: strides, and the alignment and the warps on which a row's bits depend.

A program does one row (one token), so the order of a row's sum is a function of its width.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

ALIGNMENT = 16  # Triton compiles a kernel anew for pointers and strides that are multiples of this


def unit_inner(x: Tensor) -> Tensor:
    """`x` with unit inner stride, copied if need be."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_rows(x: Tensor) -> Tensor:
    """`x` ([rows, width] or [width]) with unit inner stride and an alignment that its width decides, copied if need be.

    Triton vectorizes loads, and so lays out the reduction after them, by the alignment that it sees.
    """
    width, stride = x.shape[-1], x.stride(0) if x.dim() == 2 else x.shape[-1]
    regular = stride == width or (stride > width and stride % ALIGNMENT == 0 and width % ALIGNMENT == 0)
    in_place = x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 and regular
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def _warps(elements: int, per_thread: int) -> int:
    """Warps for a tile of so many elements."""
    return min(max(triton.next_power_of_2(elements) // (32 * per_thread), 1), 16)
