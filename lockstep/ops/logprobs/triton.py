"""Row statistics of logits and the sampler's draw. Semantics: `reference.py`; for the noise, `philox.py`.

A row is cut into fixed blocks, one program each; a second kernel folds a row's partial results in a fixed order. Blocks
and order depend on the vocabulary alone, and the same compiled kernels serve scoring and sampling.

Shape suffixes: C rows, V vocabulary, B blocks of a row (`support_CB`: bytes of its mask), L logits of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..records import Filters, RowStatistics, SampleKeys
from ..rows import LN_2, aligned_rows
from .triton_topk_topp import Mass, apply_temperature, apply_temperature_to_row, find_thresholds, row_blocks

NUM_WARPS = 8  # of a program that sums a block; this and the block's size fix the order of the sum
SCORES_BLOCK = 32
MAX_UNIFORM = tl.constexpr(1 - 2.0**-24)
BITS_OF_ONE, BITS_OF_2_23 = tl.constexpr(0x3F800000), tl.constexpr(0x4B000000)  # as float32
MARGIN = tl.constexpr(2.0**-15)
DRAW_BLOCK, DRAW_WARPS, DRAW_REGISTERS = 2048, 4, 80  # free: a row's maximum is the same in any order


@triton.jit
def _finite_shift(maximum):
    """A shift for exponentials: the maximum, or 0 if it is -inf."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _load_block(logits_ptr, row, vocabulary, BLOCK: tl.constexpr):
    """A block's columns and logits, -inf past the row's end."""
    column_L = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_L = tl.load(logits_ptr + row * vocabulary + column_L, mask=column_L < vocabulary, other=float("-inf"))
    return column_L, x_L


@triton.jit
def _store_kept(z_L, partial_ptr, blocks):
    """Store the maximum of the kept tempered logits, and the sum of their exponentials relative to it."""
    maximum = tl.max(z_L, axis=0)
    tl.store(partial_ptr, maximum)
    tl.store(partial_ptr + blocks, tl.sum(tl.exp(z_L - _finite_shift(maximum)), axis=0))


