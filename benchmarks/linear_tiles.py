"""Tiles of each kernel that `tune_linear.py` times, by the shape of the product and the number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lockstep.ops.tables.linear_table import AsyncChoice, Choice, Kernel, Kind, TmaChoice

KERNELS = ("pipelined", "async", "tma")  # `kernels.linear`, `linear_async`, `linear_tma`
PROBES = {  # bound on the rows: rows measured
    1: (1,),
    8: (8,),
    16: (16,),
    32: (24, 32),
    56: (40, 48, 56),
    64: (64,),
    128: (96, 128),
    256: (192, 256),
}
_FEW, _SOME, _MANY = (16,), (64, 32, 16), (64, 128)
BLOCK_M = {1: _FEW, 8: _FEW, 16: _FEW, 32: (32, 16), 56: _SOME, 64: _SOME, 128: _MANY, 256: _MANY}
ASYNC_BLOCK_M = {bound: (16, 64) if bound <= 64 else _MANY for bound in PROBES}
ASYNC_STAGES = {64: (4, 8), 128: (3, 4), 256: (3, 4)}  # of the rows, by the depth of one; the weights fill the rest
ASYNC_KIB = (74, 110, 220)  # three programs a multiprocessor, two, or one
PIPELINE_KIB = (110, 200)  # a program's stages: two programs a multiprocessor, or one
SHARED_BYTES = 220 * 2**10


def candidates(kind: Kind, bucket: int, columns: int, depth: int) -> list[Choice]:
    """Tiles worth timing, as they are with neither early release nor prefetch."""
    found: dict[Choice, None] = {}
    weights = 2 if kind == "norm_gate_up" else 1
    for block_m, block_n, block_k in itertools.product(BLOCK_M[bucket], (16, 32, 64, 128, 256), (64, 128, 256)):
        programs = -(-PROBES[bucket][0] // block_m) * (columns // weights // block_n)
        stage, tile = 2 * block_k * (block_m + weights * block_n), block_m * block_n * weights
        few, many = programs < 48, programs > 400 and block_n < 64
        if few or many or (bucket >= 256 and block_n < 64) or tile > 128 * 256 or depth % block_k:
            continue
        split = block_m < min(bucket, 64)  # the rows over several blocks
        for kib in PIPELINE_KIB[split:]:
            stages = min(kib * 1024 // stage, 8, depth // block_k + 1)
            if stages >= 3 and stages * stage <= SHARED_BYTES:
                found[Choice(block_m, block_n, block_k, 8 if tile >= 128 * 128 else 4, stages)] = None
    return list(found)


def async_candidates(kind: Kind, bucket: int, columns: int, depth: int) -> list[AsyncChoice]:
    """Tiles of the asynchronous kernel worth timing."""
    if kind == "linear_fp32":
        return []
    found: dict[AsyncChoice, None] = {}
    weights = 2 if kind == "norm_gate_up" else 1
    for block_m, block_n, block_k in itertools.product(ASYNC_BLOCK_M[bucket], (8, 16, 32, 64, 128), ASYNC_STAGES):
        programs, steps = -(-PROBES[bucket][0] // block_m) * (columns // weights // block_n), depth // block_k
        narrow = weights * block_n < (16 if block_m == 16 or bucket > 64 else 8)
        if narrow or weights * block_n > 128 or not 32 <= programs <= 400 or depth % block_k:
            continue
        row_stage, weight_stage = 2 * block_k * block_m, 2 * block_k * block_n * weights
        for x_stages, kib in itertools.product(ASYNC_STAGES[block_k], ASYNC_KIB):
            w_stages = min((kib * 1024 - x_stages * row_stage) // weight_stage, steps)
            if w_stages >= min(x_stages, steps) and x_stages <= steps + 1:
                found[AsyncChoice(block_m, block_n, block_k, x_stages, w_stages)] = None
    return list(found)


def tma_candidates(kind: Kind, bucket: int, columns: int, depth: int) -> list[TmaChoice]:
    """Tiles of the copy engine's kernel worth timing."""
    rows_, parts = PROBES[bucket][0], 2 if kind == "norm_gate_up" else 1
    if kind == "linear_fp32":
        return []
    found: dict[TmaChoice, None] = {}
    for block_m, block_n, block_k in itertools.product((64, 128), (16, 32, 64, 128), (64, 128, 256)):
        programs = -(-rows_ // block_m) * (columns // parts // block_n)
        if rows_ <= block_m // 2 or not 28 <= programs <= 420 or depth % block_k:
            continue
        for kib in ASYNC_KIB:
            stages = min(kib * 1024 // (2 * block_k * (block_m + parts * block_n)), depth // block_k + 1, 12)
            if stages >= 3:
                found[TmaChoice(block_m, block_n, block_k, stages)] = None
    return list(found)


def tiles(kind: Kind, bucket: int, columns: int, depth: int, kernels: Sequence[str]) -> list[Kernel]:
    """Candidates of these kernels; those of `linear` release early and do not prefetch, and plain ones are tried
    without the release too."""
    of, found = (kind, bucket, columns, depth), list[Kernel]()
    if "pipelined" in kernels:
        early = (True, False) if kind in ("linear", "linear_fp32") else (True,)
        found += [tile._replace(early=e) for tile in candidates(*of) for e in early]
    if "async" in kernels:
        found += async_candidates(*of)
    if "tma" in kernels:
        found += tma_candidates(*of)
    return found
