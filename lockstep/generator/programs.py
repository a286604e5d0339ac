"""Decode and mixed steps, called as they are or as graphs: few, each for a number of rows and of prompt tokens.

All work on the same rows (`Rows.tensors`), so going from one graph to another moves nothing. A mixed graph has a batch
of its own (`MixedBatch`) that prompts are copied into; its sampling covers every kind, so there is one for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import graph
from ..models import Decoder
from ..types import SamplingParams
from .check_cases import Work, decode_cases, mixed_cases
from .forward import Paging, decode_step, mixed_step
from .kv_cache import KVCache
from .prefill_batch import MixedBatch, MixedSizes, lay_out
from .running_batch import GROUP, RunningBatch
from .scheduler import Chunk

SMALLEST_BATCH = 128  # prompt tokens
MIN_SAVED = 16384  # positions that need not be read again, from which on reading prefixes by group pays for a kernel

# Sizes that differ from graph to graph of one function, by input and dimension.
_DECODE: graph.Dynamic = {
    **dict.fromkeys(("token", "position", "remaining", "ordinal", "shared_len"), ("rows",)),
    **dict.fromkeys(("top_k", "temperature", "top_p", "min_p"), ("rows",)),
    **dict.fromkeys(("stop", "key", "table"), ("rows", None)),
    "cu_seqlens": ("rows and one",),
    "groups": ("groups", None),
    "results": ("rows", None, None),
}
_MIXED: graph.Dynamic = {
    **_DECODE,
    **dict.fromkeys(("prompt.token", "prompt.position", "prompt.row"), ("tokens",)),
    **dict.fromkeys(("prompt.segment_row", "prompt.segment_context"), ("segments",)),
    "prompt.segment_start": ("segments and one",),
    "prompt.source": ("rows",),
}


def row_buckets(largest: int, least: int = 1) -> list[int]:
    """Numbers of rows that graphs are made for, largest first, and none below `least`.

    The largest, above 8 rounded up to a multiple of 8; then powers of two, from 32 on also what lies halfway. A step of
    few rows takes as long as reading the weights, so padding costs little there.
    """
    powers = [1 << k for k in range(largest.bit_length())]
    sizes = {n for p in powers for n in (p, p + p // 2 if p >= 32 else p) if n < largest}
    sizes.add(largest if largest <= 8 else -(-largest // 8) * 8)
    return sorted({max(size, least) for size in sizes}, reverse=True)


def token_buckets(largest: int) -> list[int]:
    """Numbers of prompt tokens that mixed graphs are made for, largest first: halves, down to 128 at the least."""
    sizes = [largest]
    while sizes[-1] // 2 >= SMALLEST_BATCH:
        sizes.append(sizes[-1] // 2)
    return sizes


def bucket(sizes: list[int], needed: int) -> int:
    """The smallest size that holds `needed`."""
    return min(size for size in sizes if size >= needed)


class ExactSizes:
    """Sizes of steps that are called as they are: what there is, and nothing else."""

    def __init__(self, rows: RunningBatch, cache: KVCache) -> None:
        self._rows, self._cache = rows, cache

    def rows_for(self, sequences: int) -> int:
        """Rows of a decode step of so many sequences."""
        return sequences

    def mixed(self, chunks: list[Chunk]) -> MixedSizes:
        """Of a mixed step of these chunks."""
        return MixedSizes.exactly(self._rows.used, chunks)

    def mixed_sampling(self) -> dict[str, bool]:
        """What a mixed step's sampling covers, where it is not every kind."""
        return {"truncated": self._rows.truncated > 0, "greedy": self._rows.greedy > 0}

    def decode_context(self, rows: int) -> int:
        """Bound on the positions of decode steps."""
        return max(len(s.pages) for s in self._rows.sequences[:rows] if s is not None) * self._cache.page_size

    def grouped(self, rows: int, truncated: bool, greedy: bool) -> bool:
        """Whether decode steps read shared prefixes once a group."""
        return False


class BucketSizes:
    """Sizes of steps that are graphs: few, so that graphs are; see `ExactSizes`.

    Args:
        max_tokens: prompt tokens that a step may have. least: rows of the smallest decode graph.

    Attributes:
        rows, tokens: of the graphs, largest first.
        groups: for rows and sampling, whether the graph that a warm-up made reads prefixes by group.
    """

    def __init__(self, rows: RunningBatch, cache: KVCache, max_tokens: int, least: int) -> None:
        self._rows, self._cache, self._least = rows, cache, least
        self.rows, self.tokens = row_buckets(rows.count, least), token_buckets(max_tokens)
        self.groups: dict[tuple[int, bool, bool], bool] = {}

    def hold(self, sequences: int) -> None:
        """Have the largest graph hold so many sequences, and no more."""
        self.rows = row_buckets(sequences, self._least)

    def rows_for(self, sequences: int) -> int:
        if sequences > self.rows[0]:
            self.hold(sequences)
        return bucket(self.rows, sequences)

    def mixed(self, chunks: list[Chunk]) -> MixedSizes:
        rows = self.rows_for(max(self._rows.used, self.rows[0]))
        return MixedSizes.holding(rows, bucket(self.tokens, sum(chunk.count for chunk in chunks)))

    def mixed_sampling(self) -> dict[str, bool]:
        return {}

    def decode_context(self, rows: int) -> int:
        return self._rows.width * self._cache.page_size

    def grouped(self, rows: int, truncated: bool, greedy: bool) -> bool:
        self._rows.group(rows)
        return self.groups.get((rows, truncated, greedy), self._rows.saved >= MIN_SAVED)


