"""Ordered additions: the reference against loops over numbers, the kernel against the reference."""

from __future__ import annotations

import os

import pytest
import torch
from processes import run_interpreted
from torch import Tensor

from lockstep import ops

if os.environ.get("TRITON_INTERPRET") == "1":
    from lockstep.ops.fold import triton as kernels

CASES = [(1, 0), (4, 0), (8, 4), (8, 1), (5, 2), (3, 3), (3, 8)]  # rows, and of a cell


def numbers(rows: int, dtype: torch.dtype, size: int = 2500) -> tuple[Tensor, Tensor]:
    """A total, and rows that lie apart, as parts of a larger exchange do."""
    generator = torch.Generator().manual_seed(rows)
    total = torch.randn(size, generator=generator).to(torch.float64 if dtype == torch.float64 else torch.float32)
    wide = (
        torch.randn(rows, 3 * size, generator=generator) * torch.exp2(torch.arange(-9.0, 9.0)).repeat(10**4)[: 3 * size]
    )
    return total, wide.to(dtype)[:, size : 2 * size]


def test_kernel_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize(("rows", "cell"), CASES)
def test_cells_are_added_up_from_zero_and_then_to_the_total(rows: int, cell: int) -> None:
    total, added = numbers(rows, torch.float32)
    expected = total.clone()
    for begin in range(0, rows, cell or 1):
        own = added[begin : begin + (cell or 1)]
        sums = torch.zeros_like(total)
        for row in own:
            sums = sums + row
        expected = expected + (sums if cell else own[0])
    ops.fold_rows(total, added, cell)
    assert torch.equal(total, expected)
    sums = torch.stack([ops.sum_rows(of_cell.bfloat16()) for of_cell in added.split(max(cell, 1))])
    again, total = numbers(rows, torch.float32)[0], numbers(rows, torch.float32)[0]
    ops.fold_rows(total, added.bfloat16(), max(cell, 1))
    ops.fold_rows(again, sums)  # as where cells are added up apart
    assert torch.equal(again, total)


def test_the_order_is_seen() -> None:
    found = []
    for rows, cell in ((slice(None), 0), (slice(None), 4), (slice(None), 2), ([4, 5, 6, 7, 0, 1, 2, 3], 4)):
        total, added = numbers(8, torch.float32)
        ops.fold_rows(total, added[rows], cell)
        found.append(total)
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


class Interpreted:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize(("rows", "cell"), CASES)
    def test_equals_the_reference(self, rows: int, cell: int, dtype: torch.dtype) -> None:
        (total, added), (expected, _) = numbers(rows, dtype), numbers(rows, dtype)
        kernels.fold_rows(total, added, cell)
        ops.fold_rows(expected, added, cell)
        assert torch.equal(total, expected)
