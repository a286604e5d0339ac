"""Shared by kernels: constants, strides, the alignment and number of warps on which a row's bits depend, and the fold
of the backward's partial weight gradients.

A program computes one row (one token), so the order of a row's sum is a function of its width. A program of the
backward handles several tokens one after another and writes its weight gradient to a row of its own; the number of
those rows alone fixes the order in which they are added. Nothing in the backward is under the forward's contract.

Shape suffixes: D model dim, P programs.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SUM_ROWS, SUM_BLOCK, SUM_WARPS = 512, 8, 8
LOG2_E, LN_2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
ALIGNMENT = 16  # Triton specializes kernels on whether pointers and strides are multiples of this


def unit_inner(x: Tensor) -> Tensor:
    """`x` with unit inner stride, copied if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_rows(x: Tensor) -> Tensor:
    """`x` ([rows, width] or [width]) with unit inner stride and an alignment that depends only on its width, copied if
    necessary: the alignment decides how Triton vectorizes loads, and with that the layout of the reduction after them.
    """
    width, stride = x.shape[-1], x.stride(0) if x.dim() == 2 else x.shape[-1]
    regular = stride == width or (stride > width and stride % ALIGNMENT == 0 and width % ALIGNMENT == 0)
    in_place = x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 and regular
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def num_warps(elements: int, per_thread: int) -> int:
    return min(max(triton.next_power_of_2(elements) // (32 * per_thread), 1), 16)


@triton.jit
def load_halves(ptr, mask, HALF: tl.constexpr):
    """Both halves of rows as float32, zero where masked."""
    first = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_halves(ptr, first, second, mask, HALF: tl.constexpr):
    tl.store(ptr, first.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + HALF, second.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def split_eight(x):
    """The eight slices of [..., 2, 2, 2], ordered by their index read as a binary number."""
    even, odd = tl.split(x)
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _sum_partials_kernel(partial_ptr, out_ptr, programs, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)
        mask = (program < programs)[:, None] & (column < width)[None, :]
        row_ptr = partial_ptr + program.to(tl.int64) * stride  # may exceed int32
        total += tl.load(row_ptr[:, None] + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < width)


def sum_partials(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over programs, [D] in `dtype`."""
    programs, width = partial_PD.shape
    out_D = torch.empty(width, dtype=dtype, device=partial_PD.device)
    _sum_partials_kernel[(triton.cdiv(width, SUM_BLOCK),)](
        partial_PD, out_D, programs, width, partial_PD.stride(0), ROWS=SUM_ROWS, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS
    )
    return out_D
