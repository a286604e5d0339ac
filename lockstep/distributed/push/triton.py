"""`push_columns` on GPUs that reach one another's memory: every program stores a piece of this rank's words into one
other's memory, signals it, waits for the same piece of that one's words, and lays them out. Meaning:
`push/operator.py`.

A launch has a number, one more than the last one's, the same on all ranks. It is what is signalled, so signals are
never set back, and launches of a replayed graph need nothing of the host. Slots alternate: a rank stores at launch
n + 2 only after it has got the words of launch n + 1 of the other, who had laid out those of launch n before that.

A launch releases its dependents at once (`ops.pdl`): the product behind it loads weights while words are on their way.
All its programs have begun by then, so what begins early takes no place that one of them needs.

No program waits for ever: one whose words do not come in time tells the host and ends all work on the device, so no
word that did not come is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import pdl
from .memory import CHUNKS, PARITIES, SLOT, SharedMemory, shared_memory
from .operator import by_collective

BLOCK, NUM_WARPS = 2048, 4
PIECE = 1 << 14  # bytes that a program stores at least
POLLS = 256  # of a signal, about 0.1 ms, between two looks at the clock


@triton.jit
def _now():
    """Nanoseconds, one number for all threads."""
    by_thread = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, 128)], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(by_thread, axis=0)


@triton.jit
def _end_all_work(late_ptr, launch):
    """Tell the host first."""
    tl.store(late_ptr, launch)
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _wait(signal_ptr, launch, patience, late_ptr, POLLS: tl.constexpr):
    """Until the signal is at least the launch's number."""
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    polls, until = 0, tl.zeros([], tl.int64)
    while seen < launch:
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        polls += 1
        if polls == POLLS:
            polls = 0
            now = _now()
            if until == 0:
                until = now + patience
            if now > until:
                _end_all_work(late_ptr, launch)


@triton.jit
def _slot(address_ptr, sender, parity, kind: tl.constexpr, RANKS: tl.constexpr, SLOT: tl.constexpr):
    address = tl.load(address_ptr) + (parity * RANKS + sender) * SLOT
    return tl.multiple_of(address.to(kind), 16)


@triton.jit
def _lay_out(source_ptr, out_ptr, begin, end, width, other, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """A rank's words, one after another, as its columns of [R, RANKS * W]."""
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(source_ptr + at, mask=at < end, cache_modifier=".cg")  # others wrote them: not of L1
        to = (at // width).to(tl.int64) * (RANKS * width) + other * width + at % width
        tl.store(out_ptr + to, words, mask=at < end)


@triton.jit(do_not_specialize=["rank"])  # of a host's ranks the first compiles it for all
def _push_kernel(
    x_ptr, out_ptr, addresses_ptr, state_ptr, rank, rows, width, patience,
    TO_OWNERS: tl.constexpr, RANKS: tl.constexpr, CHUNKS: tl.constexpr, PARITIES: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr, POLLS: tl.constexpr, STORE: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.begin(PDL)
    other, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    launch = tl.load(state_ptr) + 1
    parity = launch % PARITIES
    size = rows * width
    piece = tl.cdiv(tl.cdiv(size, chunks), BLOCK) * BLOCK
    begin = chunk * piece
    end = tl.minimum(begin + piece, size)
    own_ptr = x_ptr
    if TO_OWNERS:
        own_ptr += other * size

    if STORE and other != rank:
        to_ptr = _slot(addresses_ptr + other, rank, parity, x_ptr.dtype, RANKS, SLOT)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(to_ptr + at, tl.load(own_ptr + at, mask=at < end), mask=at < end)
        tl.debug_barrier()  # all threads' words before the one signal
        signals_ptr = tl.load(addresses_ptr + RANKS + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(signals_ptr + rank * CHUNKS + chunk, launch, sem="release", scope="sys")

    if TAKE:
        if other == rank:
            _lay_out(own_ptr, out_ptr, begin, end, width, other, RANKS, BLOCK)
        else:
            signals_ptr = tl.load(addresses_ptr + RANKS + rank).to(tl.pointer_type(tl.int64))
            late_ptr = tl.load(addresses_ptr + 2 * RANKS).to(tl.pointer_type(tl.int64))
            _wait(signals_ptr + other * CHUNKS + chunk, launch, patience, late_ptr, POLLS)
            tl.debug_barrier()
            from_ptr = _slot(addresses_ptr + rank, other, parity, x_ptr.dtype, RANKS, SLOT)
            _lay_out(from_ptr, out_ptr, begin, end, width, other, RANKS, BLOCK)
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + 1, 1) == RANKS * chunks - 1:  # the last to end: all have read the number
            tl.store(state_ptr + 1, tl.zeros([], tl.int64))
            tl.store(state_ptr, launch)


def push_columns(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """See `push.operator.push_columns`. What does not fit into a slot is moved by a collective."""
    share = x.numel() * x.element_size() // (ranks if to_owners else 1)
    if share > SLOT:
        return by_collective(x, ranks, group, to_owners)
    return pushed(x, to_owners, shared_memory(group))


def pushed(x: Tensor, to_owners: bool, memory: SharedMemory, store: bool = True, take: bool = True) -> Tensor:
    """`push_columns` through memory. A launch may do its first half, or its second half, alone.

    Args:
        store: store this rank's words. take: wait for those of others, and count the launch.
    """
    words = _words(x.contiguous())
    rows, width = words.shape[0] // (memory.ranks if to_owners else 1), words.shape[1]
    out = words.new_empty(rows, memory.ranks * width)
    chunks = min(CHUNKS, max(1, rows * width * words.element_size() // PIECE))
    _push_kernel[(memory.ranks, chunks)](
        words, out, memory.addresses, memory.state, memory.rank, rows, width, memory.patience,
        TO_OWNERS=to_owners, RANKS=memory.ranks, CHUNKS=CHUNKS, PARITIES=PARITIES, SLOT=SLOT, BLOCK=BLOCK, POLLS=POLLS,
        STORE=store, TAKE=take, **pdl.options(words, num_warps=NUM_WARPS),
    )  # fmt: skip
    return out.view(x.dtype)


def _words(x: Tensor) -> Tensor:
    """[R, W] as the widest integers that rows consist of: fewer, longer stores."""
    row = x.shape[1] * x.element_size()
    if x.data_ptr() % 4 == 0 and row % 4 == 0:
        return x.view(torch.int32)
    return x.view({1: torch.int8, 2: torch.int16}[x.element_size()])
