"""Sums over several ranks' or shards' rows, in a specified order."""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import SAME, operator


@operator(mutates=("total",), cuda="triton:fold_rows")
def fold_rows(total: Tensor, rows_RN: Tensor, cell: int = 0) -> None:
    """Add rows to a total, row by row, in the total's precision.

    Args:
        total: float32 or float64, of N elements. rows_RN: of any float dtype.
        cell: rows per cell; the last cell may have fewer. Each cell's rows are summed from 0, and the cells are added
            to the total one by one. 0: every row is added to the total directly.
    """
    rows = rows_RN.view(-1, *total.shape)
    if not cell:
        for row in rows:
            total.add_(row)
        return
    for own in rows.split(cell):
        cell_total = total.new_zeros(total.shape)
        for row in own:
            cell_total.add_(row)
        total.add_(cell_total)


@operator(cuda=SAME, fake=lambda rows_RN: rows_RN.new_empty(rows_RN.shape[1:], dtype=torch.float32))
def sum_rows(rows_RN: Tensor) -> Tensor:
    """The sum of rows, float32 [N], row by row from 0, like a cell's in `fold_rows`."""
    total_N = rows_RN.new_zeros(rows_RN.shape[1:], dtype=torch.float32)
    fold_rows(total_N, rows_RN)
    return total_N
