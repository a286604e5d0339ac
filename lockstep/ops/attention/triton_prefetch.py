"""Prefetch page numbers, keys and values into the L2 cache while a program waits for the previous kernel (`pdl`).

What a program reads to find them may be stale at that time, so it is clamped to bounds, kept out of the L1 cache, and
used for nothing else.

Shape suffixes: L keys or rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

AHEAD = 256  # keys per program
MAX_PROGRAMS = 16  # the most programs for which it pays; more of them keep the memory busy anyway
LINE_PAGES = tl.constexpr(32)  # page numbers in a line of the cache
BULK_BYTES = 16  # bytes: an asynchronous copy's address and size must be multiples of this


def keys_per_program(programs: int, *caches: Tensor) -> int:
    """How many keys each of `programs` programs prefetches from caches [rows, K, H]: 0 or `AHEAD`."""
    sizes = (n * cache.element_size() for cache in caches for n in (*cache.stride()[:2], cache.shape[2]))
    aligned = not any(size % BULK_BYTES for size in (*sizes, *(cache.data_ptr() for cache in caches)))
    return AHEAD if aligned and programs <= MAX_PROGRAMS else 0


@triton.jit
def prefetch_table(table_ptr, begin, table_width, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Prefetch the page numbers of `KEYS` positions from `begin` on."""
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(KEYS, PAGE_SIZE * LINE_PAGES))
    page = begin // PAGE_SIZE + tl.arange(0, LINES) * LINE_PAGES
    prefetch_lines(table_ptr + page, page < table_width)


@triton.jit
def prefetch_lines(ptr_L, wanted_L):
    """Prefetch the cache lines that hold these addresses."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0;}",
        "=r,l,r",
        [ptr_L.to(tl.int64), wanted_L.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_positions(keys, position_L, end, table_width, cache_rows, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Prefetch the keys and values at positions below `end`."""
    wanted_L = position_L < tl.minimum(end, table_width * PAGE_SIZE)
    page_L = tl.load(keys.table_ptr + position_L // PAGE_SIZE, mask=wanted_L, other=0, cache_modifier=".cg")
    row_L = tl.minimum(tl.maximum(page_L * PAGE_SIZE + position_L % PAGE_SIZE, 0), cache_rows - 1).to(tl.int64)
    prefetch_rows(keys.k_ptr + row_L * keys.k_stride, wanted_L, HEAD_DIM)
    prefetch_rows(keys.v_ptr + row_L * keys.v_stride, wanted_L, HEAD_DIM)


@triton.jit
def prefetch_rows(ptr_L, wanted_L, HEAD_DIM: tl.constexpr):
    """Prefetch rows of `HEAD_DIM` elements."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0;}",
        "=r,l,r,r",
        [ptr_L.to(tl.int64), wanted_L.to(tl.int32), HEAD_DIM * (ptr_L.dtype.element_ty.primitive_bitwidth // 8)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
