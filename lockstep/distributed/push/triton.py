"""`push_columns` on GPUs that reach one another's memory: each program stores a piece of this rank's words into another
rank's memory, waits for the same piece of that rank's words, and writes them to the output. See `push/operator.py` for
the semantics.

Launches are numbered consecutively, alike on all ranks. Each 32-bit word is stored together with the launch number, its
mark, in one 64-bit store, which arrives whole: whoever reads the mark has the word. A push therefore has the latency of
a store, without a fence or a separate signal. Marks are never reset, so the launches of a replayed graph need nothing
from the host. Two slots alternate: a rank stores at launch n + 2 only after receiving the other rank's words of launch
n + 1, which that rank stored after it had read those of launch n. Slots hold marked words and nothing else, so no data
can be mistaken for a mark.

A launch releases its dependents at once (programmatic dependent launch, `ops.pdl`): the product that follows loads its
weights while words are in transit. By then all programs of the push are running, so early dependents cannot take an SM
that one of them needs.

A product's kernel may store its words itself (`triton_products`), those for its own rank too. The launch that takes
them begins while that kernel computes, which releases it once all kernels before it have ended: from then on the number
of launches is known, and nobody else uses the output's memory. It ends after that kernel, so dependents may rely on
both.

Waits are bounded: a program whose words do not come in time reports to the host and traps, which ends all work on the
device before stale words are used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import pdl
from ...ops.records import PARITIES, SLOT
from .memory import SharedMemory, shared_memory
from .operator import by_collective

BLOCK, NUM_WARPS = 1024, 4  # words that a program moves at a time, and its warps
CHUNKS = 64  # the most programs that store to one rank
POLLS = 256  # polls of the words between two reads of the clock, about 0.1 ms


@triton.jit
def _now(words):
    """The time in nanoseconds, the same for all threads of the program, each of which has some of the words."""
    by_thread = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,l", [words], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(by_thread, axis=0)


@triton.jit
def _end_all_work(late_ptr, late):
    """Report to the host, then trap."""
    tl.store(late_ptr, late)
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _all_marked(words, launch):
    """Whether every word that was read carries this launch's mark."""
    return tl.max(((words >> 32).to(tl.int32) != launch.to(tl.int32)).to(tl.int32), axis=0) == 0


@triton.jit
def awaited(from_ptr, at, inside, launch, patience, late_ptr, late, POLLS: tl.constexpr):
    """Poll until all words carry the launch's mark, and return them. On a timeout, `late` of a word that has not come
    is reported to the host."""
    unread = launch << 32
    words = tl.load(from_ptr + at, mask=inside, other=unread, volatile=True)
    polls, until = 0, launch * 0
    while not _all_marked(words, launch):
        polls += 1
        if polls == POLLS:
            polls = 0
            now = _now(words)
            if until == 0:
                until = now + patience
            if now > until:
                _end_all_work(late_ptr, tl.max(tl.where((words >> 32) == launch, 0, late), axis=0))
        words = tl.load(from_ptr + at, mask=inside, other=unread, volatile=True)
    return words


