"""Which tokens run next: prompts in chunks, running sequences a token each, under the cache's capacity.

When pages run out the youngest running sequence is preempted: its pages are released and all its tokens run again
later, which gives the same bits. Nothing is ever lost to a lack of memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..config import GeneratorConfig
from .kv_cache import KVCache
from .request import Prefill, Sequence


@dataclass
class Chunk:
    """Tokens `start : start + count` of a prefill, to run in this step."""

    prefill: Prefill
    start: int
    count: int


class Scheduler:
    """Queues of waiting prefills and running sequences, oldest first."""

    def __init__(self, config: GeneratorConfig, cache: KVCache) -> None:
        self.config = config
        self.cache = cache
        self.waiting: deque[Prefill] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._active: Prefill | None = None  # started, and holding pages

    @property
    def busy(self) -> bool:
        """Whether anything is left to run."""
        return bool(self.waiting or self.running or self._active)

    def schedule_prefill(self, version: int) -> list[Chunk]:
        """Prompt tokens for this step within the token budget; at most the last prefill stays unfinished."""
        budget = self.config.max_num_batched_tokens
        slots = self.config.max_num_seqs - len(self.running)
        chunks: list[Chunk] = []
        while budget > 0 and (self._active or (self.waiting and slots > 0)):
            prefill = self._active or self._start(version)
            if prefill is None:
                break
            if prefill.cache_version != version:
                prefill.cache_version = -1
            count = min(budget, prefill.remaining)
            chunks.append(Chunk(prefill, prefill.num_cached, count))
            prefill.num_cached += count
            budget -= count
            self._active = prefill if prefill.remaining else None
            slots -= len(prefill.samples)
        return chunks

    def _start(self, version: int) -> Prefill | None:
        """Give the first waiting prefill its pages, prefix hits included; None when they do not fit now.

        A free page for each running sequence and for the samples' first tokens stays in reserve, so that admission
        does not cause preemption at once.
        """
        prefill = self.waiting[0]
        cacheable = prefill.token_ids[:-1]  # the last token always runs: its hidden state is needed
        hits = self.cache.match(cacheable, version) if self.config.prefix_caching else []
        needed = self.cache.pages_for(len(prefill.token_ids)) - len(hits)
        reserve = len(self.running) if self.running else 0
        pages = self.cache.allocate(needed) if self.cache.num_free >= needed + reserve else None
        if pages is None:
            self.cache.release(hits)
            return None
        self.waiting.popleft()
        prefill.pages = hits + pages
        prefill.num_cached = len(hits) * self.cache.page_size
        prefill.cache_version = version
        return prefill

    def fork(self, prefill: Prefill) -> list[Sequence]:
        """Start the samples of a finished prefill: full pages are shared, a page in part is copied.

        Samples that find no page or no slot wait for a prefill of their own, which hits the shared pages.
        """
        full, partial = divmod(len(prefill.token_ids), self.cache.page_size)
        if prefill.cache_version >= 0:
            self.cache.register(prefill.token_ids, prefill.pages, prefill.cache_version)
        started: list[Sequence] = []
        for i, sample in enumerate(prefill.samples):
            pages = prefill.pages
            if i > 0:
                copy = self.cache.allocate(1 if partial else 0)
                if copy is None or len(self.running) >= self.config.max_num_seqs:
                    self.cache.release(copy or [])
                    self.waiting.appendleft(Prefill(prefill.token_ids, prefill.samples[i:]))
                    break
                if partial:
                    self.cache.copy_page(prefill.pages[full], copy[0])
                self.cache.share(prefill.pages[:full])
                pages = prefill.pages[:full] + copy
            sample.pages = list(pages)
            sample.num_cached = len(prefill.token_ids)
            sample.cache_version = prefill.cache_version
            started.append(sample)
            self.running.append(sample)
        return started

    def reserve_decode(self, steps: int) -> int:
        """Give every running sequence pages for up to `steps` more tokens; returns how many steps fit.

        Preempts the youngest sequences when not even one step fits for all.
        """
        steps = min(steps, *(s.remaining for s in self.running))
        while steps > 1 and self._pages_missing(steps) > self.cache.num_free:
            steps -= 1
        while self._pages_missing(steps) > self.cache.num_free:
            self.preempt(self.running[-1])
        for sequence in self.running:
            pages = self.cache.allocate(self._missing(sequence, steps))
            assert pages is not None
            sequence.pages += pages
        return steps

    def _missing(self, sequence: Sequence, steps: int) -> int:
        return max(0, self.cache.pages_for(sequence.num_cached + steps) - len(sequence.pages))

    def _pages_missing(self, steps: int) -> int:
        return sum(self._missing(s, steps) for s in self.running)

    def preempt(self, sequence: Sequence) -> None:
        """Release a running sequence's pages; it waits, first in line, to run all its tokens again."""
        self.preemptions += 1
        self.release(sequence)
        self.waiting.appendleft(Prefill(sequence.prompt_ids + sequence.token_ids, [sequence]))

    def release(self, sequence: Sequence, register: bool = True) -> None:
        """Take a sequence out of the running ones; registered, its full pages can be found again by their tokens."""
        self.running.remove(sequence)
        tokens = (sequence.prompt_ids + sequence.token_ids)[: sequence.num_cached]
        if register and sequence.cache_version >= 0:
            self.cache.register(tokens, sequence.pages, sequence.cache_version)
        self.cache.release(sequence.pages)
        sequence.pages = []
        sequence.num_cached = 0

    def drop(self, request_id: int) -> list[Sequence]:
        """Remove all samples of a request, wherever they are; returns those that had not finished.

        Their pages are not registered: the step that was to fill them may have been interrupted.
        """
        dropped = [s for s in self.running if s.request_id == request_id]
        for sequence in dropped:
            self.release(sequence, register=False)
        for prefill in [*self.waiting, *([self._active] if self._active else [])]:
            if prefill.samples[0].request_id == request_id:
                dropped += prefill.samples
                if prefill is self._active:
                    self.cache.release(prefill.pages)
                    self._active = None
                else:
                    self.waiting.remove(prefill)
        return dropped
