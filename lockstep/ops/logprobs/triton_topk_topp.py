"""The support of filtered sampling: the smallest tempered logit that top-k, top-p and min-p keep, without a sort.

A filter's threshold is the largest logit such that those at or above it are enough: k logits, or p of the mass. Masses
are integers (`logprobs.reference.MASS_SCALE`), so no sum depends on its order and the threshold is exact. Three kernels
find it: the first guesses a bracket from a fixed sample of the row; the second adds up what is outside the bracket,
over the whole row, and lists the few logits inside; the third bisects the list in registers. If the bracket missed, or
holds more than registers do, the sums show it: the third kernel then narrows the range first, by passes over the list
if that is complete, else over the row.

Shape suffixes: C rows, V vocabulary, S sampled logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..rows import LOG2_E
from .reference import MASS_SCALE as _MASS_SCALE

MAX_BLOCK = 8192
TALLY_RUNS, TALLY_RUN, TALLY_WARPS = 512, 4, 4  # a program's logits, in short runs, so that counting them is cheap
CAPACITY, CAPACITY_WARPS = 8192, 16  # logits of a row that one program's registers hold
LIST_SHARE = 8  # a row's list has room for one logit in eight; brackets of flat distributions hold one in ten
MASS_SCALE = tl.constexpr(_MASS_SCALE)
NEIGHBOURS = tl.constexpr(4)  # the preimage of a quotient is within this many floats of the product
SAMPLES, SAMPLE_WARPS = 8192, 16
REGISTERS = 64  # per thread: two programs of 16 warps fit on a multiprocessor
RUN = tl.constexpr(8)  # neighbours in the sample: a 32-byte sector
HALVINGS = tl.constexpr(10)  # bisection steps over the sample's range, for each end of the bracket
DEVIATIONS = tl.constexpr(4.0)  # standard deviations of the sample's estimate, either way
MAX_UNSEEN = tl.constexpr(8.0)  # logits that a sample may miss where there are few
MIN_SAMPLED = tl.constexpr(16)  # sampled logits above the lower end
NEGATIVE_INFINITY_KEY = tl.constexpr(0x007FFFFF)


class Blocks(NamedTuple):
    """How a row is cut: logits per block (a power of two), number of blocks, and that number rounded up to a power of
    two. It depends on the vocabulary alone, since it fixes the order of a row's sums."""

    size: int
    count: int
    padded_count: int


def row_blocks(vocabulary: int) -> Blocks:
    """How a row of `vocabulary` logits is cut."""
    size = min(triton.next_power_of_2(vocabulary), MAX_BLOCK)
    count = triton.cdiv(vocabulary, size)
    return Blocks(size, count, triton.next_power_of_2(count))


@triton.jit
def _divisor(temperature):
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _reciprocal(temperature):
    return tl.div_rn(1.0, _divisor(temperature))


@triton.jit
def apply_temperature(logit, temperature):
    """What the sampler sees: logits divided by the temperature, unchanged if it is 0. IEEE division, as in torch."""
    return tl.div_rn(logit, _divisor(temperature))


@triton.jit
def apply_temperature_to_row(logit, temperature):
    """`apply_temperature` for many logits of one temperature, with the same bits: products with the divisor's
    reciprocal, corrected twice by their remainders (Markstein 1990, "Computation of elementary functions on the IBM
    RISC System/6000")."""
    divisor, inverse = _divisor(temperature), _reciprocal(temperature)
    z = logit * inverse
    z = tl.fma(tl.fma(-z, divisor, logit), inverse, z)
    z = tl.fma(tl.fma(-z, divisor, logit), inverse, z)
    return tl.where(logit > float("-inf"), z, logit)


