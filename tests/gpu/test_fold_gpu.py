"""Ordered additions: the kernel's words are the reference's on a CPU, whatever the rows' dtype, size and cells."""

from __future__ import annotations

import pytest
import torch

from lockstep import ops

SIZES = (1, 7, 1024, 1025, 300_001)


@pytest.mark.parametrize(("dtype", "total"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)])
@pytest.mark.parametrize(("rows", "cell"), [(1, 0), (8, 0), (16, 8), (5, 2), (3, 8)])
def test_rows_are_added_in_their_order(census, dtype: torch.dtype, total: torch.dtype, rows: int, cell: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    for size in SIZES:
        wide = torch.randn(rows, 2 * size, generator=draw) * torch.randn(rows, 2 * size, generator=draw).exp()
        added = wide.to(dtype)[:, size:]  # as parts of a larger exchange lie
        expected = torch.randn(size, generator=draw).to(total)
        found = expected.cuda()
        ops.fold_rows(found, added.cuda()[:, :], cell)
        ops.fold_rows(expected, added, cell)
        assert census("rows added to a total = reference", found.cpu(), expected) == 0
        apart = wide.to(dtype).cuda()[:, size:]
        assert census("sum of rows = reference", ops.sum_rows(apart).cpu(), ops.sum_rows(added)) == 0


def test_statistics_are_added_in_float64(census) -> None:
    rows = torch.randn(4, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(40, dtype=torch.float64)
    found = expected.cuda()
    ops.fold_rows(found, rows.cuda())
    ops.fold_rows(expected, rows)
    assert census("statistics = reference", found.cpu(), expected) == 0
