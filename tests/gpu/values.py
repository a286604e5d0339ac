"""Values for the tests of kernels, and how far results are from exact ones."""

import torch
from torch import Tensor


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def wide(*shape: int) -> Tensor:
    """N(0, 1) * exp(2 N(0, 1)), so that a change in the order of additions shows."""
    x = torch.randn(shape, device="cuda")
    return (x * torch.exp(2 * torch.randn_like(x))).bfloat16()


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())
