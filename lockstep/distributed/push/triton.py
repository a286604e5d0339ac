"""`push_columns` on GPUs that reach one another's memory: every program stores a piece of this rank's words into one
other's memory, waits for the same piece of that one's words, and lays them out. Meaning: `push/operator.py`.

A launch has a number, one more than the last one's, the same on all ranks. Each word of 32 bits travels beside it, its
mark, in one store of 64, which arrives whole: whoever finds the mark has the word. So a push takes the way of a store
and no more: no fence, and no signal behind it. Marks are never set back, and launches of a replayed graph need nothing
of the host. Slots alternate: a rank stores at launch n + 2 only after it has got the words of launch n + 1 of the
other, who had laid out those of launch n before that. Slots hold marked words alone, so that no other word is taken
for a mark.

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
from .memory import PARITIES, SLOT, SharedMemory, shared_memory
from .operator import by_collective

BLOCK, NUM_WARPS = 1024, 4  # words at a time, and who moves them
CHUNKS = 64  # programs at most that store to one rank
POLLS = 256  # of words, about 0.1 ms, between two looks at the clock


@triton.jit
def _now():
    """Nanoseconds, one number for all threads."""
    by_thread = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [tl.arange(0, 128)], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(by_thread, axis=0)


@triton.jit
def _end_all_work(late_ptr, late):
    """Tell the host first."""
    tl.store(late_ptr, late)
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _all_marked(words, launch):
    """Whether each word that was read is one of this launch's."""
    return tl.max(((words >> 32).to(tl.int32) != launch.to(tl.int32)).to(tl.int32), axis=0) == 0


@triton.jit
def _awaited(from_ptr, at, inside, launch, patience, late_ptr, late, POLLS: tl.constexpr):
    """Words with the launch's mark, as soon as all are there; `late` is for the host, should they not come."""
    unread = launch << 32
    words = tl.load(from_ptr + at, mask=inside, other=unread, volatile=True)
    polls, until = 0, tl.zeros([], tl.int64)
    while not _all_marked(words, launch):
        words = tl.load(from_ptr + at, mask=inside, other=unread, volatile=True)
        polls += 1
        if polls == POLLS:
            polls = 0
            now = _now()
            if until == 0:
                until = now + patience
            if now > until:
                _end_all_work(late_ptr, late)
    return words


@triton.jit
def _slot(address_ptr, sender, SLOT: tl.constexpr):
    """Of a sender in the memory at an address: the first of its two."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(tl.int64)), 16) + sender * SLOT


@triton.jit
def _place(at, width, sender, RANKS: tl.constexpr):
    """Where a sender's words, one after another, lie as its columns of [R, RANKS * W]."""
    return (at // width).to(tl.int64) * (RANKS * width) + sender * width + at % width


@triton.jit(do_not_specialize=["rank"])  # of a host's ranks the first compiles it for all
def _push_kernel(
    x_ptr, out_ptr, addresses_ptr, state_ptr, rank, rows, width, patience,
    TO_OWNERS: tl.constexpr, RANKS: tl.constexpr, PARITIES: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr, POLLS: tl.constexpr, STORE: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl.gdc_launch_dependents()
    other, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size = rows * width
    piece = tl.cdiv(tl.cdiv(size, chunks), BLOCK) * BLOCK
    begin = chunk * piece
    end = tl.minimum(begin + piece, size)
    to_ptr = _slot(addresses_ptr + other, rank, SLOT)
    from_ptr = _slot(addresses_ptr + rank, other, SLOT)
    late_ptr = tl.load(addresses_ptr + RANKS).to(tl.pointer_type(tl.int64))
    own_ptr = x_ptr
    if TO_OWNERS:
        own_ptr += other * size
    if PDL:
        pdl.gdc_wait()
    launch = tl.load(state_ptr) + 1
    parity = launch % PARITIES * (RANKS * SLOT)

    if STORE and other != rank:
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            word = tl.load(own_ptr + at, mask=at < end).to(tl.int64) & 0xFFFFFFFF
            tl.store(to_ptr + parity + at, word | (launch << 32), mask=at < end, cache_modifier=".wt")

    if TAKE:
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            if other == rank:
                words = tl.load(own_ptr + at, mask=at < end)
            else:
                late = launch * RANKS + other
                marked = _awaited(from_ptr + parity, at, at < end, launch, patience, late_ptr, late, POLLS)
                words = marked.to(x_ptr.dtype.element_ty)
            tl.store(out_ptr + _place(at, width, other, RANKS), words, mask=at < end)
        tl.debug_barrier()
        if tl.atomic_add(state_ptr + 1, 1) == RANKS * chunks - 1:  # the last to end: all have read the number
            tl.store(state_ptr + 1, tl.zeros([], tl.int64))
            tl.store(state_ptr, launch)


def push_columns(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """See `push.operator.push_columns`. What does not fit into a slot is moved by a collective; so is nothing, as a
    launch without words would not wait for the others."""
    words = _words(x)
    if not 0 < words.numel() // (ranks if to_owners else 1) <= SLOT:
        return by_collective(x, ranks, group, to_owners)
    return pushed(words, to_owners, shared_memory(group)).view(x.dtype)


def pushed(x: Tensor, to_owners: bool, memory: SharedMemory, store: bool = True, take: bool = True) -> Tensor:
    """`push_columns` through memory. A launch may do its first half, or its second half, alone.

    Args:
        store: store this rank's words. take: wait for those of others, and count the launch.
    """
    words = _words(x)
    rows, width = words.shape[0] // (memory.ranks if to_owners else 1), words.shape[1]
    out = words.new_empty(rows, memory.ranks * width)
    chunks = min(CHUNKS, max(1, triton.cdiv(rows * width, BLOCK)))
    _push_kernel[(memory.ranks, chunks)](
        words, out, memory.addresses, memory.state, memory.rank, rows, width, memory.patience,
        TO_OWNERS=to_owners, RANKS=memory.ranks, PARITIES=PARITIES, SLOT=SLOT, BLOCK=BLOCK, POLLS=POLLS,
        STORE=store, TAKE=take, **pdl.options(words, num_warps=NUM_WARPS),
    )  # fmt: skip
    return out.view(x.dtype)


def _words(x: Tensor) -> Tensor:
    """[R, W], contiguous, as the widest integers of 32 bits at most that rows consist of: each travels in 64."""
    (rows, width), flat = x.shape, x.contiguous().view(-1)
    whole = flat.data_ptr() % 4 == 0 and width * x.element_size() % 4 == 0
    kind = torch.int32 if whole else {1: torch.int8, 2: torch.int16}[x.element_size()]
    return flat.view(kind).view(rows, width * x.element_size() // kind.itemsize)
