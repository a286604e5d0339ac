"""The launches on which the generator's graphs must have eager's bits before the first step (`check.against_eager`).

Every graph runs with all its rows busy and with a single one busy. Contexts range from one position to the longest that
the block table and the cache hold. Sequences share their earlier pages (the longest ones as a group), and each writes
to a page of its own. Keys, values and tokens are random but reproducible.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..ops import KEY_TILE
from ..types import SampleIdentity, SamplingParams
from .kv_cache import KVCache
from .prefill_batch import MixedSizes, lay_out
from .request import Prefill, Sequence
from .running_batch import GROUP, RunningBatch
from .scheduler import Chunk


@dataclass(frozen=True)
class _Pages:
    """The first `shared` pages begin every sequence; then comes one for each of `rows`; then `prompt` pages."""

    shared: int
    rows: int
    prompt: int

    @staticmethod
    def of(cache: KVCache, rows: int, width: int, prompt_tokens: int) -> _Pages:
        own = min(rows, cache.num_pages)
        prompt = min(cache.pages_for(prompt_tokens), width, cache.num_pages - own)
        return _Pages(min(width - 1, cache.num_pages - own - prompt), own, prompt)

    @property
    def used(self) -> int:
        return self.shared + self.rows + self.prompt

    def views(self, cache: KVCache) -> dict[str, list[Tensor]]:
        views = {"kv k": [cache.k[:, : self.used]], "kv v": [cache.v[:, : self.used]]}
        return views if cache.routes is None else {**views, "kv routes": [cache.routes[: self.used]]}


@dataclass(frozen=True)
class CaseBuilder:
    """Cases of the generator's programs, for a model with `vocabulary` token ids."""

    rows: RunningBatch
    cache: KVCache
    vocabulary: int

    def decode_cases(self, program: graph.Program, size: int) -> list[graph.Case]:
        """Decode steps of `size` rows, for each kind of sampling that has a graph."""
        pages = _Pages.of(self.cache, size, self.rows.width, 0)
        cases = []
        for made in program.graphs.values():
            statics = made.captured.statics
            for name, busy in {f"{size} rows": pages.rows, f"one of {size} rows": 1}.items():
                load = partial(self._load, size, pages, busy, **statics)  # type: ignore[arg-type]
                cases.append(graph.Case(name, {}, statics, load, **self._cache_fields(pages)))
        return cases

    def mixed_cases(self, batch: Tensor, sizes: MixedSizes) -> list[graph.Case]:
        """Mixed steps: with a prompt that fills the batch and starts a sample, with a prompt of one token, and with
        none. `batch` is the memory of the step's `MixedBatch`."""
        cache = self.cache
        pages = _Pages.of(cache, sizes.rows, self.rows.width, sizes.tokens)
        room = min(sizes.tokens, pages.prompt * cache.page_size)
        counts = dict.fromkeys((room, min(room, 1), 0))
        names = {n: f"{n} of {sizes.tokens} prompt tokens" for n in counts}
        return [
            graph.Case(names[n], load=partial(self._load_mixed, batch, sizes, pages, n), **self._cache_fields(pages))
            for n in counts
        ]

    def _load_mixed(self, batch: Tensor, sizes: MixedSizes, pages: _Pages, tokens: int) -> None:
        """Put a prompt of `tokens` tokens, whose sample is in row 0, into the batch, and make all other rows decode."""
        rows, chunks = self.rows, []
        self._load(sizes.rows, pages, pages.rows, truncated=True, greedy=True, grouped=True)
        if tokens:
            sample = Sequence(0, [], SamplingParams(), SampleIdentity(0, 0, 0, 0), frozenset(), row=0)
            prompt = Prefill([(7 * i + 3) % self.vocabulary for i in range(tokens)], [sample], row=0)
            chunks = [Chunk(prompt, 0, tokens, [sample])]
            held = torch.arange(pages.shared + pages.rows, pages.used, dtype=torch.int32, device=rows.device)
            rows.table[0].fill_(self.cache.null_page)[: pages.prompt].copy_(held)
            b = rows.tensors(sizes.rows)
            b["position"][0] = tokens - 1
            if pages.rows <= GROUP:  # row 0 is in the group
                b["groups"].fill_(-1)
                b["shared_len"].zero_()
        batch.copy_(lay_out(chunks, sizes, rows.null_row, pinned=False))

    def _cache_fields(self, pages: _Pages) -> dict[str, Any]:
        """The fields of a case that concern the cache. Lent memory holds nothing yet that would have to be restored."""
        about = {"touches": pages.views(self.cache), "scratch": self._null_page()}
        if self.cache.borrower is None:
            return about
        return about | {"filled_roles": ("kv",), "derived": dict.fromkeys(("kv k", "kv v"), self.cache.clear)}

    def _null_page(self) -> list[Tensor]:
        """Views of the null page, to whose first slot all idle rows and tokens write, in any order."""
        cache = self.cache
        null = slice(cache.null_page, cache.null_page + 1)
        routes = [] if cache.routes is None else [cache.routes[null]]
        return routes if cache.borrower is not None else [cache.k[:, null], cache.v[:, null], *routes]

    def _load(self, size: int, pages: _Pages, busy: int, truncated: bool, greedy: bool, grouped: bool = False) -> None:
        """Put the first `busy` rows at positions up to the longest, and make the others idle."""
        rows, cache = self.rows, self.cache
        cache.reclaim()
        b, device = rows.tensors(size), rows.device
        draw = torch.Generator(device).manual_seed(size)
        for tensor in (cache.k, cache.v):
            tensor[:, : pages.used].normal_(generator=draw)
            tensor[:, cache.null_page].zero_()
        if cache.routes is not None:
            cache.routes[: pages.used].zero_()
        row = torch.arange(size, device=device)
        active = row < busy
        longest = max(0, (pages.shared + 1) * cache.page_size - 2)
        position = torch.where(active, (row + 1) * longest // busy if busy > 1 else longest, 0)
        column = torch.arange(rows.width, device=device)
        last = (position // cache.page_size).unsqueeze(1)
        own = (pages.shared + row).clamp_max(pages.shared + pages.rows - 1).unsqueeze(1)
        table = torch.where(column < last, column, torch.where(column == last, own, cache.null_page))
        b["table"].copy_(torch.where(active.unsqueeze(1), table, cache.null_page))
        b["position"].copy_(position)
        b["token"].copy_(torch.where(active, (row * 31 + 5) % self.vocabulary, 0))
        b["remaining"].copy_(torch.where(active, 1 + row % 3, 0))
        b["stop"].fill_(-1)
        b["key"].copy_(row.unsqueeze(1) * 4 + torch.arange(4, device=device))
        b["temperature"].copy_(torch.where(row % 2 == 0, 0.0 if greedy else 0.8, 1.0))
        b["top_k"].copy_(torch.where(row % 3 == 0, 20 if truncated else 0, 0))
        b["top_p"].copy_(torch.where(row % 3 == 1, 0.9 if truncated else 1.0, 1.0))
        b["min_p"].copy_(torch.where(row % 3 == 2, 0.01 if truncated else 0.0, 0.0))
        b["next_result"].zero_()
        members = range(max(0, busy - GROUP), busy)
        common = ((members[0] + 1) * longest // busy) // cache.page_size * cache.page_size // KEY_TILE * KEY_TILE
        b["groups"].fill_(-1)
        b["shared_len"].zero_()
        if grouped and common and len(b["groups"]):
            b["groups"][0, : len(members)] = row[members.start : members.stop].int()
            b["shared_len"][members.start : members.stop] = common
