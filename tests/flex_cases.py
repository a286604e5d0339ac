"""Inputs of attention with masks in the layouts of both roles, and what it must give, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep import ops


class Mask(NamedTuple):
    """What the operators take: the window, and the name of a registered function."""

    window: int = 0
    name: str = ""


def dilated(query: Tensor, key: Tensor) -> Tensor:
    """Every third key back from the query, and the first four."""
    return ((query - key) % 3 == 0) | (key < 4)


def sparse(query: Tensor, key: Tensor) -> Tensor:
    """Even keys: query 0 sees one, and with a window of 1 odd queries see none."""
    return key % 2 == 0


ops.register_mask("dilated", dilated)
ops.register_mask("sparse", sparse)
MASKS = {
    "causal": Mask(),
    "window of 1": Mask(1),
    "window of 20": Mask(20),
    "window of 64": Mask(64),
    "window of 100": Mask(100),
    "dilated": Mask(0, "dilated"),
    "dilated in a window": Mask(70, "dilated"),
    "rows without keys": Mask(1, "sparse"),
}

LAYOUTS = {  # padding rows, and segments: own length, prefix start, prefix length
    "alone": (0, [(67, 0, 0)]),
    "a group": (3, [(70, 0, 0), (30, 0, 70), (27, 0, 70), (1, 0, 70), (0, 0, 0)]),
    "groups": (2, [(33, 0, 0), (20, 0, 33), (41, 0, 33), (64, 0, 0), (32, 94, 64), (0, 0, 0), (5, 94, 64)]),
}


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))


class Case:
    """One sequence's queries, keys and values, wide in exponent, and its attention however it is laid out."""

    def __init__(
        self,
        length: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        module: ModuleType | None = None,
    ) -> None:
        self.length, self.device, self.module = length, device, module

        def wide(count: int) -> Tensor:
            x = torch.randn(length, count, head_dim, device=device)
            return (x * torch.exp(torch.randn_like(x))).to(dtype)

        self.q, self.k, self.v = wide(heads), wide(kv_heads), wide(kv_heads)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        """The operator's, or `triton_flex`'s; `args` are the layout and the mask."""
        *layout, window, name = args
        by, sizes = ops.Packed(*layout), ops.FlexSizes(len(q), q.shape[1], k.shape[1])
        tiles = (self.module.tiles_packed if self.module else ops.flex_tiles_packed)(by, sizes, window)
        return (self.module.packed if self.module else ops.flex_packed)(q, k, v, by, ops.FlexMask(window, name, tiles))

    def _paged(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        *layout, window, name = args
        by, sizes, cache = ops.Paged(*layout), ops.FlexSizes(len(q), q.shape[1], k.shape[2]), ops.KVPages(k, v)
        if self.module is None:
            tiles = ops.flex_tiles_paged(by, sizes, k, window)
            return ops.flex_paged(q, cache, by, ops.FlexMask(window, name, tiles))
        tiles = self.module.tiles_paged(by, sizes, *k.shape[:2], window)
        return self.module.paged(q, cache, by, ops.FlexMask(window, name, tiles))

    def int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def packed(self, mask: Mask) -> Tensor:
        """The whole as one segment."""
        layout = (self.int32(0, self.length), self.int32(0), self.int32(0), self.length)
        return self._packed(self.q, self.k, self.v, *layout, *mask)

    def among(self, mask: Mask, before: int, after: int) -> Tensor:
        """The whole between segments of NaN, and padding of NaN after them."""
        nan = [torch.full_like(x[:1], torch.nan) for x in (self.q, self.k, self.v)]
        q, k, v = (
            torch.cat((n.expand(before, -1, -1), x, n.expand(after + 3, -1, -1)))
            for n, x in zip(nan, (self.q, self.k, self.v), strict=True)
        )
        starts = self.int32(0, before, before + self.length, before + self.length + after)
        out = self._packed(q, k, v, starts, self.int32(0, 0, 0), self.int32(0, 0, 0), len(q), *mask)
        assert not out[-3:].any(), "padding rows must be zero"
        return out[before : before + self.length]

    def after_prefix(self, mask: Mask, prefix: int, gap: int = 5) -> Tensor:
        """A shared prefix, a segment of NaN after it, and the rest after it too; the rows of the rest."""
        q, k, v = (
            torch.cat((x[:prefix], torch.full_like(x[:gap], torch.nan), x[prefix:])) for x in (self.q, self.k, self.v)
        )
        starts = self.int32(0, prefix, prefix + gap, self.length + gap)
        layout = (starts, self.int32(0, 0, 0), self.int32(0, prefix, prefix), self.length)
        return self._packed(q, k, v, *layout, *mask)[prefix + gap :]

    def cache(self, page_size: int, end: int, rest: float) -> tuple[Tensor, Tensor, Tensor]:
        """The first `end` positions in shuffled pages, their block table with a page of another's at its end; NaN in
        pages that are not the sequence's, `rest` at positions that do not exist yet."""
        pages = -(-self.length // page_size)
        table = torch.randperm(pages + 3, device=self.device)[: pages + 1].int()
        position = torch.arange(pages * page_size, device=self.device)
        slots = table[position // page_size].long() * page_size + position % page_size
        caches = []
        for x in (self.k, self.v):
            cache = torch.full(((pages + 3) * page_size, *x.shape[1:]), torch.nan, dtype=x.dtype, device=self.device)
            cache[slots] = rest
            cache[slots[:end]] = x[:end]
            caches.append(cache.unflatten(0, (pages + 3, page_size)))
        return caches[0], caches[1], table.unsqueeze(0)

    def prefilled(self, mask: Mask, page_size: int, cuts: Sequence[int], rest: float = torch.nan) -> Tensor:
        """In chunks that end at `cuts` and at the end."""
        chunks = []
        for start, end in zip([0, *cuts], [*cuts, self.length], strict=True):
            lengths = (self.int32(0, end - start), self.int32(end), end - start, self.length)
            chunks.append(self._paged(self.q[start:end], *self.cache(page_size, end, rest), *lengths, *mask))
        return torch.cat(chunks)

    def decoded(self, mask: Mask, page_size: int, positions: Sequence[int]) -> Tensor:
        """Queries at `positions` as a batch, one token each; keys after a query are there, but not its to see."""
        *caches, table = self.cache(page_size, self.length, 0.0)
        tables, starts = table.expand(len(positions), -1).contiguous(), self.int32(*range(len(positions) + 1))
        context = self.int32(*positions) + 1
        return self._paged(self.q[list(positions)], *caches, tables, starts, context, 1, self.length, *mask)

    def exact(self, mask: Mask) -> Tensor:
        """Dense attention in float64."""
        return dense(self.q.double(), self.k.double(), self.v.double(), mask)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask, prefix: int = 0) -> Tensor:
    """Attention of queries at positions `prefix` on over keys at 0 on, all at once."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    query, key = (torch.arange(n, dtype=torch.int32, device=q.device) for n in (len(q), len(k)))
    seen = ops.visibility(*mask)(prefix + query.unsqueeze(1), key)
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[2] ** -0.5
    p = scores.masked_fill(~seen, -1e300).softmax(-1) * seen.any(1).view(1, -1, 1)
    return torch.einsum("nqk,knh->qnh", p, v)


def edges(length: int) -> list[int]:
    """Positions at and beside the edges of key tiles, and the ends."""
    return [p for p in (0, 1, 31, 32, 63, 64, 65, 127, 128, 129, 191, 192, length - 1) if p < length]


def invariant(case: Case, mask: Mask, page_sizes: Sequence[int] = (16, 7, 64, 128), rest: float = torch.nan) -> bool:
    """Whether every layout gives the bits of the whole sequence as one packed segment."""
    length, expected = case.length, case.packed(mask)
    rows = edges(length)
    results = [
        (case.among(mask, 3, 40), expected),
        (case.among(mask, 64, 1), expected),
        (case.prefilled(mask, page_sizes[0], [], rest), expected),
        (case.prefilled(mask, page_sizes[-1], list(range(50, length, 50)), rest), expected),
        (case.decoded(mask, page_sizes[0], rows), expected[rows]),
        *((case.decoded(mask, page_size, rows[::-1]), expected[rows[::-1]]) for page_size in page_sizes[1:]),
        *((case.decoded(mask, page_sizes[0], [row]), expected[row : row + 1]) for row in rows[-3:]),
        *((case.after_prefix(mask, p), expected[p:]) for p in (1, 64, length // 3, length - 1)),
    ]
    return all(same_bits(*pair) for pair in results)