class StepPrograms:
    """Runs steps, each of the sizes that suit how the compiler runs them; graphs are made when they are first needed,
    or before that in `warm_up`.

    Args:
        max_tokens: prompt tokens that a step may have.
    """

    def __init__(self, rows: RunningBatch, cache: KVCache, max_tokens: int, compiler: graph.Compiler) -> None:
        self._rows, self._cache, self._compiler = rows, cache, compiler
        # A graph of one row is another function than one of any number: it would have other compiled regions.
        least = min(2, rows.count) if compiler.compiles_forward else 1
        self._buckets = BucketSizes(rows, cache, max_tokens, least)
        self.sizes = ExactSizes(rows, cache) if compiler.eager else self._buckets
        self._warm_tokens = 0  # prompt tokens of the largest mixed graph that a warm-up made
        self._own: dict[int, graph.Inputs] = {}  # by model
        self._decode: dict[tuple[int, int], _Decode] = {}  # by model and rows
        self._mixed: dict[tuple[int, MixedSizes], _Mixed] = {}  # by model and sizes; of graphs alone

    def decode(self, model: Decoder, rows: int, steps: int) -> None:
        """Run decode steps of the first `rows` rows, a number that `sizes.rows_for` gave."""
        truncated, greedy = self._rows.truncated > 0, self._rows.greedy > 0
        grouped, step = self.sizes.grouped(rows, truncated, greedy), self._decode_step(model, rows)
        step.function(times=steps, truncated=truncated, greedy=greedy, grouped=grouped)

    def mixed(self, model: Decoder, chunks: list[Chunk]) -> int:
        """Run a mixed step of these chunks; returns of how many rows."""
        sizes = self.sizes.mixed(chunks)
        self._mixed_step(model, sizes).launch(chunks, **self.sizes.mixed_sampling())
        return sizes.rows

    def _decode_step(self, model: Decoder, rows: int) -> _Decode:
        key = id(model), rows
        if key not in self._decode:
            like = next((g.function for (of, _), g in self._decode.items() if of == id(model)), None)
            own, tensors = self._inputs(model), self._rows.tensors(rows)
            self._decode[key] = _Decode(
                model, own, self._cache, self._rows, tensors, like, self._compiler, sizes=self.sizes
            )
        return self._decode[key]

    def _mixed_step(self, model: Decoder, sizes: MixedSizes) -> _Mixed:
        key = id(model), sizes
        if key in self._mixed:
            return self._mixed[key]
        like = next((g.function for (of, _), g in self._mixed.items() if of == id(model)), None)
        made = _Mixed(model, self._inputs(model), self._cache, self._rows, sizes, like, self._compiler)
        if not self._compiler.eager:
            self._mixed[key] = made
        return made

    def _inputs(self, model: Decoder) -> graph.Inputs:
        if id(model) not in self._own:
            self._own[id(model)] = graph.module_inputs(model)
        return self._own[id(model)]

    def warm_up(self, model: Decoder, sequences: int, prompt_tokens: int, sampling: SamplingParams) -> int:
        """Make the graphs for up to so many sequences, with no row in use, the largest first.

        Args:
            prompt_tokens: of the longest prompt.

        Returns:
            Prompt tokens that a step may have from now on; more are run in several steps.
        """
        sizes = self._buckets
        if not self._warm_tokens or sequences > sizes.rows[0]:
            sizes.hold(sequences)
        prompts = -(-sequences // sampling.n)
        largest = bucket(sizes.tokens, min(prompts * prompt_tokens, sizes.tokens[0]))
        self._warm_tokens = max(self._warm_tokens, largest)
        for tokens in sizes.tokens:
            if tokens <= self._warm_tokens:
                self._rows.begin()
                self._mixed_step(model, MixedSizes.holding(sizes.rows[0], tokens)).launch([])
        truncated, greedy, group = sampling.truncated, sampling.temperature == 0, min(sampling.n, GROUP)
        for rows in sizes.rows:
            if rows <= sizes.rows_for(sequences):
                saved = (rows - -(-rows // group)) * prompt_tokens
                grouped = sizes.groups.setdefault((rows, truncated, greedy), saved >= MIN_SAVED)
                self._rows.begin()
                step = self._decode_step(model, rows)
                step.function(truncated=truncated, greedy=greedy, grouped=grouped)
        return self._warm_tokens

    def trust_cases(self) -> Work:
        """Launches on which the graphs that there are, are to be checked against eager."""
        rows, cache = self._rows, self._cache
        if self._compiler.eager:
            return []
        work = [
            (made.function, decode_cases(made.function, rows, size, cache, made.vocabulary))
            for (_, size), made in self._decode.items()
        ]
        return work + [(made.function, made.trust_cases()) for made in self._mixed.values()]

    def close(self) -> None:
        """Close all graphs: their tensors are replaced."""
        steps: list[_Step] = [*self._decode.values(), *self._mixed.values()]
        for step in steps:
            step.function.close()
        for made in (self._own, self._decode, self._mixed):
            made.clear()


class _Step(ABC):
    """A step as a graph over static tensors. `like` is the same step's function for other sizes."""

    name: str
    dynamic: graph.Dynamic

    def __init__(
        self,
        model: Decoder,
        own: graph.Inputs,
        cache: KVCache,
        rows: RunningBatch,
        tensors: dict[str, Tensor],
        like: graph.GraphFunction | None,
        compiler: graph.Compiler,
    ) -> None:
        self._model, self._cache, self._rows = model, cache, rows
        inputs = replace(own, buffer={**own.buffer, **tensors}, kv=cache.tensors())
        if like is None:
            like = compiler.function(self.name, self._body, inputs, {"kv", "buffer"}, self.dynamic, self._constants())
            self.function = like
        else:
            self.function = like.bound_to(inputs)

    def _constants(self) -> graph.Constants:
        """What the body takes from elsewhere than its inputs, and a graph holds."""
        return {"model": self._model.config, "masks": self._model.masks, "paging": self._paging}

    @property
    def vocabulary(self) -> int:
        """Token ids."""
        return self._model.config.vocab_size

    @property
    def _paging(self) -> Paging:
        cache = self._cache
        return Paging(cache.page_size, cache.null_page, self._rows.width * cache.page_size)

    @abstractmethod
    def _body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        """The step on the inputs, traced or real."""


class _Decode(_Step):
    """Decode steps of some rows."""

    name, dynamic = "decode", _DECODE

    def __init__(self, *about: Any, sizes: ExactSizes | BucketSizes) -> None:
        self._sizes = sizes
        super().__init__(*about)

    def _body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        k, v, routes = inputs.kv["k"], inputs.kv["v"], inputs.kv.get("routes")
        context = self._sizes.decode_context(inputs.buffer["token"].shape[0])
        with graph.substituted(self._model, inputs):
            paging = replace(self._paging, max_context=context)
            decode_step(self._model, inputs.buffer, paging, k, v, routes, **statics)
        return {}


class _Mixed(_Step):
    """A mixed step of some rows, with room for prompt tokens."""

    name, dynamic = "mixed", _MIXED

    def __init__(
        self,
        model: Decoder,
        own: graph.Inputs,
        cache: KVCache,
        rows: RunningBatch,
        sizes: MixedSizes,
        like: graph.GraphFunction | None,
        compiler: graph.Compiler,
    ) -> None:
        self._sizes = sizes
        with torch.inference_mode(False):
            self._flat = torch.zeros(MixedBatch.length(sizes), dtype=torch.int64, device=rows.device)
            batch = MixedBatch.view(self._flat, sizes)._asdict()
        tensors = rows.tensors(sizes.rows) | {f"prompt.{name}": tensor for name, tensor in batch.items()}
        super().__init__(model, own, cache, rows, tensors | {"tables": rows.table}, like, compiler)

    def trust_cases(self) -> list[graph.Case]:
        """See `StepPrograms.trust_cases`."""
        return mixed_cases(self._flat, self._rows, self._sizes, self._cache, self.vocabulary)

    def launch(self, chunks: list[Chunk], **statics: Any) -> None:
        pinned = self._rows.device.type == "cuda"
        self._flat.copy_(lay_out(chunks, self._sizes, self._rows.null_row, pinned), non_blocking=True)
        self.function(**statics)

    def _body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        flags = (statics.get(kind, True) for kind in ("truncated", "greedy"))
        b, kv = inputs.buffer, (inputs.kv["k"], inputs.kv["v"], inputs.kv.get("routes"))
        prompt = {name: b[f"prompt.{name}"] for name in MixedBatch._fields}
        with graph.substituted(self._model, inputs):
            mixed_step(self._model, b, prompt, b["tables"], self._paging, *kv, *flags)
        return {}
