"""`fingerprints.fingerprint` on a GPU: one kernel that reads the words once and allocates nothing."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 8192, 8


@triton.jit(do_not_specialize=["size", "first"])
def _hash_kernel(words_ptr, total_ptr, size, first, GOLDEN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    word = tl.load(words_ptr + at, mask=inside, other=0).to(tl.int64)
    key = (first + at) * GOLDEN
    mixed = word * ((key ^ ((key >> 29) & 0x7FFFFFFFF)) | 1)
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * GOLDEN
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    tl.atomic_add(total_ptr, tl.sum(tl.where(inside, mixed, 0)), sem="relaxed")


def add_hash(total: Tensor, words: Tensor, first: int, golden: int) -> None:
    """Add the mixed words, contiguous integers numbered from `first`, to `total`, int64 and 0-dim."""
    grid = (triton.cdiv(words.numel(), BLOCK),)
    if grid[0]:
        _hash_kernel[grid](words, total, words.numel(), first, GOLDEN=golden, BLOCK=BLOCK, num_warps=NUM_WARPS)
