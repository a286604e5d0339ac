"""Slots of decode tokens, and rows after a draw. Semantics: `ops/decode_update/operator.py`.

Shape suffixes: R rows, W pages per sequence, K stop ids, M words per result, N steps, B rows at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..records import DecodeRows, SampledTokens

BLOCK = 128
NUM_WARPS = 4


@triton.jit
def _slots_kernel(
    slot_ptr,
    context_ptr,
    position_ptr,
    remaining_ptr,
    table_ptr,
    rows,
    table_stride,
    null_slot,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_B = row_B < rows
    position_B = tl.load(position_ptr + row_B, mask=mask_B, other=0)
    idle_B = tl.load(remaining_ptr + row_B, mask=mask_B, other=0) == 0
    page_B = tl.load(table_ptr + row_B.to(tl.int64) * table_stride + position_B // PAGE_SIZE, mask=mask_B, other=0)
    slot_B = page_B.to(tl.int64) * PAGE_SIZE + position_B % PAGE_SIZE
    tl.store(slot_ptr + row_B, tl.where(idle_B, null_slot, slot_B), mask=mask_B)
    tl.store(context_ptr + row_B, (position_B + 1).to(tl.int32), mask=mask_B)


def slots(
    position_R: Tensor, remaining_R: Tensor, table_RW: Tensor, page_size: int, null_page: int
) -> tuple[Tensor, Tensor]:
    rows = position_R.shape[0]
    slot_R, context_R = torch.empty_like(position_R), torch.empty_like(remaining_R)
    assert table_RW.stride(1) == 1
    _slots_kernel[(triton.cdiv(rows, BLOCK),)](
        slot_R, context_R, position_R, remaining_R, table_RW, rows, table_RW.stride(0), null_page * page_size,
        PAGE_SIZE=page_size, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return slot_R, context_R


@triton.jit
def _advance_kernel(
    drawn_ptr,
    logprob_ptr,
    model_logprob_ptr,
    stop_ptr,  # [R, K]
    token_ptr,
    position_ptr,
    remaining_ptr,
    results_ptr,  # [R, M, N]
    next_ptr,
    route_ptr,
    rows,
    WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program handles all rows, so that it can increment the step's number after the last of them."""
    pdl.release_and_wait(PDL)
    step = tl.load(next_ptr)
    for first in range(0, rows, BLOCK):
        row_B = first + tl.arange(0, BLOCK)
        mask_B = row_B < rows
        drawn_B = tl.load(drawn_ptr + row_B, mask=mask_B, other=0)
        remaining_B = tl.load(remaining_ptr + row_B, mask=mask_B, other=0)
        result_B = results_ptr + row_B.to(tl.int64) * (WORDS * STEPS) + step
        busy_B = mask_B & (remaining_B > 0)
        logprob_B = tl.load(logprob_ptr + row_B, mask=busy_B, other=0.0)
        model_logprob_B = tl.load(model_logprob_ptr + row_B, mask=busy_B, other=0.0)
        tl.store(result_B, tl.where(busy_B, drawn_B.to(tl.int32), -1), mask=mask_B)
        tl.store(result_B + STEPS, logprob_B.to(tl.int32, bitcast=True), mask=mask_B)
        tl.store(result_B + 2 * STEPS, model_logprob_B.to(tl.int32, bitcast=True), mask=mask_B)
        if WORDS == 4:
            tl.store(result_B + 3 * STEPS, tl.load(route_ptr + row_B, mask=busy_B, other=0), mask=mask_B)
        left_B = tl.maximum(remaining_B - 1, 0)
        for k in tl.static_range(STOPS):
            left_B = tl.where(tl.load(stop_ptr + row_B * STOPS + k, mask=mask_B, other=-1) == drawn_B, 0, left_B)
        position_B = tl.load(position_ptr + row_B, mask=mask_B, other=0) + 1
        tl.store(token_ptr + row_B, drawn_B, mask=busy_B)
        tl.store(remaining_ptr + row_B, left_B, mask=mask_B)
        tl.store(position_ptr + row_B, tl.where(left_B == 0, 0, position_B), mask=mask_B)
    tl.debug_barrier()  # every warp has read the step's number
    tl.store(next_ptr, step + 1)


def advance(drawn: SampledTokens, rows: DecodeRows, route_R: Tensor | None = None) -> None:
    assert rows.stop_RK.is_contiguous() and rows.results_RMN.is_contiguous()
    assert rows.results_RMN.shape[1] == 3 + (route_R is not None)
    _advance_kernel[(1,)](
        *drawn, *rows, drawn.drawn_R if route_R is None else route_R,  # read only if there are four words
        drawn.drawn_R.shape[0],
        WORDS=rows.results_RMN.shape[1], STEPS=rows.results_RMN.shape[2], STOPS=rows.stop_RK.shape[1], BLOCK=BLOCK,
        **pdl.options(rows.token_R, num_warps=NUM_WARPS),
    )  # fmt: skip