@triton.jit
def _slot(address_ptr, sender, SLOT: tl.constexpr):
    """A sender's first slot in the memory whose address is at `address_ptr`."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(tl.int64)), 16) + sender * SLOT


@triton.jit
def _place(at, width, sender, RANKS: tl.constexpr):
    """The offset in [R, RANKS * W] of a sender's word `at`, where its words are its columns."""
    return (at // width).to(tl.int64) * (RANKS * width) + sender * width + at % width


@triton.jit
def count_launch(state_ptr, launch, programs, PDL: tl.constexpr):
    """Count a launch of so many programs in its last one, when all have read the number; with PDL, once the kernel
    before it has ended."""
    if PDL:
        pdl.gdc_wait()
    tl.debug_barrier()
    if tl.atomic_add(state_ptr + 1, 1) == programs - 1:
        tl.store(state_ptr + 1, launch * 0)
        tl.store(state_ptr, launch)


@triton.jit(do_not_specialize=["rank"])  # one binary for all ranks: the first of each host compiles it
def _push_kernel(
    x_ptr, out_ptr, addresses_ptr, state_ptr, rank, rows, width, patience,
    TO_OWNERS: tl.constexpr, RANKS: tl.constexpr, PARITIES: tl.constexpr, SLOT: tl.constexpr,
    BLOCK: tl.constexpr, POLLS: tl.constexpr, STORE: tl.constexpr, TAKE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL and TAKE:
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
    if PDL and STORE:
        pdl.gdc_wait()
        if not TAKE:
            pdl.gdc_launch_dependents()  # the kernel that takes the words: only now is the number of launches known
    launch = tl.load(state_ptr, cache_modifier=".cg") + 1  # never an old copy
    parity = launch % PARITIES * (RANKS * SLOT)
    is_own = STORE and TAKE and other == rank  # these words need no slot

    if STORE and not is_own:
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            word = tl.load(own_ptr + at, mask=at < end).to(tl.int64) & 0xFFFFFFFF
            tl.store(to_ptr + parity + at, word | (launch << 32), mask=at < end, cache_modifier=".wt")

    if TAKE:
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            if is_own:
                words = tl.load(own_ptr + at, mask=at < end)
            else:
                late = launch * RANKS + other
                marked = awaited(from_ptr + parity, at, at < end, launch, patience, late_ptr, late, POLLS)
                words = marked.to(x_ptr.dtype.element_ty)
            tl.store(out_ptr + _place(at, width, other, RANKS), words, mask=at < end)
        count_launch(state_ptr, launch, RANKS * chunks, PDL and not STORE)


def push_columns(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """See `push.operator.push_columns`. Falls back to a collective for more words than a slot holds, and for none, as a
    launch without words would not wait for the other ranks."""
    words = _words(x)
    if not 0 < words.numel() // (ranks if to_owners else 1) <= SLOT:
        return by_collective(x, ranks, group, to_owners)
    return launch_push(words, to_owners, shared_memory(group)).view(x.dtype)


def launch_push(
    x: Tensor, to_owners: bool, memory: SharedMemory, store: bool = True, take: bool = True, out: Tensor | None = None
) -> Tensor:
    """`push_columns` through shared memory. The two halves may be launched separately.

    Args:
        store: store this rank's words.
        take: wait for the words of the other ranks, and count the launch.
        out: for the result; without `store`, nobody may read or write it since before `x` was computed.
    """
    assert store or out is not None or not x.is_cuda, "memory that was free when `x` was computed"
    words = _words(x)
    rows, width = words.shape[0] // (memory.ranks if to_owners else 1), words.shape[1]
    out = words.new_empty(rows, memory.ranks * width) if out is None else out.view(words.dtype)
    chunks = min(CHUNKS, max(1, triton.cdiv(rows * width, BLOCK)))
    _push_kernel[(memory.ranks, chunks)](
        words, out, memory.addresses, memory.state, memory.rank, rows, width, memory.patience,
        TO_OWNERS=to_owners, RANKS=memory.ranks, PARITIES=PARITIES, SLOT=SLOT, BLOCK=BLOCK, POLLS=POLLS,
        STORE=store, TAKE=take, **pdl.options(words, num_warps=NUM_WARPS),
    )  # fmt: skip
    return out.view(x.dtype)


def _words(x: Tensor) -> Tensor:
    """`x`, [R, W], viewed as contiguous int32 where its rows are whole, aligned 32-bit words, else as integers of its
    element size. Each of these integers is stored as 64 bits."""
    (rows, width), flat = x.shape, x.contiguous().view(-1)
    whole = flat.data_ptr() % 4 == 0 and width * x.element_size() % 4 == 0
    kind = torch.int32 if whole else {1: torch.int8, 2: torch.int16}[x.element_size()]
    return flat.view(kind).view(rows, width * x.element_size() // kind.itemsize)
