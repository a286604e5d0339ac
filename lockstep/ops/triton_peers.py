"""How a kernel stores its result into the memory of other ranks, 32 bits of it with the launch's number in one 64-bit
word, which arrives whole. `distributed/push/triton` says why this is safe, and has the kernel that takes the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .records import PARITIES, SLOT

_PARITIES, _SLOT = tl.constexpr(PARITIES), tl.constexpr(SLOT)


@triton.jit
def store_pairs(low, high, at, inside, addresses_ptr, state_ptr, rank, RANKS: tl.constexpr):
    """Store pairs of 16-bit elements, two columns side by side, as words `at` of this rank's slots on all ranks, this
    one last. To be called once the kernels before this one have ended."""
    launch = tl.load(state_ptr, cache_modifier=".cg") + 1
    word = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    marked = (word.to(tl.int64) & 0xFFFFFFFF) | (launch << 32)
    at += launch % _PARITIES * (RANKS * _SLOT) + rank * _SLOT
    for i in tl.static_range(1, RANKS + 1):
        to_ptr = tl.load(addresses_ptr + (rank + i) % RANKS).to(tl.pointer_type(tl.int64))
        tl.store(tl.multiple_of(to_ptr, 16) + at, marked, mask=inside, cache_modifier=".wt")
