"""The numbers of rows and prompt tokens in a step: exactly what is needed, or one of a few sizes that have graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .. import graph
from ..config import GeneratorConfig
from ..errors import refuse
from ..ops import KEY_SPLIT, MAX_SEQUENCES
from ..types import SamplingParams
from .kv_cache import KVCache
from .prefill_batch import MixedSizes
from .running_batch import GROUP, RunningBatch
from .scheduler import Chunk

SMALLEST_BATCH = 128  # prompt tokens
MIN_SAVED = 16384  # positions a step must save for reading prefixes by group to pay for its additional kernel
# Up to so many rows * KV heads, rows read prefixes faster alone unless each saves so many positions on average.
LEAST_SAVED = ((132, KEY_SPLIT), (264, 448))  # heads that an H200 attends for at once, and twice as many

# The dynamic sizes among the graphs of one function, by input and dimension.
DECODE: graph.Dynamic = {
    **dict.fromkeys(("token", "position", "remaining", "ordinal", "shared_len"), ("rows",)),
    **dict.fromkeys(("top_k", "temperature", "top_p", "min_p"), ("rows",)),
    **dict.fromkeys(("stop", "key", "table"), ("rows", None)),
    "cu_seqlens": ("rows and one",),
    "groups": ("groups", None),
    "results": ("rows", None, None),
}
MIXED: graph.Dynamic = {
    **DECODE,
    **dict.fromkeys(("prompt.token", "prompt.position", "prompt.row"), ("tokens",)),
    **dict.fromkeys(("prompt.segment_row", "prompt.segment_context"), ("segments",)),
    "prompt.segment_start": ("segments and one",),
    "prompt.source": ("rows",),
}


def row_buckets(largest: int, least: int = 1) -> list[int]:
    """The numbers of rows that graphs are made for, largest first, and none below `least`.

    These are `largest` (if above 8, rounded up to a multiple of 8) and smaller powers of two, from 32 on with the sizes
    halfway between. A step of few rows takes as long as reading the weights, so padding costs little there.
    """
    powers = [1 << k for k in range(largest.bit_length())]
    sizes = {n for p in powers for n in (p, p + p // 2 if p >= 32 else p) if n < largest}
    sizes.add(largest if largest <= 8 else -(-largest // 8) * 8)
    return sorted({max(size, least) for size in sizes}, reverse=True)


def token_buckets(largest: int) -> list[int]:
    """The numbers of prompt tokens that mixed graphs are made for: `largest`, and halves of it down to 128."""
    sizes = [largest]
    while sizes[-1] // 2 >= SMALLEST_BATCH:
        sizes.append(sizes[-1] // 2)
    return sizes


def smallest_bucket(sizes: list[int], needed: int) -> int:
    return min(size for size in sizes if size >= needed)


def num_rows(config: GeneratorConfig, least: int) -> int:
    """The engine's number of rows, at least `least`. Raises `InputError` if a step of all rows and of prompts would
    have more sequences than attention takes."""
    rows = max(row_buckets(config.max_num_seqs)[0], least)
    segments = MixedSizes.for_tokens(rows, config.max_num_batched_tokens).segments
    refuse(
        rows + segments > MAX_SEQUENCES,
        f"max_num_seqs {config.max_num_seqs} and max_num_batched_tokens {config.max_num_batched_tokens} make steps of "
        f"up to {rows} sequences and {segments} pieces of prompts; attention takes at most {MAX_SEQUENCES} together",
    )
    return rows


def pays_to_group(rows: int, prompt_tokens: int, samples: int, kv_heads: int) -> bool:
    """Whether `rows` rows, `samples` for each prompt, should read their shared prefixes once per group."""
    readers = -(-rows // min(samples, GROUP))  # groups, each of which reads its prefix once
    return _saves_time(rows, kv_heads, (rows - readers) * prompt_tokens)


def _saves_time(rows: int, kv_heads: int, saved: int) -> bool:
    """The same, given the positions that this saves reading."""
    least = next((positions for heads, positions in LEAST_SAVED if rows * kv_heads <= heads), 0)
    return saved >= max(MIN_SAVED, rows * least)


class ExactSizes:
    """Sizes of eager steps with at most `max_tokens` prompt tokens: exactly what is needed.

    Attributes:
        is_bucketed: whether sizes recur, so that what is made for a size is kept.
    """

    is_bucketed = False

    def __init__(self, rows: RunningBatch, cache: KVCache, max_tokens: int) -> None:
        self._rows, self._cache, self.max_tokens, self.tokens = rows, cache, max_tokens, list[int]()

    def set_largest(self, sequences: int) -> None:
        """Nothing: sizes are exact."""

    def rows_for(self, sequences: int) -> int:
        return sequences

    def mixed_sizes(self, chunks: list[Chunk]) -> tuple[MixedSizes, dict[str, bool]]:
        """The sizes of a mixed step of these chunks, and statics for what it leaves out compared with a graph."""
        covers = {"truncated": self._rows.truncated > 0, "greedy": self._rows.greedy > 0, "grouped": False}
        return MixedSizes.exact(self._rows.used, chunks), covers

    def decode_context(self, rows: int) -> int:
        return max(len(s.pages) for s in self._rows.sequences[:rows] if s is not None) * self._cache.page_size

    def is_grouped(self, rows: int, truncated: bool, greedy: bool) -> bool:
        """Whether decode steps read shared prefixes once per group."""
        return False

    def mixed_graphs(self, sequences: int, prompt_tokens: int, samples: int) -> Iterable[MixedSizes]:
        """The sizes of the mixed graphs for up to `sequences` sequences, largest first. Sets `max_tokens`."""
        return ()

    def decode_graphs(
        self, sequences: int, prompt_tokens: int, sampling: SamplingParams
    ) -> Iterable[tuple[int, dict[str, bool]]]:
        """The rows and statics of the decode graphs for up to `sequences` sequences, largest first."""
        return ()


class BucketSizes(ExactSizes):
    """Sizes of captured steps, few so that there are few graphs.

    Attributes:
        rows, tokens: the sizes of graphs, largest first; none with fewer rows than `least`.
        groups: by rows, truncated and greedy, whether the graph that a warm-up made reads prefixes by group.
        max_tokens: prompt tokens of the largest mixed graph that a warm-up made; 0 before the first.
    """

    is_bucketed = True

    def __init__(self, rows: RunningBatch, cache: KVCache, max_tokens: int, least: int) -> None:
        super().__init__(rows, cache, 0)
        self._least = least
        self.rows, self.tokens = row_buckets(rows.count, least), token_buckets(max_tokens)
        self.groups: dict[tuple[int, bool, bool], bool] = {}
        self._expects = False  # `set_largest` was called

    def set_largest(self, sequences: int) -> None:
        """Set the largest graph's rows to what `sequences` sequences need."""
        self.rows, self._expects = row_buckets(sequences, self._least), True

    def rows_for(self, sequences: int) -> int:
        if sequences > self.rows[0]:
            self.set_largest(sequences)
        return smallest_bucket(self.rows, sequences)

    def mixed_sizes(self, chunks: list[Chunk]) -> tuple[MixedSizes, dict[str, bool]]:
        rows = self.rows_for(max(self._rows.used, self.rows[0]))
        self._rows.update_groups(rows)
        return MixedSizes.for_tokens(rows, smallest_bucket(self.tokens, sum(chunk.count for chunk in chunks))), {}

    def decode_context(self, rows: int) -> int:
        return self._rows.width * self._cache.page_size

    def is_grouped(self, rows: int, truncated: bool, greedy: bool) -> bool:
        self._rows.update_groups(rows)
        pays = _saves_time(rows, self._cache.kv_heads, self._rows.saved)
        return self.groups.get((rows, truncated, greedy), pays)

    def mixed_graphs(self, sequences: int, prompt_tokens: int, samples: int) -> Iterable[MixedSizes]:
        if not self._expects or sequences > self.rows[0]:
            self.set_largest(sequences)
        prompts = -(-sequences // samples)
        largest = smallest_bucket(self.tokens, min(prompts * prompt_tokens, self.tokens[0]))
        self.max_tokens = max(self.max_tokens, largest)
        return [MixedSizes.for_tokens(self.rows[0], tokens) for tokens in self.tokens if tokens <= self.max_tokens]

    def decode_graphs(
        self, sequences: int, prompt_tokens: int, sampling: SamplingParams
    ) -> Iterator[tuple[int, dict[str, bool]]]:
        truncated, greedy = sampling.truncated, sampling.temperature == 0
        for rows in self.rows:
            if rows <= self.rows_for(sequences):
                before = self.groups.get((rows, truncated, greedy), False)
                grouped = before or pays_to_group(rows, prompt_tokens, sampling.n, self._cache.kv_heads)
                self.groups[rows, truncated, greedy] = grouped
                yield rows, {"truncated": truncated, "greedy": greedy, "grouped": grouped}


def make_sizes(rows: RunningBatch, cache: KVCache, max_tokens: int, runtime: graph.Runtime, least: int) -> ExactSizes:
    """Exact sizes for an eager runtime, else buckets: of at most `max_tokens` prompt tokens, and at least `least` rows
    in a graph."""
    if runtime.eager:
        return ExactSizes(rows, cache, max_tokens)
    # A trace with one row is specialized to that: it would not have the same compiled regions as one of any number.
    several = min(2, rows.count) if runtime.builder.backend.shared else 1
    return BucketSizes(rows, cache, max_tokens, max(least, several))