@triton.jit
def _block_sums_kernel(
    logits_ptr,
    temperature_ptr,
    support_ptr,  # or None
    partial_ptr,  # [C, 5, B]: maximum, sum of exp, sum of exp * shifted logit; for kept tempered logits: maximum, sum
    vocabulary,
    support_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.release_and_wait(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column_L, x_L = _load_block(logits_ptr, row, vocabulary, BLOCK)
    maximum = tl.max(x_L, axis=0)
    shifted_L = x_L - _finite_shift(maximum)
    p_L = tl.exp(shifted_L)
    total = tl.sum(p_L, axis=0)
    partial = partial_ptr + row * 5 * blocks + block
    tl.store(partial, maximum)
    tl.store(partial + blocks, total)
    tl.store(partial + 2 * blocks, tl.sum(tl.where(p_L > 0, p_L * shifted_L, 0.0), axis=0))
    temperature = tl.load(temperature_ptr + row)
    if support_ptr is not None:
        byte_L = tl.load(support_ptr + row * support_stride + column_L // 8, mask=column_L < vocabulary, other=0)
        kept_L = ((byte_L.to(tl.int32) >> (column_L % 8)) & 1) != 0
        z_L = tl.where(kept_L, apply_temperature_to_row(x_L, temperature), float("-inf"))
        _store_kept(z_L, partial + 3 * blocks, blocks)
    else:
        if (temperature > 0) & (temperature != 1.0):
            _store_kept(apply_temperature_to_row(x_L, temperature), partial + 3 * blocks, blocks)
        else:  # the tempered logits are the logits
            tl.store(partial + 3 * blocks, maximum)
            tl.store(partial + 4 * blocks, total)


@triton.jit
def _fold_kept(block_maximum, block_total):
    maximum = tl.max(block_maximum, axis=0)
    return maximum, tl.sum(block_total * tl.exp(block_maximum - _finite_shift(maximum)), axis=0)


@triton.jit(do_not_specialize=["out_stride"])
def _fold_sums_kernel(partial_ptr, out_ptr, out_stride, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """out [6, C]: log-sum-exp; entropy; log-sum-exp of the kept; the maximum; sum of exp(z - maximum) over the kept;
    the threshold of a row without a filter."""
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    partial, inside = partial_ptr + row * 5 * blocks + b, b < blocks
    block_maximum = tl.load(partial, mask=inside, other=float("-inf"))
    block_total = tl.load(partial + blocks, mask=inside, other=0.0)
    block_moment = tl.load(partial + 2 * blocks, mask=inside, other=0.0)
    kept_block_maximum = tl.load(partial + 3 * blocks, mask=inside, other=float("-inf"))
    kept_block_total = tl.load(partial + 4 * blocks, mask=inside, other=0.0)

    maximum = tl.max(block_maximum, axis=0)
    shifted = block_maximum - _finite_shift(maximum)
    scale = tl.exp(shifted)
    total = tl.sum(block_total * scale, axis=0)
    moment = tl.sum(tl.where(scale > 0, (block_moment + block_total * shifted) * scale, 0.0), axis=0)
    kept_maximum, kept_total = _fold_kept(kept_block_maximum, kept_block_total)
    out = out_ptr + row
    tl.store(out, maximum + tl.log(total))
    tl.store(out + out_stride, tl.log(total) - tl.div_rn(moment, total))
    tl.store(out + 2 * out_stride, kept_maximum + tl.log(kept_total))
    tl.store(out + 3 * out_stride, maximum)
    tl.store(out + 4 * out_stride, kept_total)
    tl.store(out + 5 * out_stride, float("-inf"))


def _row_sums(logits_CV: Tensor, temperature_C: Tensor, support_CB: Tensor | None) -> Tensor:
    """Float32 [6, C], in `_fold_sums_kernel`'s order. Kept logits are those in the support; without a support, all."""
    rows, vocabulary = logits_CV.shape
    cut, device = row_blocks(vocabulary), logits_CV.device
    partial = torch.empty((rows, 5, cut.count), dtype=torch.float32, device=device)
    padded_rows = triton.cdiv(rows, 4) * 4  # keeps each of the six aligned
    out = torch.empty((6, padded_rows), dtype=torch.float32, device=device)[:, :rows]
    _block_sums_kernel[(rows, cut.count)](
        logits_CV, temperature_C, support_CB, partial, vocabulary, 0 if support_CB is None else support_CB.stride(0),
        BLOCK=cut.size, **pdl.options(logits_CV, num_warps=NUM_WARPS),
    )  # fmt: skip
    _fold_sums_kernel[(rows,)](
        partial, out, out.stride(0), cut.count, BLOCKS=cut.padded_count, **pdl.options(logits_CV, num_warps=1)
    )
    return out


@triton.jit
def _kept_sums_kernel(
    logits_ptr, temperature_ptr, least_ptr, partial_ptr, vocabulary, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    pdl.release_and_wait(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    least = tl.load(least_ptr + row)
    if least > float("-inf"):
        _, x_L = _load_block(logits_ptr, row, vocabulary, BLOCK)
        z_L = apply_temperature_to_row(x_L, tl.load(temperature_ptr + row))
        _store_kept(tl.where(x_L >= least, z_L, float("-inf")), partial_ptr + row * 2 * blocks + block, blocks)


@triton.jit
def _fold_kept_kernel(partial_ptr, least_ptr, lse_ptr, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(least_ptr + row) > float("-inf"):
        b = tl.arange(0, BLOCKS)
        partial, inside = partial_ptr + row * 2 * blocks + b, b < blocks
        block_maximum = tl.load(partial, mask=inside, other=float("-inf"))
        maximum, total = _fold_kept(block_maximum, tl.load(partial + blocks, mask=inside, other=0.0))
        tl.store(lse_ptr + row, maximum + tl.log(total))


def _update_kept_lse(logits_CV: Tensor, temperature_C: Tensor, least_C: Tensor, kept_lse_C: Tensor) -> None:
    """In rows with a finite `least_C`, replace `kept_lse_C` by the log-sum-exp of the tempered logits from it on."""
    rows, vocabulary = logits_CV.shape
    cut = row_blocks(vocabulary)
    partial = torch.empty((rows, 2, cut.count), dtype=torch.float32, device=logits_CV.device)
    _kept_sums_kernel[(rows, cut.count)](
        logits_CV, temperature_C, least_C, partial, vocabulary,
        BLOCK=cut.size, **pdl.options(logits_CV, num_warps=NUM_WARPS),
    )  # fmt: skip
    _fold_kept_kernel[(rows,)](
        partial, least_C, kept_lse_C, cut.count, BLOCKS=cut.padded_count, **pdl.options(logits_CV, num_warps=1)
    )


def statistics(
    logits_CV: Tensor, filters: Filters, support_CB: Tensor | None, truncated: bool, with_entropy: bool
) -> RowStatistics:
    """`RowStatistics` of the logits. The entropy comes from the same pass, so it is computed in any case."""
    logits_CV = aligned_rows(logits_CV)
    sums = _row_sums(logits_CV, filters.temperature_C, support_CB)
    lse_C, entropy_C, kept_lse_C, maximum_C, total_C, no_threshold_C = sums.unbind()
    if not truncated or support_CB is not None:
        return RowStatistics(lse_C, kept_lse_C, no_threshold_C, entropy_C)
    _, top_k_least_C = find_thresholds(logits_CV, filters.temperature_C, filters.top_k_C, maximum_C)
    mass = Mass(total_C, filters.min_p_C, top_k_least_C)
    threshold_C, least_C = find_thresholds(logits_CV, filters.temperature_C, filters.top_p_C, maximum_C, mass)
    _update_kept_lse(logits_CV, filters.temperature_C, least_C, kept_lse_C)
    return RowStatistics(lse_C, kept_lse_C, threshold_C, entropy_C)


@triton.jit
def _scores_kernel(
    logits_ptr,
    target_ptr,
    temperature_ptr,
    lse_ptr,
    sampled_lse_ptr,
    sampled_ptr,
    model_ptr,
    rows,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    logit = tl.load(logits_ptr + row * vocabulary + tl.load(target_ptr + row, mask=inside, other=0), mask=inside)
    temperature = tl.load(temperature_ptr + row, mask=inside, other=1.0)
    sampled = apply_temperature(logit, temperature) - tl.load(sampled_lse_ptr + row, mask=inside)
    tl.store(sampled_ptr + row, tl.where(temperature > 0, sampled, 0.0), mask=inside)
    tl.store(model_ptr + row, logit - tl.load(lse_ptr + row, mask=inside), mask=inside)


def scores(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, stats: RowStatistics) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits_CV.shape
    sampled_C, model_C = torch.empty_like(temperature_C), torch.empty_like(temperature_C)
    _scores_kernel[(triton.cdiv(rows, SCORES_BLOCK),)](
        logits_CV, targets_C, temperature_C, stats.lse_C, stats.sampled_lse_C, sampled_C, model_C, rows, vocabulary,
        BLOCK=SCORES_BLOCK, **pdl.options(logits_CV, num_warps=1),
    )  # fmt: skip
    return sampled_C, model_C


@triton.jit
def philox_words(key_ptr, position, quad):
    """One word per column: column 4 * quad + i has word i of Philox4x32-10 at (position, quad, key[2], key[3])."""
    k0, k1 = tl.load(key_ptr).to(tl.uint64), tl.load(key_ptr + 1).to(tl.uint64)
    c2, c3 = tl.load(key_ptr + 2).to(tl.uint32), tl.load(key_ptr + 3).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox((k1 << 32) | k0, position.to(tl.uint32), quad.to(tl.uint32), c2, c3)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel(words):
    """Standard Gumbel noise from uniform 32-bit words: -log(e) with e = -log1p(-u), computed as -log(1 - u) corrected
    for the rounding of 1 - u (Goldberg 1991, "What every computer scientist should know about floating-point", theorem
    4)."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.0**-32, MAX_UNIFORM)
    rest = 1.0 - uniform
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * tl.div_rn(uniform, 1.0 - rest))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(words):
    """A cheap upper bound on `gumbel` of the same words, at most 0.07 above it for words from 2**16 on.

    -log1p(-u) is no less than u, and log2(u) no less than u's exponent plus its fraction, which are its bits. Dropping
    the low bits of u only makes it smaller. `MARGIN` covers all rounding errors.
    """
    below = (words.to(tl.uint32, bitcast=True) >> 9 | BITS_OF_ONE).to(tl.float32, bitcast=True) - 1.0
    bits = below.to(tl.uint32, bitcast=True) >> 7 | BITS_OF_2_23  # an integer without a conversion
    return tl.fma(bits.to(tl.float32, bitcast=True), -LN_2 * 2.0**-16, LN_2 * 255 + MARGIN)


@triton.jit
def _first_column(is_wanted_L, column_L, otherwise):
    return tl.min(tl.where(is_wanted_L, column_L, otherwise), axis=0)


@triton.jit
def _best_noisy(z_L, column_L, words_L, first, otherwise):
    """The largest of z plus Gumbel noise, and its first column; the column `first` if all of z is -inf.

    Noise is computed for one column after another, starting with the largest bound, until no bound reaches the best so
    far: rounding preserves order, so z plus a bound on its noise bounds the sum. One or two columns are usually enough.
    """
    left_L = z_L + gumbel_bound(words_L)
    top = tl.max(left_L, axis=0)
    best, column = tl.full((), float("-inf"), tl.float32), first
    while (top >= best) & (top > float("-inf")):
        candidate = _first_column(left_L == top, column_L, otherwise)
        is_it_L = column_L == candidate
        word = tl.sum(tl.where(is_it_L, words_L, 0), axis=0)
        noisy = tl.max(tl.where(is_it_L, z_L, float("-inf")), axis=0) + gumbel(word)
        column = tl.where((noisy > best) | ((noisy == best) & (candidate < column)), candidate, column)
        best = tl.maximum(best, noisy)
        left_L = tl.where(is_it_L, float("-inf"), left_L)
        top = tl.max(left_L, axis=0)
    return best, column


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    threshold_ptr,
    key_ptr,
    position_ptr,
    score_ptr,  # [C, B], a block's best; `column_ptr`: its column
    column_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.release_and_wait(PDL)
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column_L, z_L = _load_block(logits_ptr, row, vocabulary, BLOCK)
    temperature, otherwise = tl.load(temperature_ptr + row), vocabulary - 1
    if temperature > 0:
        if temperature != 1.0:
            z_L = apply_temperature_to_row(z_L, temperature)
        z_L = tl.where(z_L >= tl.load(threshold_ptr + row), z_L, float("-inf"))
        quad = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        words_L = philox_words(key_ptr + row * 4, tl.load(position_ptr + row), quad)
        best, column = _best_noisy(z_L, column_L, words_L, block * BLOCK, otherwise)
    else:
        best = tl.max(z_L, axis=0)
        column = _first_column(z_L == best, column_L, otherwise)
    tl.store(score_ptr + row * blocks + block, best)
    tl.store(column_ptr + row * blocks + block, column)


@triton.jit
def _fold_draw_kernel(score_ptr, column_ptr, token_ptr, vocabulary, blocks, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    score = tl.load(score_ptr + row * blocks + b, mask=b < blocks, other=float("-inf"))
    column = tl.load(column_ptr + row * blocks + b, mask=b < blocks, other=0)
    winner = tl.where((score == tl.max(score, axis=0)) & (b < blocks), column, vocabulary - 1)
    tl.store(token_ptr + row, tl.min(winner, axis=0).to(tl.int64))


def draw(logits_CV: Tensor, temperature_C: Tensor, threshold_C: Tensor, keys: SampleKeys, greedy: bool) -> Tensor:
    """See `logprobs.reference.draw`. A row with temperature 0 is greedy whatever `greedy` says."""
    logits_CV = aligned_rows(logits_CV)
    rows, vocabulary = logits_CV.shape
    blocks, device = triton.cdiv(vocabulary, DRAW_BLOCK), logits_CV.device
    score = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    column = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    token_C = torch.empty(rows, dtype=torch.int64, device=device)
    _draw_kernel[(rows, blocks)](
        logits_CV, temperature_C, threshold_C, keys.key_C4.contiguous(), keys.position_C, score, column, vocabulary,
        BLOCK=DRAW_BLOCK, **pdl.options(logits_CV, num_warps=DRAW_WARPS, maxnreg=DRAW_REGISTERS),
    )  # fmt: skip
    _fold_draw_kernel[(rows,)](
        score, column, token_C, vocabulary, blocks,
        BLOCKS=triton.next_power_of_2(blocks), **pdl.options(logits_CV, num_warps=1),
    )  # fmt: skip
    return token_C