@triton.jit
def ordered_key(x):
    """Map float32 to uint32 in the same order, except that -0 is below 0; as thresholds both keep the same logits."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def from_key(key):
    """The inverse of `ordered_key`; -inf for keys below that of -inf."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, ~key)
    return tl.where(key > NEGATIVE_INFINITY_KEY, bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def undo_temperature(threshold, temperature):
    """The smallest logit whose tempered value reaches the threshold."""
    key = ordered_key(threshold * _divisor(temperature))
    result = threshold * 0 + float("inf")
    for i in tl.static_range(2 * NEIGHBOURS + 1):
        x = from_key(key + NEIGHBOURS - i)
        result = tl.where(apply_temperature(x, temperature) >= threshold, x, result)
    return tl.where(threshold > float("-inf"), result, float("-inf"))


@triton.jit
def _is_active(amount, BY_MASS: tl.constexpr):
    """Whether the filter is on: p below 1, k above 0."""
    return amount < 1.0 if BY_MASS else amount > 0


@triton.jit
def _probability(x, maximum, scale):
    """Relative to that of the row's largest logit; `scale` is log2(e) / temperature."""
    return tl.exp2((x - maximum) * scale)


@triton.jit
def _weight(x, maximum, scale, BY_MASS: tl.constexpr):
    """What a logit adds to a sum, int64: 1 for top-k, its mass for top-p."""
    if BY_MASS:
        return (_probability(x, maximum, scale) * MASS_SCALE).to(tl.int64)
    else:
        return tl.full(x.shape, 1, tl.int64)


@triton.jit
def _is_surely_kept(x_S, mass_S, v, mass_v, wanted, BY_MASS: tl.constexpr):
    """Whether the threshold is v or more, as far as the sample can tell.

    Top-p: the mass below v is at most `wanted`, which may be cut off. Top-k: `wanted` logits are at or above v.
    """
    above_S = x_S >= v
    count = tl.sum(above_S.to(tl.float32), axis=0)
    if BY_MASS:
        below_S = tl.where(above_S, 0.0, mass_S)
        deviation = DEVIATIONS * tl.sqrt(tl.sum(below_S * below_S, axis=0))
        return (tl.sum(below_S, axis=0) + MAX_UNSEEN * mass_v + deviation <= wanted) & (count >= MIN_SAMPLED)
    else:
        return count - DEVIATIONS * tl.sqrt(count) >= wanted


@triton.jit
def _is_surely_cut(x_S, mass_S, v, wanted, BY_MASS: tl.constexpr):
    """Whether the threshold is below v, as far as the sample can tell."""
    above_S = x_S >= v
    if BY_MASS:
        below_S = tl.where(above_S, 0.0, mass_S)
        deviation = DEVIATIONS * tl.sqrt(tl.sum(below_S * below_S, axis=0))
        return tl.sum(below_S, axis=0) - deviation >= wanted
    else:
        count = tl.sum(above_S.to(tl.float32), axis=0)
        return count + DEVIATIONS * tl.sqrt(count) + MAX_UNSEEN <= wanted


@triton.jit
def _bracket_kernel(
    logits_ptr,
    temperature_ptr,
    amount_ptr,
    maximum_ptr,
    total_ptr,
    least_ptr,
    bracket_ptr,  # [C, 2]
    tally_ptr,  # [C, 4]
    vocabulary,
    BY_MASS: tl.constexpr,
    SAMPLES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store where the threshold probably is: at or above the first number and below the second. Clears the tally."""
    pdl.release_and_wait(PDL)
    row, is_high = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tl.store(tally_ptr + row * 4 + is_high * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))
    amount, maximum = tl.load(amount_ptr + row), tl.load(maximum_ptr + row)
    if _is_active(amount, BY_MASS):
        temperature = tl.load(temperature_ptr + row)
        i = tl.arange(0, SAMPLES)
        column_S = i // RUN * tl.maximum(vocabulary // (SAMPLES // RUN), RUN) + i % RUN
        inside_S = column_S < vocabulary
        x_S = tl.load(logits_ptr + row * vocabulary + column_S, mask=inside_S, other=float("-inf"))
        scale = LOG2_E * _reciprocal(temperature)
        mass_S = _probability(x_S, maximum, scale)
        share = tl.sum(inside_S.to(tl.float32), axis=0) / vocabulary  # of the row that is in the sample
        if BY_MASS:
            tail = (1.0 - amount) * tl.load(total_ptr + row)
            wanted = tail * share
            left = maximum + tl.log(tail / vocabulary) * _divisor(temperature)  # logits all this small make up the tail
            end = left - _divisor(temperature)
        else:
            wanted = amount * share
            left = tl.min(tl.where(x_S > float("-inf"), x_S, maximum), axis=0)
            end = float("-inf")
        right = maximum
        if is_high > 0:
            end = float("inf")
            for _ in range(HALVINGS):
                v = 0.5 * (left + right)
                cut = _is_surely_cut(x_S, mass_S, v, wanted, BY_MASS)
                left, right, end = tl.where(cut, left, v), tl.where(cut, v, right), tl.where(cut, v, end)
        else:
            for _ in range(HALVINGS):
                v = 0.5 * (left + right)
                mass_v = _probability(v, maximum, scale)
                kept = _is_surely_kept(x_S, mass_S, v, mass_v, wanted, BY_MASS)
                left, right, end = tl.where(kept, v, left), tl.where(kept, right, v), tl.where(kept, v, end)
        if BY_MASS:
            least = tl.load(least_ptr + row)  # top-k kept few, which the sample hardly sees: they are the bracket
            end = tl.where(least > float("-inf"), tl.where(is_high > 0, float("inf"), least), end)
        tl.store(bracket_ptr + row * 2 + is_high, end)


@triton.jit
def _tally_kernel(
    logits_ptr,
    temperature_ptr,
    amount_ptr,
    maximum_ptr,
    least_ptr,
    bracket_ptr,
    tally_ptr,  # [C, 4]: weights above and, if BY_MASS, below the bracket; how many logits are in it
    list_ptr,  # [C, ROOM], those logits in any order
    vocabulary,
    BY_MASS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum up the weights outside the bracket and list the logits inside."""
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    if _is_active(tl.load(amount_ptr + row), BY_MASS):
        column = (tl.program_id(1) * RUNS + tl.arange(0, RUNS))[:, None] * RUN + tl.arange(0, RUN)[None, :]
        x = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("nan"))  # not counted
        low, high = tl.load(bracket_ptr + row * 2), tl.load(bracket_ptr + row * 2 + 1)
        tally = tally_ptr + row * 4
        scale = LOG2_E * _reciprocal(tl.load(temperature_ptr + row))
        weight = _weight(x, tl.load(maximum_ptr + row), scale, BY_MASS)
        tl.atomic_add(tally, tl.sum(tl.where(x >= high, weight, 0)))
        if BY_MASS:
            below = tl.sum(tl.where(x < low, weight, 0))  # with top-k on, `low` is its cut: these are all cut off
            tl.atomic_add(tally + 1, tl.where(tl.load(least_ptr + row) > float("-inf"), 0, below))
        within = ((x >= low) & (x < high)).to(tl.int32)
        count = tl.sum(within, axis=1)
        total = tl.sum(count, axis=0)
        if total > 0:
            first = tl.atomic_add(tally + 2, total.to(tl.int64)).to(tl.int32)
            place = (first + tl.cumsum(count, axis=0) - count)[:, None] + tl.cumsum(within, axis=1) - 1
            tl.store(list_ptr + row * ROOM + place, x, mask=(within > 0) & (place < ROOM))


@triton.jit
def _target_weight(amount, total, vocabulary, BY_MASS: tl.constexpr):
    """What the kept logits' weights must reach, int64, at least 1."""
    if BY_MASS:
        return tl.maximum(tl.ceil(amount.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    else:
        return tl.minimum(amount, vocabulary).to(tl.int64)


@triton.jit
def _first_key(x):
    """The smallest key of any logit that is at least x, int64: for 0 it is that of -0."""
    return ordered_key(tl.where(x == 0, -0.0, x)).to(tl.int64)


@triton.jit
def _load_chunk(x_ptr, length, start, first, last, CHUNK: tl.constexpr):
    """A chunk of logits, and whether their keys are from `first` to `last`."""
    i = start + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + i, mask=i < length, other=float("-inf"))
    key = ordered_key(x)
    return x, (i < length) & (key >= first.to(tl.uint32)) & (key <= last.to(tl.uint32))


@triton.jit
def _sum_weights(x_ptr, length, first, last, maximum, scale, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """The weight, int64, and the number of logits with keys from `first` to `last`."""
    total, count = tl.zeros((), tl.int64), tl.zeros((), tl.int32)
    for start in range(0, length, CHUNK):
        x, within = _load_chunk(x_ptr, length, start, first, last, CHUNK)
        total += tl.sum(tl.where(within, _weight(x, maximum, scale, BY_MASS), 0), axis=0)
        count += tl.sum(within.to(tl.int32), axis=0)
    return total, count


@triton.jit
def _compact(x_ptr, length, first, last, list_ptr, CHUNK: tl.constexpr):
    """List the logits with keys from `first` to `last`, in order, possibly in place over the list that is read."""
    count = tl.zeros((), tl.int32)
    for start in range(0, length, CHUNK):
        x, within = _load_chunk(x_ptr, length, start, first, last, CHUNK)
        place = count + tl.cumsum(within.to(tl.int32), axis=0) - 1
        tl.debug_barrier()  # every warp has read its part of the chunk
        tl.store(list_ptr + place, x, mask=within)
        count += tl.sum(within.to(tl.int32), axis=0)
    tl.debug_barrier()  # every warp's stores can be read
    return count


@triton.jit
def _search_range(
    row_ptr, list_ptr, bracket_ptr, above, below, count, amount, maximum, scale, vocabulary,
    BY_MASS: tl.constexpr, CAPACITY: tl.constexpr, ROOM: tl.constexpr
):  # fmt: skip
    """The threshold's key if the bracket missed it or holds more than CAPACITY logits: by passes over the list, or over
    the row until what is left fits in the list."""
    x_ptr, length, room = list_ptr, count, CAPACITY
    if count > ROOM:
        x_ptr, length, room = row_ptr, vocabulary, ROOM
    highest = ordered_key(maximum + 0.0).to(tl.int64)  # if the maximum is -0, there may be a 0 too
    first, last = _first_key(tl.load(bracket_ptr)), tl.minimum(_first_key(tl.load(bracket_ptr + 1)) - 1, highest)
    within, _ = _sum_weights(x_ptr, length, first, last, maximum, scale, BY_MASS, CAPACITY)
    target = _target_weight(amount, above + within + below, vocabulary, BY_MASS)
    if (above >= target) | (above + within < target):
        x_ptr, length, room, count = row_ptr, vocabulary, ROOM, vocabulary
        if above >= target:
            first, last, above = last + 1, highest, tl.zeros_like(above)
        else:
            first, last, above = tl.zeros_like(first), first - 1, above + within
    while first < last:  # `above` is the weight of keys past `last`; the range holds at most `count` logits
        if (count <= room) & (length > room):
            length = _compact(
                x_ptr, length, first, last, list_ptr, CAPACITY // 4
            )  # larger chunks would spill registers
            x_ptr, room = list_ptr, CAPACITY
        middle = last - (last - first) // 2
        weight, counted = _sum_weights(x_ptr, length, middle, last, maximum, scale, BY_MASS, CAPACITY)
        if above + weight >= target:
            first, count = middle, counted
        else:
            last, count, above = middle - 1, count - counted, above + weight
    return tl.minimum(first, ordered_key(maximum))


@triton.jit
def _threshold_kernel(
    logits_ptr,
    temperature_ptr,
    amount_ptr,
    maximum_ptr,
    least_ptr,
    min_p_ptr,
    bracket_ptr,
    tally_ptr,
    list_ptr,
    out_ptr,
    least_out_ptr,
    vocabulary,
    BY_MASS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store top-k's threshold on logits; or, if BY_MASS, the largest of top-k's, top-p's and min-p's thresholds on
    tempered logits, and the smallest logit that reaches it."""
    pdl.release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    amount, maximum, temperature = tl.load(amount_ptr + row), tl.load(maximum_ptr + row), tl.load(temperature_ptr + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    least = threshold
    if BY_MASS:
        least = tl.load(least_ptr + row)
    if _is_active(amount, BY_MASS):
        scale = LOG2_E * _reciprocal(temperature)
        tally, listed_ptr = tally_ptr + row * 4, list_ptr + row * ROOM
        above, below, count = tl.load(tally), tl.load(tally + 1), tl.load(tally + 2).to(tl.int32)
        i = tl.arange(0, CAPACITY)
        x = tl.load(listed_ptr + i, mask=i < count, other=float("-inf"))
        weight = tl.where(i < count, _weight(x, maximum, scale, BY_MASS), 0)
        listed = tl.sum(weight, axis=0)
        target = _target_weight(amount, above + below + listed, vocabulary, BY_MASS)
        last = ordered_key(maximum).to(tl.int64)
        if (above < target) & (above + listed >= target) & (count <= CAPACITY):
            first = ordered_key(tl.load(bracket_ptr + row * 2)).to(tl.int64)
            last = tl.minimum(ordered_key(tl.load(bracket_ptr + row * 2 + 1)).to(tl.int64), last)
            key, missing = ordered_key(x), target - above
            while first < last:
                middle = last - (last - first) // 2
                reached = tl.sum(tl.where(key >= middle.to(tl.uint32), weight, 0), axis=0) >= missing
                first, last = tl.where(reached, middle, first), tl.where(reached, last, middle - 1)
        else:
            first = _search_range(
                logits_ptr + row * vocabulary, listed_ptr, bracket_ptr + row * 2, above, below, count, amount, maximum,
                scale, vocabulary, BY_MASS, CAPACITY, ROOM,
            )  # fmt: skip
        threshold = from_key(first.to(tl.uint32))
    if BY_MASS:
        min_p = tl.load(min_p_ptr + row)
        highest = apply_temperature(maximum, temperature)
        min_p_threshold = tl.where(min_p > 0, highest + tl.log(min_p), float("-inf"))
        threshold = tl.maximum(apply_temperature(tl.maximum(threshold, least), temperature), min_p_threshold)
        threshold = tl.minimum(threshold, highest)  # the largest logit is always kept
        tl.store(least_out_ptr + row, undo_temperature(threshold, temperature))
    tl.store(out_ptr + row, threshold)


class Mass(NamedTuple):
    """What top-p and min-p need, float32 [C] each: the sum of probabilities relative to the largest (an estimate will
    do), min-p, and top-k's threshold."""

    total_C: Tensor
    min_p_C: Tensor
    least_C: Tensor


def find_thresholds(
    logits_CV: Tensor, temperature_C: Tensor, amount_C: Tensor, maximum_C: Tensor, mass: Mass | None = None
) -> tuple[Tensor, Tensor]:
    """Thresholds, float32 [C]: top-k's on logits, for `amount_C` = k (int32), twice; or with `mass`, for `amount_C` =
    p, all filters' on tempered logits, and the smallest logits that reach those. `maximum_C` is the largest logit."""
    rows, vocabulary = logits_CV.shape
    device = logits_CV.device
    total_C, min_p_C, least_C = mass or (maximum_C,) * 3  # read only if BY_MASS
    bracket = torch.empty((rows, 2), dtype=torch.float32, device=device)
    tally = torch.empty((rows, 4), dtype=torch.int64, device=device)
    room = max(CAPACITY, triton.cdiv(vocabulary, LIST_SHARE))
    listed = torch.empty((rows, room), dtype=torch.float32, device=device)
    threshold_C, least_out_C = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    row = logits_CV, temperature_C, amount_C, maximum_C
    options = {"BY_MASS": mass is not None, **pdl.options(logits_CV)}
    _bracket_kernel[(rows, 2)](
        *row, total_C, least_C, bracket, tally, vocabulary, SAMPLES=SAMPLES, num_warps=SAMPLE_WARPS, maxnreg=REGISTERS,
        **options,
    )  # fmt: skip
    _tally_kernel[(rows, triton.cdiv(vocabulary, TALLY_RUNS * TALLY_RUN))](
        *row, least_C, bracket, tally, listed, vocabulary,
        RUNS=TALLY_RUNS, RUN=TALLY_RUN, ROOM=room, num_warps=TALLY_WARPS, **options,
    )  # fmt: skip
    _threshold_kernel[(rows,)](
        *row, least_C, min_p_C, bracket, tally, listed, threshold_C, least_out_C, vocabulary,
        CAPACITY=CAPACITY, ROOM=room, num_warps=CAPACITY_WARPS, maxnreg=REGISTERS, **options,
    )  # fmt: skip
    return threshold_C, least_out_C if mass else threshold_C
