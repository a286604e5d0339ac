"""Inputs that reveal a change in the order of additions, and the comparison of bits."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24  # elements drawn, and compared, at once, to bound memory


def wide_normal(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """N(0, 1) * exp(2 N(0, 1)): exponents wide enough for a change in the order of additions to show."""
    out = torch.empty(shape, device=device, dtype=dtype)
    for part in out.view(-1).split(CHUNK_ELEMENTS):
        part.copy_(torch.randn(part.shape, device=device) * torch.exp(2 * torch.randn(part.shape, device=device)))
    return out


def standardize(x: Tensor) -> Tensor:
    """`x` with a standard deviation of about 1, in place."""
    return x.div_(x.std())


def make_products_cancel(x_RK: Tensor, weight_NK: Tensor) -> None:
    """Make every second row's products with the weight cancel, in randomly drawn pairs of elements, in place.

    Only the rounding errors of the sums remain, and rounding these to bfloat16 keeps their leading digits. Otherwise a
    float32 sum in another order would usually round to the same bfloat16 number.
    """
    first, second, rest = random_pairs(x_RK.shape[-1])
    weight_NK[..., second] = weight_NK[..., first]
    x_RK[::2, ..., second] = -x_RK[::2, ..., first]
    x_RK[::2, ..., rest] = 0


def random_pairs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random pairs among `count` elements, and the element that is left over, if any."""
    order, half = torch.randperm(count), count // 2
    return order[:half], order[half : 2 * half], order[2 * half :]


def same_bits(a: Tensor, b: Tensor) -> bool:
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    parts = (x.contiguous().view(words).view(-1).split(CHUNK_ELEMENTS) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and all(map(torch.equal, *parts))
