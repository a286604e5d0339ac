"""The norm of gradients in flat buffers: the root of an exact sum.

Each block's squares are added in float32, which depends on the block alone; the blocks' sums, whole multiples of
2^-149, are added as integers, in a fixed-point accumulator as wide as float32's range (Kulisch 2008, "Computer
arithmetic and validity"). Integer additions give the same result in any order, so the norm does not depend on which
rank holds which blocks, or on who adds them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..operator import operator

BLOCK = 1024  # elements whose squares are added first
WORDS = 16  # int64 words of an exact sum
LIMBS = 9  # of 32 bits each, from 2^-149 on, which cover float32's range; carries reach one more
NOT_FINITE = 15  # the word that counts infinities, and 2^32 for each NaN


@operator(cuda="triton:square_sums", fake=lambda x: x.new_empty(-(-x.numel() // BLOCK)))
def square_sums(x: Tensor) -> Tensor:
    """The sum of squares of each block of `BLOCK` elements of a flat float32 tensor, float32 [ceil(size / BLOCK)]; the
    last block may be shorter.

    The bits of a block's sum depend on its elements alone, so a tensor may be cut between blocks. Blocks are small
    since torch's norm of more than 10^8 elements is off by a percent on a CPU.
    """
    padded = x if x.numel() % BLOCK == 0 else torch.nn.functional.pad(x, (0, -x.numel() % BLOCK))
    return torch.linalg.vector_norm(padded.view(-1, BLOCK // 64, 64), dim=2).square().sum(1)


@operator(cuda="triton:exact_sum", fake=lambda x: x.new_empty(WORDS, dtype=torch.int64))
def exact_sum(x: Tensor) -> Tensor:
    """The exact sum of fewer than 2^31 non-negative float32 numbers, as int64 [`WORDS`].

    Word k of the first `LIMBS` counts units of 2^(32 k - 149); word `NOT_FINITE` counts numbers that are not finite;
    the others are 0. Several sums are added word by word.
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
    """The square root of an `exact_sum`, float32, 0-dim: the sum is rounded to float64, its root to float64 and then to
    float32. NaN if any of the numbers was NaN, else infinite if any was infinite."""
    *limbs, not_finite = words.tolist()
    if not_finite:
        return torch.tensor(math.nan if not_finite >> 32 else math.inf)
    total = sum(limb << 32 * i for i, limb in enumerate(limbs))
    return torch.tensor(math.sqrt(total / 2**149), dtype=torch.float32)  # Python rounds the integers' quotient once
