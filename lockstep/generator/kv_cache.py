"""The paged KV cache: reference-counted pages, found again by their tokens and the version of the weights."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import torch

from ..graph import CudaRecorder
from ..models import ModelConfig

_root_digest = struct.Struct("<q").pack  # of a version: the start of the chain of digests


def upload(values: list, device: torch.device) -> torch.Tensor:
    """Numbers as an int64 tensor on the device, copied asynchronously."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)


class KVCache:
    """Keys and values of `num_pages` pages, with the dtype and device of `like`, and the pages' reference counts.

    A page without references keeps its contents until it is allocated again, least recently used first. A full page is
    registered under a digest of the weights' version and every token up to its end. A sequence's last, partial page is
    registered under the digest of the pages before it: a sequence that continues from there, as a later turn does,
    takes the page over. An additional page, `null_page`, belongs to no sequence: idle rows write to it.

    With experts, `routes` keeps the digest of the experts that each position's token went to (`ops.route_digest`).
    `zeroes_values`: zero the values of a page when it is allocated, for attention that multiplies masked values by a
    probability of zero, which would let through NaN and infinity.

    Attributes:
        borrower: the recorder that the memory of keys and values is lent to while nothing is generated.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        like: torch.Tensor,
        zeroes_values: bool = False,
        borrower: CudaRecorder | None = None,
    ) -> None:
        heads, key, value = config.kv_cache_sizes
        shape = (config.num_layers, num_pages + 1, page_size, heads)

        def make() -> list[torch.Tensor]:
            return [torch.zeros(*shape, size, dtype=like.dtype, device=like.device) for size in (key, value)]

        self.k, self.v = make() if borrower is None else borrower.allocate_overwritable(make)
        self.borrower = borrower
        routed = config.moe_layers > 0
        self.routes = torch.zeros(num_pages + 1, page_size, dtype=torch.int32, device=like.device) if routed else None
        self.page_size = page_size
        self.kv_heads = heads
        self.num_pages = num_pages
        self.null_page = num_pages
        self.zeroes_values = zeroes_values
        self._references = [0] * num_pages
        self._digests: list[bytes | None] = [None] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._by_digest: dict[bytes, int] = {}
        self._partial_pages: dict[bytes, tuple[int, list[int]]] = {}  # partial pages, with their tokens
        self._partial_digests: dict[int, bytes] = {}  # by page, its key in `_partial_pages`

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"k": self.k, "v": self.v} | ({} if self.routes is None else {"routes": self.routes})

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self) -> list[torch.Tensor]:
        """The memory of all pages, zeroed, in contiguous pieces; the borrower must leave it zero before the next
        request. Registered pages are forgotten. Empty if a page is held or the memory has another borrower."""
        if self.num_free < self.num_pages or self.borrower is not None:
            return []
        self.clear()
        return [layer[: self.num_pages] for cache in (self.k, self.v) for layer in cache]

    def reclaim(self) -> None:
        """If the borrower has used the memory, zero it and forget registered pages. Call it before writing pages."""
        if self.borrower is None or not self.borrower.pool_used:
            return
        assert self.num_free == self.num_pages, "graphs of the trainer ran while sequences were being generated"
        self.clear()
        for memory in (self.k, self.v):
            memory[:, self.null_page].zero_()
        self.borrower.pool_used = False

    def clear(self) -> None:
        """Zero all pages, none of which may be held, and forget what is registered."""
        self._digests = [None] * self.num_pages
        for found in (self._by_digest, self._partial_pages, self._partial_digests):
            found.clear()
        for memory in (self.k, self.v):
            memory[:, : self.num_pages].zero_()

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each and nothing registered, or None if too few are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._references[page] = 1
            if page in self._partial_digests:
                del self._partial_pages[self._partial_digests.pop(page)]
            if digest := self._digests[page]:
                del self._by_digest[digest]
                self._digests[page] = None
        if self.zeroes_values and pages:
            self.v.index_fill_(1, upload(pages, self.v.device), 0)
        return pages

    def share(self, pages: list[int]) -> None:
        for page in pages:
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to each page; a sequence's later pages will be allocated again first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source, target = upload([sources, targets], self.k.device)
        for cache in (self.k, self.v):
            cache.index_copy_(1, target, cache.index_select(1, source))
        if self.routes is not None:
            self.routes.index_copy_(0, target, self.routes.index_select(0, source))

    def register(self, tokens: list[int], pages: list[int], version: int) -> None:
        """Make the pages of a sequence findable by `tokens`, whose keys and values they hold."""
        full = len(tokens) // self.page_size
        known = next((i for i, page in enumerate(pages[:full]) if self._digests[page] is None), full)
        last = self._digests[pages[known - 1]] if known else _root_digest(version)  # the digest of all pages before
        assert last is not None
        for digest, page in zip(self._chain(tokens[known * self.page_size :], last), pages[known:], strict=False):
            if page in self._partial_digests:
                del self._partial_pages[self._partial_digests.pop(page)]
            if self._digests[page] is None and digest not in self._by_digest:
                self._digests[page] = digest
                self._by_digest[digest] = page
            last = digest
        if part := tokens[full * self.page_size :]:
            for page in (pages[full], *self._partial_pages.get(last, ())[:1]):
                if page in self._partial_digests:
                    del self._partial_pages[self._partial_digests.pop(page)]
            self._partial_pages[last], self._partial_digests[pages[full]] = (pages[full], part), last

    def match(self, tokens: list[int], version: int) -> tuple[list[int], int]:
        """The longest run of registered pages that hold a prefix of `tokens`, with a reference added to each, and the
        length of that prefix. If the last page is a partial one, the caller is its only holder."""
        pages, last = [], _root_digest(version)
        for digest in self._chain(tokens, last):
            if (page := self._by_digest.get(digest)) is None:
                break
            pages.append(page)
            last = digest
        found = len(pages) * self.page_size
        page, part = self._partial_pages.get(last, (self.null_page, []))
        if part and self._references[page] == 0 and tokens[found : found + len(part)] == part:
            pages.append(page)
            found += len(part)
            if self.zeroes_values:
                self.v[:, page, len(part) :].zero_()
        self.share(pages)
        return pages, found

    def _chain(self, tokens: list[int], after: bytes) -> Iterator[bytes]:
        """The digest of each full page of `tokens`, which follow what has the digest `after`."""
        data, size = array("q", tokens).tobytes(), 8 * self.page_size
        for i in range(0, len(data) - size + 1, size):
            after = hashlib.blake2b(after + data[i : i + size], digest_size=16).digest()
            yield after
