"""The tiles that `tune_linear.py` tries for each of the package's kernels for matrix products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lockstep.ops.linear.choice import LIBRARY, Choice, Kind, weight_tiles

PIPELINE_KIB = (110, 200)  # of a program's stages, for two programs per multiprocessor or one
HOPPER_KIB = (74, 110, 224)  # for three programs per multiprocessor, two, or one
SHARED_BYTES = 220 * 2**10
ASYNC_STAGES = {64: (4, 8), 128: (3, 4), 256: (3, 4)}  # of the rows, by a stage's depth; the weights' fill the rest
TMA_ROWS = 8  # rows for which that kernel pays; fewer would take too many pieces


def candidates(kernel: str, kind: Kind, rows: Sequence[int], columns: int, depth: int) -> list[Choice]:
    """Choices of a kernel worth timing for these numbers of rows, ascending; `columns` as in `choice.choose`."""
    if kernel == "library":  # it chooses its kernel itself
        return [LIBRARY]
    tiles = {"pipelined": _pipelined, "async": _asynchronous, "tma": _tma}[kernel]
    return list(dict.fromkeys(tiles(kind, rows, columns, depth)))


def _pipelined(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> Iterator[Choice]:
    """Plain products are tried with and without the early release."""
    weights, most = weight_tiles(kind), rows[-1]
    heights = [m for m in (64, 32, 16) if m < 2 * most or m == 16] if most <= 64 else [64, 128]
    for block_m, block_n, block_k in itertools.product(heights, (16, 32, 64, 128, 256), (64, 128, 256)):
        programs = -(-rows[0] // block_m) * (columns // weights // block_n)
        stage, tile = 2 * block_k * (block_m + weights * block_n), block_m * block_n * weights
        few, many = programs < 48, programs > 400 and block_n < 64
        if few or many or (most >= 256 and block_n < 64) or tile > 128 * 256 or depth % block_k:
            continue
        split = block_m < min(most, 64)  # the rows span several blocks
        for kib in PIPELINE_KIB[split:]:
            stages = min(kib * 1024 // stage, 8, depth // block_k + 1)
            if stages >= 3 and stages * stage <= SHARED_BYTES:
                warps = 8 if tile >= 128 * 128 else 4
                for early in (True, False) if kind in ("linear", "linear_fp32") else (True,):
                    yield Choice("pipelined", block_m, block_n, block_k, warps, stages, early=early)


def _asynchronous(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> Iterator[Choice]:
    if kind == "linear_fp32":
        return
    weights, most = weight_tiles(kind), rows[-1]
    heights = (16, 64) if most <= 64 else (64, 128)
    for block_m, block_n, block_k in itertools.product(heights, (8, 16, 32, 64, 128), ASYNC_STAGES):
        programs, steps = -(-rows[0] // block_m) * (columns // weights // block_n), depth // block_k
        narrow = weights * block_n < (16 if block_m == 16 or most > 64 else 8)
        if narrow or weights * block_n > 128 or not 32 <= programs <= 400 or depth % block_k:
            continue
        row_stage, weight_stage = 2 * block_k * block_m, 2 * block_k * block_n * weights
        for x_stages, kib in itertools.product(ASYNC_STAGES[block_k], HOPPER_KIB):
            stages = min((kib * 1024 - x_stages * row_stage) // weight_stage, steps)
            if stages >= min(x_stages, steps) and x_stages <= steps + 1:
                warps = 4 if block_m <= 64 else 8
                yield Choice("async", block_m, block_n, block_k, warps, stages, x_stages)


def _tma(kind: Kind, rows: Sequence[int], columns: int, depth: int) -> Iterator[Choice]:
    if kind == "linear_fp32":
        return
    weights = weight_tiles(kind)
    for block_m, block_n, block_k in itertools.product((64, 128), (16, 32, 64, 128), (64, 128, 256)):
        programs = -(-rows[0] // block_m) * (columns // weights // block_n)
        if rows[0] < (TMA_ROWS if block_m == 64 else 65) or not 28 <= programs <= 420 or depth % block_k:
            continue
        for kib in HOPPER_KIB:
            stages = min(kib * 1024 // (2 * block_k * (block_m + weights * block_n)), depth // block_k + 1, 12)
            if stages >= 3:
                yield Choice("tma", block_m, block_n, block_k, block_m // 16, stages)
