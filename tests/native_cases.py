"""Inputs and comparisons for the tests of the C operators."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops import Filters


def wide(*shape: int) -> Tensor:
    """Normal numbers over many binary orders, so that every change of order changes bits."""
    return torch.randn(shape) * torch.exp(2 * torch.randn(shape))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def sampling(rows: int) -> Filters:
    """Temperature, top-k, top-p and min-p, mixed, off in every fourth row."""
    on = torch.arange(rows) % 4 > 0
    temperature = torch.where(on, torch.rand(rows) + 0.5, 1.0)
    top_k = torch.where(torch.arange(rows) % 4 == 1, 20, 0).int()
    top_p = torch.where(torch.arange(rows) % 4 == 2, 0.9, 1.0)
    return Filters(temperature, top_k, top_p, torch.where(torch.arange(rows) % 4 == 3, 0.05, 0.0))
