"""The support of filtered sampling: the smallest tempered logit that top-k, top-p and min-p keep, without a sort.

Logits map to ordered 32-bit keys. Top-k's threshold is the largest key with at least k keys at or above it; top-p's is
the largest one with at least p of the mass at or above it, so that the mass of the strictly larger ones is below p.
Both are found `DIGIT_BITS` bits a pass, from sums over the keys at or above each candidate. The sums have a fixed order
and no negative terms, so they are monotone in the key and the search is exact with regard to them.

Shape suffixes: C rows, V vocabulary, B blocks of a row, L logits of a block, J values of a digit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 8192
NUM_WARPS = 8
KEY_BITS = tl.constexpr(32)
DIGIT_BITS = tl.constexpr(4)
DIGITS = tl.constexpr(16)
NEGATIVE_INFINITY_KEY = tl.constexpr(0x007FFFFF)


class Blocks(NamedTuple):
    """How a row is cut: logits a block (a power of two), blocks, and those rounded up to a power of two. A function
    of the vocabulary alone, since the order of a row's sums follows it."""

    size: int
    count: int
    padded_count: int


def blocks_of(vocabulary: int) -> Blocks:
    """The cut of a row of so many logits."""
    size = min(triton.next_power_of_2(vocabulary), MAX_BLOCK)
    count = triton.cdiv(vocabulary, size)
    return Blocks(size, count, triton.next_power_of_2(count))


@triton.jit
def tempered(logit, temperature):
    """What the sampler sees: logits over the temperature, as they are where it is 0. IEEE division, as torch's is."""
    return tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def ordered_key(z):
    """Float32 to uint32 in the same order, but for -0 below 0: as thresholds they keep the same logits."""
    bits = z.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def from_key(key):
    """The inverse of `ordered_key`; -inf for keys below its own, which the search ends on when it must keep all."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, ~key)
    return tl.where(key > NEGATIVE_INFINITY_KEY, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def _target(row, amount_ptr, mass_ptr, vocabulary, BY_MASS: tl.constexpr):
    """What the kept keys' count or mass must reach; 0 when the filter is off."""
    amount = tl.load(amount_ptr + row)
    if BY_MASS:
        return tl.where(amount < 1.0, amount * tl.load(mass_ptr + row), 0.0)
    else:
        return tl.minimum(amount, vocabulary).to(tl.float32)


@triton.jit
def _digit(row, totals_ptr, target, blocks, BLOCKS: tl.constexpr):
    """The largest candidate that reaches the target."""
    b, j = tl.arange(0, BLOCKS), tl.arange(0, DIGITS)
    offset_BJ = (row * blocks + b)[:, None] * DIGITS + j[None, :]
    total_J = tl.sum(tl.load(totals_ptr + offset_BJ, mask=(b < blocks)[:, None], other=0.0), axis=0)
    return tl.sum(((total_J >= target) & (j > 0)).to(tl.int32), axis=0).to(tl.uint32)


@triton.jit(do_not_specialize=["shift"])
def _search_kernel(
    logits_ptr,
    temperature_ptr,
    amount_ptr,
    maximum_ptr,
    mass_ptr,
    prefix_ptr,  # [C], the key's settled digits, uint32 bits
    totals_ptr,  # [C, B, J], sums over the keys at or above each candidate for the next digit
    next_prefix_ptr,
    next_totals_ptr,
    vocabulary,
    shift,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One pass: settle the digit that the last pass summed for, then sum for the digit at `shift`."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    target = _target(row, amount_ptr, mass_ptr, vocabulary, BY_MASS)
    if target <= 0:
        return
    candidate = tl.full((), 0, tl.uint32)
    if shift + DIGIT_BITS < KEY_BITS:
        digit = _digit(row, totals_ptr, target, blocks, BLOCKS)
        candidate = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True) | (digit << (shift + DIGIT_BITS))
    if block == 0:
        tl.store(next_prefix_ptr + row, candidate.to(tl.int32, bitcast=True))

    column_L = block * BLOCK + tl.arange(0, BLOCK)
    inside_L = column_L < vocabulary
    x_L = tl.load(logits_ptr + row * vocabulary + column_L, mask=inside_L, other=float("-inf"))
    z_L = tempered(x_L, tl.load(temperature_ptr + row))
    key_L = ordered_key(z_L)
    weight_L = tl.exp(z_L - tl.load(maximum_ptr + row)) if BY_MASS else inside_L.to(tl.float32)
    j = tl.arange(0, DIGITS)
    totals_J = tl.zeros((DIGITS,), tl.float32)
    step = tl.full((), 1, tl.uint32) << shift
    for i in tl.static_range(1, DIGITS):
        candidate += step
        total = tl.sum(tl.where(key_L >= candidate, weight_L, 0.0), axis=0)
        totals_J = tl.where(j == i, total, totals_J)
    tl.store(next_totals_ptr + (row * blocks + block) * DIGITS + j, totals_J)


