"""The RMSNorm of rows whose words other ranks store, on GPUs: a program waits for those of one row, from all ranks, and
normalizes it. It begins and ends as a launch that only takes words (`push/triton`), and a kernel that would follow that
one is saved.

The results have the words of `ops.norm`: the row goes through the result's memory, from which it is loaded as that
kernel loads it, so that its squares are added in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import pdl
from ...ops.norm.triton import ROW_THREAD
from ...ops.records import PARITIES, SLOT, Norm
from ...ops.rows import ALIGNMENT, num_warps
from .memory import SharedMemory
from .triton import POLLS, awaited, count_launch

WARP = 32  # threads


def has_words_of_norm(columns: int, ranks: int) -> bool:
    """Whether rows of which a rank has so many columns are loaded as `ops.norm` loads them, and no two threads of a
    program wait for the same word, so that all see that it has come in the same poll."""
    return columns % ALIGNMENT == 0 and columns * ranks > WARP


@triton.jit(do_not_specialize=["rank"])  # one binary for all ranks
def _take_norm_kernel(
    out_ptr,
    out_words_ptr,  # the same memory as pairs of elements
    weight_ptr,
    addresses_ptr,
    state_ptr,
    rank,
    patience,
    eps,
    OFFSET: tl.constexpr,  # of the weights
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    PARITIES: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        pdl.gdc_launch_dependents()
    WORDS: tl.constexpr = WIDTH // 2
    OWN: tl.constexpr = WORDS // RANKS  # a rank's words of a row
    row = tl.program_id(0).to(tl.int64)
    column, word = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2)
    mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    launch = tl.load(state_ptr, cache_modifier=".cg") + 1  # never an old copy
    from_ptr = tl.multiple_of(tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64)), 16)
    late_ptr = tl.load(addresses_ptr + RANKS).to(tl.pointer_type(tl.int64))
    sender = word // OWN
    at = (launch % PARITIES * (RANKS * SLOT) + row * OWN) + (sender * SLOT + word % OWN)
    marked = awaited(from_ptr, at, word < WORDS, launch, patience, late_ptr, launch * RANKS + sender, POLLS)
    tl.store(out_words_ptr + row * WORDS + word, marked.to(tl.int32), mask=word < WORDS)
    tl.debug_barrier()
    out_ptr += row * WIDTH + column
    x = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.debug_barrier()
    tl.store(out_ptr, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)
    count_launch(state_ptr, launch, tl.num_programs(0), PDL)


def take_norm(out: Tensor, norm: Norm, memory: SharedMemory) -> Tensor:
    """The norm of the rows whose words all ranks store in this launch, this one too.

    Args:
        out: for the result, [rows, all ranks' columns] of 16 bits; nobody may read or write it since before this rank's
            words were computed.
        norm: its weights, as `aligned_rows` makes them, were complete before that too, as they are loaded at once.
    """
    width = out.shape[1]
    _take_norm_kernel[(out.shape[0],)](
        out, out.view(torch.int32), norm.weight_D, memory.addresses, memory.state, memory.rank,
        memory.patience, norm.eps,
        OFFSET=norm.offset, WIDTH=width, RANKS=memory.ranks, PARITIES=PARITIES, SLOT=SLOT,
        BLOCK=triton.next_power_of_2(width), POLLS=POLLS, **pdl.options(out, num_warps=num_warps(width, ROW_THREAD)),
    )  # fmt: skip
    return out
