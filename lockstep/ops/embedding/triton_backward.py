"""Backward of `embedding.operator.gather_rows`: gradients of one table row are added in float32, in an order that
depends on the rows alone.

It is a segmented sum: gradients are sorted by row, and a program adds up runs of equal rows among a few of them. A run
that extends beyond a program leaves partial sums (pieces), which a second kernel adds up. A row's sum is rounded once
and then added to the output.

Shape suffixes: T rows, D model dim, R table rows, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import unit_inner

ROWS, BLOCK = 16, 256  # sorted gradients per program; elements of each
PIECES = 8  # pieces of a table row that are added at a time


@triton.jit
def _round_and_add(ptr, total, mask):
    """Round float32 sums to the output's dtype and add them to it."""
    rounded = total.to(ptr.dtype.element_ty).to(tl.float32)
    there = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr, (there + rounded).to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gather_pieces_kernel(
    grad_ptr,
    sorted_ptr,  # [T], table rows in ascending order
    token_ptr,  # [T], the row of grad_ptr that each comes from
    out_ptr,  # [R, D], added to
    piece_ptr,  # [P, 2, D], float32
    tokens,
    width,
    grad_stride,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up runs of equal rows among `ROWS` of them. A run that continues from the previous program stores its sum as
    the first piece; one that begins here and continues in the next, as the second."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    piece = piece_ptr + program.to(tl.int64) * (2 * width) + column
    total = tl.zeros((BLOCK,), tl.float32)
    first = program * ROWS
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    began_here = tl.load(sorted_ptr + first) != before
    for i in tl.static_range(ROWS):
        place = first + i
        row = tl.load(sorted_ptr + place, mask=place < tokens, other=-1)
        token = tl.load(token_ptr + place, mask=place < tokens, other=0)
        limit = tl.where(place < tokens, width, 0)
        total += tl.load(grad_ptr + token * grad_stride + column, mask=column < limit, other=0.0).to(tl.float32)
        ends = row != tl.load(sorted_ptr + place + 1, mask=place + 1 < tokens, other=-1)
        whole = tl.where(ends, tl.where(began_here, limit, 0), 0)
        part = tl.where(ends, tl.where(began_here, 0, limit), 0)
        out = out_ptr + row.to(tl.int64) * width + column
        _round_and_add(out, total, column < whole)
        tl.store(piece, total, mask=column < part)
        total = tl.where(ends, 0.0, total)
        began_here = began_here | ends
    goes_on = tl.load(sorted_ptr + first + ROWS, mask=first + ROWS < tokens, other=-1) == row
    limit = tl.where(goes_on, tl.where(first + ROWS < tokens, width, 0), 0)
    tl.store(piece, total, mask=column < tl.where(began_here, 0, limit))
    tl.store(piece + width, total, mask=column < tl.where(began_here, limit, 0))


@triton.jit
def _gather_whole_kernel(
    sorted_ptr, piece_ptr, out_ptr, tokens, width, ROWS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr
):
    """A program whose second piece begins a run adds the pieces that continue it; the others do nothing."""
    program = tl.program_id(0).to(tl.int64)
    first, following = program * ROWS, (program + 1) * ROWS
    row = tl.load(sorted_ptr + following - 1, mask=following < tokens, other=-1)
    if row < 0:
        return
    if tl.load(sorted_ptr + following) != row:
        return
    if tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1) == row:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.load(piece_ptr + (program * 2 + 1) * width + column, mask=inside, other=0.0)
    start, count = program + 1, tl.full((), PIECES, tl.int32)
    while count == PIECES:  # the run may continue
        p = start + tl.arange(0, PIECES)
        same = tl.load(sorted_ptr + p * ROWS, mask=p * ROWS < tokens, other=-1) == row
        offset = (p * 2 * width)[:, None] + column[None, :]
        total += tl.sum(tl.load(piece_ptr + offset, mask=same[:, None] & inside[None, :], other=0.0), axis=0)
        count = tl.sum(same.to(tl.int32), axis=0)
        start += PIECES
    _round_and_add(out_ptr + row.to(tl.int64) * width + column, total, inside)


def gather_rows(grad_TD: Tensor, rows_T: Tensor, table_rows: int) -> Tensor:
    out_RD = torch.zeros((table_rows, grad_TD.shape[1]), dtype=grad_TD.dtype, device=grad_TD.device)
    add_gathered_rows(out_RD, grad_TD, rows_T)
    return out_RD


def add_gathered_rows(total_RD: Tensor, grad_TD: Tensor, rows_T: Tensor) -> None:
    grad_TD = unit_inner(grad_TD)
    tokens, width = grad_TD.shape
    if tokens == 0:
        return
    sorted_T, token_T = torch.sort(rows_T.int(), stable=True)
    programs = triton.cdiv(tokens, ROWS)
    piece = torch.empty((programs, 2, width), dtype=torch.float32, device=grad_TD.device)
    grid, sizes = (programs, triton.cdiv(width, BLOCK)), {"ROWS": ROWS, "BLOCK": BLOCK}
    _gather_pieces_kernel[grid](
        grad_TD, sorted_T, token_T, total_RD, piece, tokens, width, grad_TD.stride(0), **sizes, num_warps=1
    )
    _gather_whole_kernel[grid](sorted_T, piece, total_RD, tokens, width, PIECES=PIECES, **sizes, num_warps=1)
