"""Which choices of each kernel of matrix products are worth timing: what `tune_linear` tries.

Each takes a kind of product, numbers of rows, ascending, and the weight's columns and depth
(`lockstep.ops.linear.choice.choose`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lockstep.ops.linear.choice import LIBRARY, Candidates, Choice, Kind, tiles_of_weight

PIPELINE_KIB = (110, 200)  # a program's stages: two programs a multiprocessor, or one
SHARED_BYTES = 220 * 2**10
STAGES = {64: (4, 8), 128: (3, 4), 256: (3, 4)}  # of the rows, by the depth of one; the weights fill the rest
STAGES_KIB = (74, 110, 220)  # three programs a multiprocessor, two, or one


def library(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    """One: it chooses itself."""
    return [LIBRARY]


def pipelined(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    """Plain products are tried with and without the early release."""
    found: dict[Choice, None] = {}
    weights, most = tiles_of_weight(kind), rows[-1]
    heights = [m for m in (64, 32, 16) if m < 2 * most or m == 16] if most <= 64 else [64, 128]
    for block_m, block_n, block_k in itertools.product(heights, (16, 32, 64, 128, 256), (64, 128, 256)):
        programs = -(-rows[0] // block_m) * (columns // weights // block_n)
        stage, tile = 2 * block_k * (block_m + weights * block_n), block_m * block_n * weights
        few, many = programs < 48, programs > 400 and block_n < 64
        if few or many or (most >= 256 and block_n < 64) or tile > 128 * 256 or depth % block_k:
            continue
        split = block_m < min(most, 64)  # the rows over several blocks
        for kib in PIPELINE_KIB[split:]:
            stages = min(kib * 1024 // stage, 8, depth // block_k + 1)
            if stages >= 3 and stages * stage <= SHARED_BYTES:
                warps = 8 if tile >= 128 * 128 else 4
                found[Choice("pipelined", block_m, block_n, block_k, warps, stages)] = None
    early = (True, False) if kind in ("linear", "linear_fp32") else (True,)
    return [choice._replace(early=e) for choice in found for e in early]


def asynchronous(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    if kind == "linear_fp32":
        return []
    found: dict[Choice, None] = {}
    weights, most = tiles_of_weight(kind), rows[-1]
    for block_m, block_n, block_k in itertools.product(
        (16, 64) if most <= 64 else (64, 128), (8, 16, 32, 64, 128), STAGES
    ):
        programs, steps = -(-rows[0] // block_m) * (columns // weights // block_n), depth // block_k
        narrow = weights * block_n < (16 if block_m == 16 or most > 64 else 8)
        if narrow or weights * block_n > 128 or not 32 <= programs <= 400 or depth % block_k:
            continue
        row_stage, weight_stage = 2 * block_k * block_m, 2 * block_k * block_n * weights
        for x_stages, kib in itertools.product(STAGES[block_k], STAGES_KIB):
            stages = min((kib * 1024 - x_stages * row_stage) // weight_stage, steps)
            if stages >= min(x_stages, steps) and x_stages <= steps + 1:
                warps = 4 if block_m <= 64 else 8
                found[Choice("async", block_m, block_n, block_k, warps, stages, x_stages)] = None
    return list(found)


def tma(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    if kind == "linear_fp32":
        return []
    found: dict[Choice, None] = {}
    parts = tiles_of_weight(kind)
    for block_m, block_n, block_k in itertools.product((64, 128), (16, 32, 64, 128), (64, 128, 256)):
        programs = -(-rows[0] // block_m) * (columns // parts // block_n)
        if rows[0] <= block_m // 2 or not 28 <= programs <= 420 or depth % block_k:
            continue
        for kib in STAGES_KIB:
            stages = min(kib * 1024 // (2 * block_k * (block_m + parts * block_n)), depth // block_k + 1, 12)
            if stages >= 3:
                found[Choice("tma", block_m, block_n, block_k, block_m // 16, stages)] = None
    return list(found)


CANDIDATES: dict[str, Candidates] = {"library": library, "pipelined": pipelined, "async": asynchronous, "tma": tma}
