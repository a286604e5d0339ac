"""The norm of gradients in flat buffers: the root of an exact sum.

Each block's squares are added in float32, which depends on the block alone; the blocks' sums, whole multiples of
2^-149, are added as integers, in a fixed-point accumulator as wide as float32's range (Kulisch 2008, "Computer
arithmetic and validity"). These additions have no order, so neither has the norm: whoever holds which blocks, and
whatever adds them, finds the same word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operator import operator

BLOCK = 1024  # elements whose squares are added first
WORDS = 16  # of an exact sum
LIMBS = 9  # of 32 bits, that a float32 reaches from 2^-149 on; one more takes what is carried
NOT_FINITE = 15  # the word that counts infinities, and NaN 2^32-fold


@operator(cuda="triton:square_sums", fake=lambda x: x.new_empty(-(-x.numel() // BLOCK)))
def square_sums(x: Tensor) -> Tensor:
    """The sum of the squares of each `BLOCK` elements of a flat float32 tensor, float32 [ceil(size / BLOCK)]; the last
    ones are fewer perhaps.

    The bits of a block's sum depend on its elements alone, so a tensor may be cut between blocks. Few elements are
    added at once: over 10^8 of them, torch's norm is off by a percent on a CPU.
    """
    padded = x if x.numel() % BLOCK == 0 else torch.nn.functional.pad(x, (0, -x.numel() % BLOCK))
    return torch.linalg.vector_norm(padded.view(-1, BLOCK // 64, 64), dim=2).square().sum(1)


@operator(cuda="triton:exact_sum", fake=lambda x: x.new_empty(WORDS, dtype=torch.int64))
def exact_sum(x: Tensor) -> Tensor:
    """The exact sum of float32 numbers that are not negative, fewer than 2^31, in words, int64 [`WORDS`].

    Word k of the first `LIMBS` counts 2^(32 k - 149); what is not finite is counted in word `NOT_FINITE`; the others
    are 0. Words of several sums are added word by word.
    """
    bits = x.view(torch.int32) & 0x7FFFFFFF
    exponent, fraction = bits >> 23, bits & 0x7FFFFF
    finite, shift = exponent < 255, (exponent - 1).clamp(min=0)
    mantissa = torch.where(exponent > 0, fraction | 1 << 23, fraction).long()
    spread = torch.where(finite, mantissa << shift % 32, 0)
    limb = torch.where(finite, shift // 32, 0).long()
    words = torch.zeros(WORDS, dtype=torch.int64, device=x.device)
    words.index_add_(0, limb, spread & 0xFFFFFFFF).index_add_(0, limb + 1, spread >> 32)
    words[NOT_FINITE] = torch.where(finite, 0, torch.where(fraction == 0, 1, 1 << 32)).sum()
    return words


@operator(cuda="triton:root_of_sum", fake=lambda words: words.new_empty((), dtype=torch.float32))
def root_of_sum(words: Tensor) -> Tensor:
    """The square root of an `exact_sum`, float32, 0-dim: the sum is rounded to float64, its root too, and then to
    float32. Not finite where any of the numbers was not: NaN where one was, else infinite."""
    *limbs, not_finite = words.tolist()
    if not_finite:
        return torch.tensor(math.nan if not_finite >> 32 else math.inf)
    total = sum(limb << 32 * i for i, limb in enumerate(limbs))
    return torch.tensor(math.sqrt(total / 2**149), dtype=torch.float32)  # whole numbers' quotient is rounded once
