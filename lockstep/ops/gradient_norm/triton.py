"""Sums of squares, and the root of their exact sum. Semantics: `ops/gradient_norm/operator.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operator import BLOCK as SQUARES
from .operator import LIMBS, NOT_FINITE, WORDS

ROWS = 8  # blocks of squares that a program adds up
NUM_WARPS = 8
SUM_BLOCK, SUM_WARPS = 256, 4
SUM_PROGRAMS = 264  # two per multiprocessor of an H200; the sum of integers is the same for any number of programs


@triton.jit
def _square_sums_kernel(x_ptr, out_ptr, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(out_ptr + row, tl.sum(x * x, axis=1), mask=row * WIDTH < size)


def square_sums(x: Tensor) -> Tensor:
    blocks = triton.cdiv(x.numel(), SQUARES)
    sums = torch.empty(blocks, dtype=torch.float32, device=x.device)
    _square_sums_kernel[(triton.cdiv(blocks, ROWS),)](x, sums, x.numel(), ROWS=ROWS, WIDTH=SQUARES, num_warps=NUM_WARPS)
    return sums


@triton.jit
def _exact_sum_kernel(x_ptr, words_ptr, size, WORDS: tl.constexpr, NOT_FINITE: tl.constexpr, BLOCK: tl.constexpr):
    word = tl.arange(0, WORDS)[:, None]
    total = tl.zeros([WORDS, BLOCK], tl.int64)
    for begin in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        bits = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        exponent, fraction = bits >> 23, bits & 0x7FFFFF
        shift = tl.maximum(exponent - 1, 0)
        mantissa = tl.where(exponent > 0, fraction | 0x800000, fraction).to(tl.int64)
        spread = tl.where(exponent < 255, mantissa << (shift % 32).to(tl.int64), 0)
        limb = (shift // 32)[None, :]
        total += tl.where(word == limb, (spread & 0xFFFFFFFF)[None, :], 0)
        total += tl.where(word == limb + 1, (spread >> 32)[None, :], 0)
        unit = tl.where(fraction == 0, 1, 1 << 32).to(tl.int64)
        total += tl.where(word == NOT_FINITE, tl.where(exponent < 255, 0, unit)[None, :], 0)
    sums = tl.sum(total, axis=1)
    tl.atomic_add(words_ptr + tl.arange(0, WORDS), sums, mask=sums != 0)


def exact_sum(x: Tensor) -> Tensor:
    words = torch.zeros(WORDS, dtype=torch.int64, device=x.device)
    programs = min(SUM_PROGRAMS, triton.cdiv(x.numel(), SUM_BLOCK))
    constants = {"WORDS": WORDS, "NOT_FINITE": NOT_FINITE, "BLOCK": SUM_BLOCK}
    _exact_sum_kernel[(programs,)](x, words, x.numel(), **constants, num_warps=SUM_WARPS)
    return words


@triton.jit
def _root_of_sum_kernel(words_ptr, root_ptr, LIMBS: tl.constexpr, NOT_FINITE: tl.constexpr):
    """One program: propagates carries, then rounds once the highest three limbs from the first that is not zero, with a
    sticky bit for those below."""
    zero = tl.load(words_ptr) * 0
    carry, before, second_before, below = zero, zero, zero, zero
    first, second, third, scale = zero, zero, zero, zero
    for k in tl.static_range(LIMBS + 1):
        limb = tl.load(words_ptr + k) + carry
        digit, carry = limb & 0xFFFFFFFF, limb >> 32
        highest = digit != 0
        first = tl.where(highest, digit, first)
        second = tl.where(highest, before, second)
        third = tl.where(highest, second_before | (below != 0).to(tl.int64), third)
        scale = tl.where(highest, zero + (32 * (k - 2) - 149), scale)
        below |= second_before
        second_before, before = before, digit
    high = first.to(tl.float64) * 18446744073709551616.0  # 2^64
    middle = second.to(tl.float64) * 4294967296.0
    total = high + middle
    lost = middle - (total - high)  # exact (Dekker 1971), and so is its sum with the third limb, below 2^32
    total += lost + third.to(tl.float64)
    total *= ((scale + 1023) << 52).to(tl.float64, bitcast=True)
    root = tl.sqrt(total).to(tl.float32)
    not_finite = tl.load(words_ptr + NOT_FINITE)
    bad = tl.where((not_finite >> 32) != 0, float("nan"), float("inf"))
    tl.store(root_ptr, tl.where(not_finite == 0, root, bad))


def root_of_sum(words: Tensor) -> Tensor:
    root = torch.empty((), dtype=torch.float32, device=words.device)
    _root_of_sum_kernel[(1,)](words, root, LIMBS=LIMBS, NOT_FINITE=NOT_FINITE, num_warps=1)
    return root
