"""Decode and mixed steps as captured graphs, few of them, each for a number of rows and of prompt tokens.

All work on the same rows (`Rows.tensors`), so going from one graph to another moves nothing. A mixed graph has a batch
of its own (`MixedBatch`) that prompts are copied into; its sampling covers every kind, so there is one for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

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


class StepGraphs:
    """Launches steps as graphs, making each when it is first needed, or before that in `warm_up`.

    Args:
        max_tokens: prompt tokens that a step may have.
    """

    def __init__(self, rows: RunningBatch, cache: KVCache, max_tokens: int, compiler: graph.Compiler) -> None:
        self._rows, self._cache, self._compiler = rows, cache, compiler
        # A graph of one row is another function than one of any number: it would have other compiled regions.
        self._least = min(2, rows.count) if compiler.compiles_forward else 1
        self._row_sizes, self._token_sizes = row_buckets(rows.count, self._least), token_buckets(max_tokens)
        self._warm_tokens = 0  # prompt tokens of the largest mixed graph that a warm-up made
        self._grouped: dict[tuple[int, bool, bool], bool] = {}  # by rows and sampling: what a warm-up made
        self._decode: dict[tuple[int, int], _Decode] = {}  # by model and rows
        self._mixed: dict[tuple[int, int, int], _Mixed] = {}  # by model, rows and prompt tokens

    def rows_for(self, sequences: int) -> int:
        """Rows of the decode graph for so many sequences."""
        if sequences > self._row_sizes[0]:
            self._row_sizes = row_buckets(sequences, self._least)
        return bucket(self._row_sizes, sequences)

    def decode(self, model: Decoder, rows: int, steps: int, truncated: bool, greedy: bool) -> None:
        """Run decode steps of the first `rows` rows, a number that `rows_for` gave."""
        key = id(model), rows
        if key not in self._decode:
            like = next((g.function for (of, _), g in self._decode.items() if of == id(model)), None)
            tensors = self._rows.tensors(rows)
            self._decode[key] = _Decode(model, self._cache, self._rows, tensors, like, self._compiler)
        grouped = self._grouped.get((rows, truncated, greedy), self._rows.saved >= MIN_SAVED)
        self._decode[key].function(times=steps, truncated=truncated, greedy=greedy, grouped=grouped)

    def mixed(self, model: Decoder, chunks: list[Chunk]) -> int:
        """Run a mixed step of these chunks; returns of how many rows."""
        rows = self.rows_for(max(self._rows.used, self._row_sizes[0]))
        tokens = bucket(self._token_sizes, sum(chunk.count for chunk in chunks))
        self._mixed_graph(model, rows, tokens).launch(chunks)
        return rows

    def _mixed_graph(self, model: Decoder, rows: int, tokens: int) -> _Mixed:
        key = id(model), rows, tokens
        if key not in self._mixed:
            like = next((g.function for (of, *_), g in self._mixed.items() if of == id(model)), None)
            sizes = MixedSizes.holding(rows, tokens)
            self._mixed[key] = _Mixed(model, self._cache, self._rows, sizes, like, self._compiler)
        return self._mixed[key]

    def warm_up(self, model: Decoder, sequences: int, prompt_tokens: int, sampling: SamplingParams) -> int:
        """Make the graphs for up to so many sequences, with no row in use, the largest first.

        Args:
            prompt_tokens: of the longest prompt.

        Returns:
            Prompt tokens that a step may have from now on; more are run in several steps.
        """
        if not self._warm_tokens or sequences > self._row_sizes[0]:
            self._row_sizes = row_buckets(sequences, self._least)
        prompts = -(-sequences // sampling.n)
        largest = bucket(self._token_sizes, min(prompts * prompt_tokens, self._token_sizes[0]))
        self._warm_tokens = max(self._warm_tokens, largest)
        for tokens in self._token_sizes:
            if tokens <= self._warm_tokens:
                self._rows.begin()
                self._mixed_graph(model, self._row_sizes[0], tokens).launch([])
        truncated, greedy, group = sampling.truncated, sampling.temperature == 0, min(sampling.n, GROUP)
        for rows in self._row_sizes:
            if rows <= self.rows_for(sequences):
                saved = (rows - -(-rows // group)) * prompt_tokens
                self._grouped.setdefault((rows, truncated, greedy), saved >= MIN_SAVED)
                self._rows.begin()
                self.decode(model, rows, 1, truncated, greedy)
        return self._warm_tokens

    def trust_cases(self) -> Work:
        """Launches on which the graphs that there are, are to be checked against eager."""
        rows, cache = self._rows, self._cache
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
        self._decode.clear()
        self._mixed.clear()


class _Step(ABC):
    """A step as a graph over static tensors. `like` is the same step's function for other sizes."""

    name: str
    dynamic: graph.Dynamic

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        rows: RunningBatch,
        tensors: dict[str, Tensor],
        like: graph.GraphFunction | None,
        compiler: graph.Compiler,
    ) -> None:
        self._model, self._cache, self._rows = model, cache, rows
        own = graph.module_inputs(model)
        inputs = graph.Inputs(own.param, buffer={**own.buffer, **tensors}, kv=cache.tensors())
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

    def _body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        k, v, routes = inputs.kv["k"], inputs.kv["v"], inputs.kv.get("routes")
        with graph.substituted(self._model, inputs):
            decode_step(self._model, inputs.buffer, self._paging, k, v, routes, **statics)
        return {}


class _Mixed(_Step):
    """A mixed step of some rows, with room for prompt tokens."""

    name, dynamic = "mixed", _MIXED

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        rows: RunningBatch,
        sizes: MixedSizes,
        like: graph.GraphFunction | None,
        compiler: graph.Compiler,
    ) -> None:
        self._sizes = sizes
        with torch.inference_mode(False):
            self._flat = lay_out([], sizes, rows.null_row, pinned=False).to(rows.device)
            batch = MixedBatch.view(self._flat, sizes)._asdict()
        tensors = rows.tensors(sizes.rows) | {f"prompt.{name}": tensor for name, tensor in batch.items()}
        super().__init__(model, cache, rows, tensors | {"tables": rows.table}, like, compiler)

    def trust_cases(self) -> list[graph.Case]:
        """See `StepGraphs.trust_cases`."""
        return mixed_cases(self._flat, self._rows, self._sizes, self._cache, self.vocabulary)

    def launch(self, chunks: list[Chunk]) -> None:
        pinned = self._rows.device.type == "cuda"
        self._flat.copy_(lay_out(chunks, self._sizes, self._rows.null_row, pinned), non_blocking=True)
        self.function()

    def _body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        b, kv = inputs.buffer, (inputs.kv["k"], inputs.kv["v"], inputs.kv.get("routes"))
        prompt = {name: b[f"prompt.{name}"] for name in MixedBatch._fields}
        with graph.substituted(self._model, inputs):
            mixed_step(self._model, b, prompt, b["tables"], self._paging, *kv, True, True)
        return {}
