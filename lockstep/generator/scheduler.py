"""Which tokens run next: chunks of prompts, and a token of each running sequence, within the cache's capacity.

Steps are planned before the results of earlier ones are known. The scheduler counts planned steps (`clock`). A running
sequence advances by at most one position in each, so the scheduler knows when a sequence needs pages and which step is
its last without waiting for results.

When pages run out, the youngest running sequence is preempted: its pages are released and all its tokens are recomputed
later, with the same bits.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from ..config import GeneratorConfig
from ..types import SampleIdentity
from .kv_cache import KVCache
from .request import Prefill, Sequence, SharedPrefix
from .running_batch import RunningBatch

MAX_PROMPTS = 64  # prompts in a step

# A mixed step takes as long as several decode steps, so that prompts wait to be run together.
ADMISSION_SHARE = 16  # prompts wait until one slot in this many is free, while more come free
RUNNING_PER_SAMPLE = 3  # while there are slots, prompts wait until they have a sample for this many running sequences
ADMISSION_STEPS = 16  # the most steps after a mixed step that they wait for so many samples
SLOT_STEPS = 64  # the most steps after a mixed step that they wait for that share of the slots

MIN_FILL = 0.85  # of a mixed graph's prompt tokens, for graphs whose time grows with their tokens
MIN_FILL_FROM = 1024  # prompt tokens of the smallest such graph
AHEAD = 128  # tokens that a sequence gets pages for at a time, while pages are plentiful


@dataclass
class Chunk:
    """Tokens `start : start + count` of a prefill, to run in this step; `started`: its samples that begin to decode."""

    prefill: Prefill
    start: int
    count: int
    started: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Queues of waiting prefills and running sequences, oldest first.

    Attributes:
        clock: steps planned so far, decode and mixed.
        max_tokens: the most prompt tokens in a step.
        sizes: numbers of prompt tokens that mixed steps have graphs for, largest first; empty: steps run eagerly.
        cached_tokens: prompt tokens that were found in the cache so far.
    """

    def __init__(self, config: GeneratorConfig, cache: KVCache, rows: RunningBatch) -> None:
        self.config, self.cache, self.rows = config, cache, rows
        self.waiting: deque[Prefill] = deque()
        self.running: list[Sequence] = []
        self.preemptions = self.cached_tokens = self.clock = 0
        self.max_tokens = config.max_num_batched_tokens
        self.sizes: list[int] = []
        self._active: deque[Prefill] = deque()  # started: they hold pages and a row
        self._ending: list[Prefill] = []  # they too; their last tokens are in the step being planned
        self._leases: list[tuple[int, int, Sequence]] = []  # heap: the clock until which pages last, the lease's id
        self._lease = itertools.count(1)
        self._admitted = 0  # waiting prefills that were worth admitting before, when a step had no room for them
        self._last_mixed = -ADMISSION_STEPS  # the clock after the latest mixed step
        self._last_end = -ADMISSION_STEPS  # the clock when a sequence last left its slot
        self._prefixes_step: SampleIdentity | None = None  # the training step of `_prefixes`; group and sample are 0
        self._prefixes: dict[int, SharedPrefix] = {}  # by group, the prefix of its prompt

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self._active)

    def digest(self) -> str:
        """A digest of all state that decides which tokens run next and where; equal on ranks that generate together."""
        running = [(s.request_id, s.identity.sample, s.row, s.length, s.token_ids[-1:], s.pages) for s in self.running]
        waiting = [(p.samples[0].request_id, len(p.samples), len(p.token_ids), p.num_cached) for p in self.waiting]
        state = self.clock, self.preemptions, self.max_tokens, self.cache.num_free, running, waiting
        return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()

    def schedule_prefill(self, version: int) -> list[Chunk]:
        """Choose this step's prompt tokens, within the budget. Started prefills that it has no room for come first in
        the next step."""
        budget = self.max_tokens
        slots = self.config.max_num_seqs - len(self.running)
        self._admitted = max(min(self._admitted, len(self.waiting)), self._num_to_admit(slots))
        chunks: list[Chunk] = []
        while budget > 0 and len(chunks) < MAX_PROMPTS and (self._active or (self._admitted and slots > 0)):
            prefill = self._active.popleft() if self._active else self._start(version)
            if prefill is None:
                self._admitted = 0
                break
            if prefill.cache_version != version:
                prefill.cache_version = -1
            remaining = prefill.remaining
            count = min(budget, remaining)
            chunks.append(Chunk(prefill, prefill.num_cached, count))
            budget -= count
            slots -= len(prefill.samples)
        if self.sizes and self.running:
            self._postpone_padded(chunks, self.max_tokens - budget)
        for chunk in chunks:
            chunk.prefill.num_cached += chunk.count
            if chunk.prefill.num_cached == len(chunk.prefill.token_ids):
                self._ending.append(chunk.prefill)
            elif chunk.prefill not in self._active:
                self._active.appendleft(chunk.prefill)
            self._last_mixed = self.clock + 1
        return chunks

    def _postpone_padded(self, chunks: list[Chunk], tokens: int) -> None:
        """Postpone tokens beyond the next smaller graph, if in the larger one too many would be padding, which costs as
        much as tokens do."""
        size = min((size for size in self.sizes if size >= tokens), default=tokens)
        filled = max((size for size in self.sizes if MIN_FILL_FROM <= size <= tokens), default=0)
        over = tokens - filled if filled and tokens < MIN_FILL * size else 0
        while over:
            chunk = chunks[-1]
            count = min(over, chunk.count)
            over, chunk.count = over - count, chunk.count - count
            if not chunk.count:
                self._active.appendleft(chunks.pop().prefill)

    def _num_to_admit(self, slots: int) -> int:
        """How many waiting prefills to admit; none while they, or the slots for them, are too few to be worth delaying
        the running sequences' decoding. Prompts that come one by one, as after tool calls, are thus run in batches."""
        needed, samples, fitting = len(self.running) // RUNNING_PER_SAMPLE, 0, 0
        for prefill in self.waiting:
            fitting += samples < slots
            samples += len(prefill.samples)
            if samples > max(slots, needed):
                break
        if not self.running:
            return fitting
        waited = self.clock - self._last_mixed
        more_slots_expected = waited < SLOT_STEPS and self.clock - self._last_end < ADMISSION_STEPS
        too_few_slots = slots < min(samples, self.config.max_num_seqs // ADMISSION_SHARE)
        enough_samples = samples >= needed or samples > slots or waited >= ADMISSION_STEPS
        return fitting if enough_samples and not (too_few_slots and more_slots_expected) else 0

    def _start(self, version: int) -> Prefill | None:
        """Give the first waiting prefill its pages (including prefix hits) and a row; None if they do not fit now. A
        free page stays in reserve for each running sequence, lest admission cause a preemption at once."""
        prefill = self.waiting[0]
        cacheable = prefill.token_ids[:-1]  # the last token always runs: its hidden state is needed
        hits, cached = self.cache.match(cacheable, version)
        needed = self.cache.pages_for(len(prefill.token_ids)) - len(hits)
        pages = self.cache.allocate(needed) if self.cache.num_free >= needed + len(self.running) else None
        if pages is None:
            self.cache.release(hits)
            return None
        self.waiting.popleft()
        self._admitted -= 1
        prefill.pages = hits + pages
        prefill.num_cached = cached
        self.cached_tokens += prefill.num_cached
        prefill.cache_version = version
        prefill.row = self.rows.take_row()
        self.rows.set_pages(prefill.row, 0, prefill.pages)
        return prefill

    def fork(self, prefill: Prefill) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Give the samples of a prefill that ends in this step their rows and pages; they sample in this step.

        Full pages are shared, and a partial page is copied. Samples without a free page or slot wait for a prefill of
        their own, which hits the shared pages. Returns the samples, and (source, target) of each page to copy once the
        prefill has run.
        """
        self._ending.remove(prefill)
        length = len(prefill.token_ids)  # also of each sample
        full, partial = divmod(length, self.cache.page_size)
        shared = self._shared_prefix(prefill, full)
        started: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        for i, sample in enumerate(prefill.samples):
            row, pages = prefill.row, prefill.pages
            if i > 0:
                has_slot = len(self.running) < self.config.max_num_seqs
                copy = self.cache.allocate(1 if partial else 0) if has_slot else None
                if copy is None:
                    self.waiting.appendleft(Prefill(prefill.token_ids, prefill.samples[i:]))
                    break
                copies += [(prefill.pages[full], page) for page in copy]
                self.cache.share(prefill.pages[:full])
                row, pages = self.rows.take_row(), prefill.pages[:full] + copy
                self.rows.set_pages(row, 0, pages)
            sample.pages = list(pages)
            sample.cache_version = prefill.cache_version
            sample.shared, sample.end = shared, self.clock + sample.remaining
            self.rows.load(row, sample)
            self.running.append(sample)
            held = len(pages) * self.cache.page_size
            self._note_lease(sample, self.clock + 1 + held - length)
            started.append(sample)
        return started, copies

    def _shared_prefix(self, prefill: Prefill, full: int) -> SharedPrefix | None:
        """The prefix that the samples of a prefill share. A single sample, which was preempted or starts a later turn,
        shares its prompt's prefix with others if it has it in the same pages."""
        identity = prefill.samples[0].identity
        step = replace(identity, group=0, sample=0)
        if step != self._prefixes_step:
            self._prefixes_step, self._prefixes = step, {}
        if len(prefill.samples) > 1:
            self._prefixes[identity.group] = SharedPrefix(full * self.cache.page_size, prefill.pages[:full])
        found = self._prefixes.get(identity.group)
        return found if found and found.pages == prefill.pages[: len(found.pages)] else None

    def register(self, tokens: list[int], pages: list[int], version: int) -> None:
        """Make pages with the keys and values of these tokens findable; not those of several versions (-1)."""
        if self.config.prefix_caching and version >= 0:
            self.cache.register(tokens, pages, version)

    def reserve(self, steps: int) -> int:
        """Give running sequences pages for `steps` more steps; returns how many steps the pages of all of them last."""
        while self._leases and self._leases[0][0] < self.clock + steps:
            lasts, lease, sequence = self._leases[0]
            if sequence.lease != lease:  # stale: it no longer runs, or has run anew since
                heapq.heappop(self._leases)
                continue
            pages = self._allocate_more(sequence, self.clock + steps - lasts)
            if pages is None:
                return lasts - self.clock
            heapq.heappop(self._leases)
            self.rows.set_pages(sequence.row, len(sequence.pages), pages)
            sequence.pages += pages
            self._note_lease(sequence, lasts + len(pages) * self.cache.page_size)
        return steps

    def _allocate_more(self, sequence: Sequence, tokens: int) -> list[int] | None:
        """Pages for `tokens` more positions, or for more while pages are plentiful; None if too few are free."""
        needed = self.cache.pages_for(tokens)
        limit = self.cache.pages_for(sequence.positions) - len(sequence.pages)
        wanted = min(max(needed, self.cache.pages_for(AHEAD)), limit)
        plenty = self.cache.num_free >= wanted + len(self.running)
        return self.cache.allocate(wanted if plenty else min(needed, limit))

    def _note_lease(self, sequence: Sequence, lasts: int) -> None:
        """Note until when the sequence's pages last, unless they last to its end."""
        sequence.lease = 0
        if len(sequence.pages) * self.cache.page_size < sequence.positions:
            sequence.lease = next(self._lease)
            heapq.heappush(self._leases, (lasts, sequence.lease, sequence))

    def preempt(self, sequence: Sequence) -> None:
        """Release a running sequence's pages, and put it first in the queue to recompute all its tokens."""
        self.preemptions += 1
        self.release(sequence)
        self.waiting.appendleft(Prefill(sequence.prompt_ids + sequence.token_ids, [sequence]))

    def release(self, sequence: Sequence, register: bool = True) -> None:
        """Remove a running sequence. With `register`, its pages can be found again by their tokens."""
        self.running.remove(sequence)
        self._last_end = self.clock
        if register:
            tokens = (sequence.prompt_ids + sequence.token_ids)[:-1]
            self.register(tokens, sequence.pages, sequence.cache_version)
        self.cache.release(sequence.pages)
        self.rows.release(sequence.row)
        sequence.pages, sequence.lease = [], 0

    def remove_request(self, request_id: int) -> list[Sequence]:
        """Remove all samples of a request, and return those that had not finished. Their pages are not registered, as
        the step that was to fill them may have been interrupted."""
        dropped = [s for s in self.running if s.request_id == request_id]
        for sequence in dropped:
            self.release(sequence, register=False)
        for prefill in [p for p in self.waiting if p.samples[0].request_id == request_id]:
            self.waiting.remove(prefill)
            dropped += prefill.samples
        for prefill in [p for p in (*self._ending, *self._active) if p.samples[0].request_id == request_id]:
            self.cache.release(prefill.pages)
            self.rows.release(prefill.row)
            self._ending = [p for p in self._ending if p is not prefill]
            self._active = deque(p for p in self._active if p is not prefill)
            dropped += prefill.samples
        return dropped
