"""Numbers whose exact sums are hard to round, for `test_exact_sum` and for its kernels under the interpreter."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor


def numbers(count: int, kind: str, seed: int) -> Tensor:
    """Float32 numbers that are not negative: of a few magnitudes, of all, any bits that are finite, or subnormal."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.randn(count, generator=generator).square()
    if kind == "bits":
        return torch.randint(0, 0x7F800000, (count,), generator=generator, dtype=torch.int32).view(torch.float32)
    powers = torch.randint(-140, 100, (count,), generator=generator).float()
    return {"near": near, "wide": near * torch.exp2(powers), "subnormal": near * 1e-41}[kind]


def exact(x: Tensor) -> Fraction:
    """The sum of numbers, without an error."""
    return sum(map(Fraction, x.tolist()), Fraction())


def of_words(words: Tensor) -> Fraction:
    """What words say."""
    return Fraction(sum(limb << 32 * i for i, limb in enumerate(words[:15].tolist())), 2**149)


def rounded_root(value: Fraction) -> float:
    """The root in float32, by way of float64."""
    return torch.tensor(math.sqrt(value), dtype=torch.float32).item()


def odd_words() -> Tensor:
    """Sums near which roundings change, limbs that carry on, and sparse ones; int64 [300, 16]."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.tensor([0, 0, 0, 1, 2**32 - 1, 2**31, 2**31 - 1, 2**60 - 1])
    words = torch.zeros(300, 16, dtype=torch.int64)
    words[:, :9] = edges[torch.randint(len(edges), (300, 9), generator=generator)]
    words[::2, :9] += torch.randint(2**32, (150, 9), generator=generator) * torch.randint(
        2, (150, 9), generator=generator
    )
    return words