@triton.jit
def _threshold_kernel(
    amount_ptr,
    maximum_ptr,
    mass_ptr,
    min_p_ptr,
    top_k_threshold_ptr,
    prefix_ptr,
    totals_ptr,
    out_ptr,
    vocabulary,
    blocks,
    BY_MASS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Top-k's threshold, or (BY_MASS) the largest of top-k's, top-p's and min-p's."""
    row = tl.program_id(0).to(tl.int64)
    target = _target(row, amount_ptr, mass_ptr, vocabulary, BY_MASS)
    threshold = tl.full((), float("-inf"), tl.float32)
    if target > 0:
        digit = _digit(row, totals_ptr, target, blocks, BLOCKS)
        threshold = from_key(tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True) | digit)
    if BY_MASS:
        maximum, min_p = tl.load(maximum_ptr + row), tl.load(min_p_ptr + row)
        min_p_threshold = tl.where(min_p > 0, maximum + tl.log(min_p), float("-inf"))
        threshold = tl.maximum(tl.maximum(threshold, tl.load(top_k_threshold_ptr + row)), min_p_threshold)
        threshold = tl.minimum(threshold, maximum)  # the largest logit is always kept
    tl.store(out_ptr + row, threshold)


class Mass(NamedTuple):
    """What top-p and min-p need, float32 [C] each: the largest tempered logit, the sum of exp(z - maximum) over what
    top-k kept, min-p, and top-k's threshold."""

    maximum_C: Tensor
    sum_C: Tensor
    min_p_C: Tensor
    top_k_threshold_C: Tensor


def search(logits_CV: Tensor, temperature_C: Tensor, amount_C: Tensor, mass: Mass | None) -> Tensor:
    """Thresholds, float32 [C]: top-k's for `amount_C` = k (int32) without `mass`, all filters' for `amount_C` = p."""
    rows, vocabulary = logits_CV.shape
    cut, device = blocks_of(vocabulary), logits_CV.device
    maximum_C, sum_C, min_p_C, top_k_threshold_C = mass or (temperature_C,) * 4  # read if BY_MASS
    prefixes = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2)]
    shape = (rows, cut.count, DIGITS.value)
    totals = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)]
    for shift in range(KEY_BITS.value - DIGIT_BITS.value, -1, -DIGIT_BITS.value):
        _search_kernel[(rows, cut.count)](
            logits_CV,
            temperature_C,
            amount_C,
            maximum_C,
            sum_C,
            prefixes[0],
            totals[0],
            prefixes[1],
            totals[1],
            vocabulary,
            shift,
            BY_MASS=mass is not None,
            BLOCK=cut.size,
            BLOCKS=cut.padded_count,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        prefixes.reverse()
        totals.reverse()
    threshold_C = torch.empty(rows, dtype=torch.float32, device=device)
    _threshold_kernel[(rows,)](
        amount_C,
        maximum_C,
        sum_C,
        min_p_C,
        top_k_threshold_C,
        prefixes[0],
        totals[0],
        threshold_C,
        vocabulary,
        cut.count,
        BY_MASS=mass is not None,
        BLOCKS=cut.padded_count,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return threshold_C
