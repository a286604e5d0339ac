"""Launches steps, and brings their results to the host without waiting for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import graph
from ..models import Decoder
from ..types import SamplingParams
from .check_cases import Work
from .kv_cache import KVCache, upload
from .programs import Steps, sizes_of
from .request import Sequence
from .running_batch import RunningBatch
from .scheduler import Chunk
from .weights import SharedWeights, SnapshotWeights

# Tokens, both log-probabilities and, of a model with experts, `Segment.route_digests`, one a step.
Drawn = tuple[Sequence, list[int], list[float], list[float], list[int] | None]


@dataclass(frozen=True)
class Block:
    """Steps that were launched together, and what they drew.

    Attributes:
        sequences: of each row, at the launch.
        version: of the weights.
        words: host tensor int32 [rows, words of a result, steps or more], once `ready` has come to pass.
        prompts, prompt_words: of a model with experts the prompts that ended, and what the cache has of their pages'
            tokens, one after another, int32 [pages, page size].
    """

    sequences: list[Sequence | None]
    steps: int
    version: int
    words: Tensor
    ready: torch.cuda.Event | None
    prompts: list[Chunk] = field(default_factory=list)
    prompt_words: Tensor | None = None

    def read_prompts(self) -> None:
        """Wait for the results; note the experts of prompts that ended, for the samples that begin with them."""
        if self.prompt_words is None:
            return
        if self.ready is not None:
            self.ready.synchronize()
        page_size = self.prompt_words.shape[1]
        pages = self.prompt_words.split([-(-len(chunk.prefill.token_ids) // page_size) for chunk in self.prompts])
        for chunk, words in zip(self.prompts, pages, strict=True):
            routes = words.flatten().tolist()
            for sample in chunk.started:
                if sample.prompt_routes is None:
                    sample.prompt_routes = routes[: len(sample.prompt_ids)]

    def drawn(self) -> Iterator[Drawn]:
        """Wait for the results; each sequence's. After its last token come tokens of -1."""
        if self.ready is not None:
            self.ready.synchronize()
        words = self.words[:, :, : self.steps].transpose(0, 1).contiguous()
        logprobs = words[1:3].view(torch.float32)
        routes = words[3].tolist() if len(words) > 3 else [None] * len(self.sequences)
        columns = zip(self.sequences, words[0].tolist(), *logprobs.tolist(), routes, strict=True)
        return (column for column in columns if column[0] is not None)


def _on_host(values: Tensor) -> Tensor:
    """A copy there, complete once the device has come to it."""
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Runner:
    """Launches decode and mixed steps on the rows."""

    def __init__(
        self,
        weights: SharedWeights | SnapshotWeights,
        cache: KVCache,
        rows: RunningBatch,
        max_tokens: int,
        runtime: graph.Runtime,
    ) -> None:
        self.weights, self.cache, self.rows = weights, cache, rows
        self._sizes, self._runtime = sizes_of(rows, cache, max_tokens, runtime), runtime
        self._steps: dict[int, Steps] = {}  # by model

    @torch.inference_mode()
    def decode(self, running: list[Sequence], steps: int) -> Block:
        """Run decode steps of the running sequences."""
        rows, model, version = self.rows, self.weights.model, self.weights.version
        size = self._sizes.rows_for(len(running))
        rows.compact(size)
        rows.flush()
        rows.begin()
        self._steps_of(model).decode(size, steps)
        return self._block(size, steps, version)

    @torch.inference_mode()
    def mixed(self, chunks: list[Chunk]) -> Block:
        """Run prompt tokens, and one token of every sequence that runs already."""
        self.rows.flush()
        self.rows.begin()
        version, sizes = self.weights.version, self._sizes.mixed(chunks)
        self._steps_of(self.weights.model).mixed(chunks, sizes)
        return self._block(sizes.rows, 1, version, chunks)

    def _steps_of(self, model: Decoder) -> Steps:
        if id(model) not in self._steps:
            self._steps[id(model)] = Steps(model, self.rows, self.cache, self._sizes, self._runtime)
        return self._steps[id(model)]

    def _block(self, rows: int, steps: int, version: int, chunks: Iterable[Chunk] = ()) -> Block:
        sequences, words = self.rows.sequences[:rows], _on_host(self.rows.results[:rows])
        prompts, prompt_words, routes = [c.prefill for c in chunks if c.started], None, self.cache.routes
        if prompts and routes is not None:
            pages = [page for p in prompts for page in p.pages[: self.cache.pages_for(len(p.token_ids))]]
            prompt_words = _on_host(routes.index_select(0, upload(pages, routes.device)))
        ready = None
        if self.rows.results.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Block(sequences, steps, version, words, ready, [c for c in chunks if c.started], prompt_words)

    @torch.inference_mode()
    def warm_up(self, sequences: int, prompt_tokens: int, sampling: SamplingParams) -> int:
        """See `Steps.warm_up`."""
        self.rows.flush()
        return self._steps_of(self.weights.model).warm_up(sequences, prompt_tokens, sampling)

    def trust_cases(self) -> Work:
        """See `Steps.trust_cases`."""
        return [work for steps in self._steps.values() for work in steps.trust_cases()]

    def widen(self, tokens: int) -> None:
        """Make room for sequences of so many tokens. All results must have been read."""
        for steps in self._steps.values():
            steps.close()
        self._steps.clear()
        self.rows.widen(self.cache.pages_for(tokens))
