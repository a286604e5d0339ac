"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), counter-based random numbers.

The same code serves Python integers and int64 tensors that hold 32-bit words.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10

Word = TypeVar("Word", int, Tensor)


def philox(c0: Word, c1: Word, c2: Word, c3: Word, k0: Word, k1: Word) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words from a 128-bit counter and a 64-bit key; tensors broadcast."""
    for _ in range(ROUNDS):
        low, high = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1  # int64 wraps; only the 64 bits matter
        c0, c1, c2, c3 = ((high >> 32) ^ c1 ^ k0) & MASK, high & MASK, ((low >> 32) ^ c3 ^ k1) & MASK, low & MASK
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def sample_key(seed: int, domain: int, step: int, group: int, sample: int) -> tuple[int, int, int, int]:
    """The 128-bit identity of one sample; all its random numbers are functions of it and a position."""
    return philox(domain & MASK, step & MASK, group & MASK, sample & MASK, seed & MASK, (seed >> 32) & MASK)


def gumbel(key_S4: Tensor, position_S: Tensor, columns: int) -> Tensor:
    """Standard Gumbel noise, float32 [S, columns], a function of (key, position, column) alone.

    It is `-log(e)` of an exponential `e = -log1p(-v)`: float32 is dense near v = 0, where the largest noise comes from.
    """
    k0, k1, c2, c3 = key_S4.unsqueeze(2).unbind(1)
    quads = (columns + 3) // 4
    words = philox(position_S.unsqueeze(1), torch.arange(quads), c2, c3, k0, k1)
    bits = torch.stack(words, dim=2).flatten(1)[:, :columns]
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
