"""Row statistics of logits, the support of filtered sampling, and the draw. Meaning: `logprobs_reference.py`.

A row is cut into fixed blocks, a program each; a second kernel folds a row's partial results in one fixed order. Block
and layout are functions of the vocabulary alone, and the same compiled kernels serve scoring and sampling.

The support's threshold is found without a sort: logits map to ordered 32-bit keys, and the largest key for which the
count (top-k) or mass (top-p) of the keys at or above it reaches its target is found `DIGIT_BITS` bits at a pass. Sums
are taken in a fixed order over non-negative terms, so they are monotone in the key and the search is exact for them.

Shape suffixes: C rows, V vocabulary, B blocks of a row (`support_CB`: bytes), L logits of a block, Q groups of four of
them, J digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rows import aligned_rows

MAX_BLOCK = 8192
NUM_WARPS = 8
KEY_BITS = 32
DIGIT_BITS = 4
DIGITS = tl.constexpr(1 << DIGIT_BITS)
NEGATIVE_INFINITY_KEY = tl.constexpr(0x007FFFFF)


def _blocks(vocabulary: int) -> tuple[int, int, int]:
    """Logits a block, blocks a row, and the latter rounded up to a power of two."""
    block = min(triton.next_power_of_2(vocabulary), MAX_BLOCK)
    blocks = triton.cdiv(vocabulary, block)
    return block, blocks, triton.next_power_of_2(blocks)


@triton.jit
def _tempered(logit, temperature):
    """What the sampler sees: logits over the temperature, as they are where it is 0; IEEE division as torch's."""
    return tl.div_rn(logit, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _finite(maximum):
    """A shift for exponentials: 0 where nothing is above -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _block_sums_kernel(
    logits_ptr,
    temperature_ptr,
    threshold_ptr,
    support_ptr,
    partial_ptr,  # [C, 5, B]: maximum, sum of exp, sum of exp * shifted logit; of tempered kept ones: maximum, sum
    vocabulary,
    support_stride,
    HAS_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column_L = block * BLOCK + tl.arange(0, BLOCK)
    x_L = tl.load(logits_ptr + row * vocabulary + column_L, mask=column_L < vocabulary, other=float("-inf"))
    maximum = tl.max(x_L, axis=0)
    shifted_L = x_L - _finite(maximum)
    p_L = tl.exp(shifted_L)
    z_L = _tempered(x_L, tl.load(temperature_ptr + row))
    if HAS_SUPPORT:
        inside_L = column_L < vocabulary
        byte_L = tl.load(support_ptr + row * support_stride + column_L // 8, mask=inside_L, other=0)
        kept_L = ((byte_L.to(tl.int32) >> (column_L % 8)) & 1) != 0
    else:
        kept_L = z_L >= tl.load(threshold_ptr + row)
    z_L = tl.where(kept_L, z_L, float("-inf"))
    kept_maximum = tl.max(z_L, axis=0)
    partial = partial_ptr + row * 5 * blocks + block
    tl.store(partial, maximum)
    tl.store(partial + blocks, tl.sum(p_L, axis=0))
    tl.store(partial + 2 * blocks, tl.sum(tl.where(p_L > 0, p_L * shifted_L, 0.0), axis=0))
    tl.store(partial + 3 * blocks, kept_maximum)
    tl.store(partial + 4 * blocks, tl.sum(tl.exp(z_L - _finite(kept_maximum)), axis=0))


@triton.jit
def _fold_sums_kernel(partial_ptr, out_ptr, rows, blocks, BLOCKS: tl.constexpr):
    """out [5, C]: log-sum-exp, entropy; of the kept: log-sum-exp, maximum, sum of exp(z - maximum)."""
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    partial = partial_ptr + row * 5 * blocks + b
    block_max = tl.load(partial, mask=b < blocks, other=float("-inf"))
    block_sum = tl.load(partial + blocks, mask=b < blocks, other=0.0)
    block_moment = tl.load(partial + 2 * blocks, mask=b < blocks, other=0.0)
    kept_max = tl.load(partial + 3 * blocks, mask=b < blocks, other=float("-inf"))
    kept_sum = tl.load(partial + 4 * blocks, mask=b < blocks, other=0.0)

    maximum = tl.max(block_max, axis=0)
    shifted = block_max - _finite(maximum)
    scale = tl.exp(shifted)
    total = tl.sum(block_sum * scale, axis=0)
    moment = tl.sum(tl.where(scale > 0, scale * (block_moment + block_sum * shifted), 0.0), axis=0)
    kept_maximum = tl.max(kept_max, axis=0)
    kept_total = tl.sum(kept_sum * tl.exp(kept_max - _finite(kept_maximum)), axis=0)
    tl.store(out_ptr + row, maximum + tl.log(total))
    tl.store(out_ptr + rows + row, tl.log(total) - moment / total)
    tl.store(out_ptr + 2 * rows + row, kept_maximum + tl.log(kept_total))
    tl.store(out_ptr + 3 * rows + row, kept_maximum)
    tl.store(out_ptr + 4 * rows + row, kept_total)


def _row_sums(logits_CV: Tensor, temperature_C: Tensor, threshold_C: Tensor, support_CB: Tensor | None) -> Tensor:
    """Float32 [5, C], rows as in `_fold_sums_kernel`, over the support that the threshold or the bits describe."""
    rows, vocabulary = logits_CV.shape
    block, blocks, padded_blocks = _blocks(vocabulary)
    partial = torch.empty((rows, 5, blocks), dtype=torch.float32, device=logits_CV.device)
    out = torch.empty((5, rows), dtype=torch.float32, device=logits_CV.device)
    _block_sums_kernel[(rows, blocks)](
        logits_CV,
        temperature_C,
        threshold_C,
        support_CB if support_CB is not None else logits_CV,  # read if HAS_SUPPORT
        partial,
        vocabulary,
        support_CB.stride(0) if support_CB is not None else 0,
        HAS_SUPPORT=support_CB is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
    )
    _fold_sums_kernel[(rows,)](
        partial, out, rows, blocks, BLOCKS=padded_blocks, num_warps=1, enable_fp_fusion=False
    )
    return out


@triton.jit
def _key(z):
    """Float32 to uint32 in the same order; -0 and 0 are one key."""
    bits = tl.where(z == 0.0, 0.0, z).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _from_key(key):
    """The inverse of `_key`; keys below -inf's give -inf."""
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
def _next_digit(row, totals_ptr, target, blocks, BLOCKS: tl.constexpr):
    """How many of the candidates 1, 2, ... reach the target."""
    b, j = tl.arange(0, BLOCKS)[:, None], tl.arange(0, DIGITS)[None, :]
    block_totals = tl.load(totals_ptr + (row * blocks + b) * DIGITS + j, mask=b < blocks, other=0.0)
    reached_J = tl.sum(block_totals, axis=0) >= target
    return tl.sum((reached_J & (tl.arange(0, DIGITS) > 0)).to(tl.uint32), axis=0)


@triton.jit
def _search_kernel(
    logits_ptr,
    temperature_ptr,
    amount_ptr,
    maximum_ptr,
    mass_ptr,
    prefix_ptr,  # [C], int32 bits of the key's digits so far, less the last
    totals_ptr,  # [C, B, J], what each candidate for the last digit reached
    next_prefix_ptr,
    next_totals_ptr,
    vocabulary,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
    FIRST: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """One pass: settle the last pass's digit, then sum over the keys at or above each candidate for the next."""
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    target = _target(row, amount_ptr, mass_ptr, vocabulary, BY_MASS)
    if target <= 0:
        return
    if FIRST:
        candidate = tl.full((), 0, tl.uint32)
    else:
        digit = _next_digit(row, totals_ptr, target, blocks, BLOCKS)
        candidate = tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True) | (digit << (SHIFT + DIGIT_BITS))
    if block == 0:
        tl.store(next_prefix_ptr + row, candidate.to(tl.int32, bitcast=True))

    column_L = block * BLOCK + tl.arange(0, BLOCK)
    inside_L = column_L < vocabulary
    x_L = tl.load(logits_ptr + row * vocabulary + column_L, mask=inside_L, other=float("-inf"))
    z_L = _tempered(x_L, tl.load(temperature_ptr + row))
    key_L = _key(z_L)
    weight_L = tl.exp(z_L - tl.load(maximum_ptr + row)) if BY_MASS else inside_L.to(tl.float32)
    j = tl.arange(0, DIGITS)
    totals_J = tl.zeros((DIGITS,), tl.float32)
    for i in tl.static_range(1, DIGITS):
        candidate += tl.full((), 1, tl.uint32) << SHIFT
        totals_J = tl.where(j == i, tl.sum(tl.where(key_L >= candidate, weight_L, 0.0), axis=0), totals_J)
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
    """The threshold of top-k, or (BY_MASS) the largest of top-k's, top-p's and min-p's."""
    row = tl.program_id(0).to(tl.int64)
    target = _target(row, amount_ptr, mass_ptr, vocabulary, BY_MASS)
    threshold = float("-inf")
    if target > 0:
        digit = _next_digit(row, totals_ptr, target, blocks, BLOCKS)
        threshold = _from_key(tl.load(prefix_ptr + row).to(tl.uint32, bitcast=True) | digit)
    if BY_MASS:
        maximum, min_p = tl.load(maximum_ptr + row), tl.load(min_p_ptr + row)
        min_p_threshold = tl.where(min_p > 0, maximum + tl.log(min_p), float("-inf"))
        threshold = tl.maximum(tl.maximum(threshold, tl.load(top_k_threshold_ptr + row)), min_p_threshold)
        threshold = tl.minimum(threshold, maximum)  # the largest logit is always kept
    tl.store(out_ptr + row, threshold)


def _search(
    logits_CV: Tensor,
    temperature_C: Tensor,
    amount_C: Tensor,
    mass: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Threshold [C] of top-k for `amount_C` = k, or of all filters for `amount_C` = p.

    `mass`, for the latter: of the tempered logits that top-k kept the maximum and the sum of exp(z - maximum), then
    min-p and top-k's threshold.
    """
    rows, vocabulary = logits_CV.shape
    block, blocks, padded_blocks = _blocks(vocabulary)
    by_mass = mass is not None
    maximum_C, mass_C, min_p_C, top_k_threshold_C = mass or (temperature_C,) * 4  # read if by_mass
    threshold_C = torch.empty_like(temperature_C)
    prefix_C, totals = threshold_C, threshold_C  # not read in the first pass
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        next_prefix_C = torch.empty(rows, dtype=torch.int32, device=logits_CV.device)
        next_totals = torch.empty((rows, blocks, DIGITS.value), dtype=torch.float32, device=logits_CV.device)
        _search_kernel[(rows, blocks)](
            logits_CV,
            temperature_C,
            amount_C,
            maximum_C,
            mass_C,
            prefix_C,
            totals,
            next_prefix_C,
            next_totals,
            vocabulary,
            SHIFT=shift,
            BY_MASS=by_mass,
            FIRST=shift == KEY_BITS - DIGIT_BITS,
            DIGIT_BITS=DIGIT_BITS,
            BLOCK=block,
            BLOCKS=padded_blocks,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )
        prefix_C, totals = next_prefix_C, next_totals
    _threshold_kernel[(rows,)](
        amount_C,
        maximum_C,
        mass_C,
        min_p_C,
        top_k_threshold_C,
        prefix_C,
        totals,
        threshold_C,
        vocabulary,
        blocks,
        BY_MASS=by_mass,
        BLOCKS=padded_blocks,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return threshold_C
