"""Launches steps, eagerly or as graphs, and copies their results to the host asynchronously.

All steps work on the same rows (`RunningBatch.tensors`), so switching graphs moves no data. A mixed graph has a batch
of its own (`MixedBatch`) that prompts are copied into, and supports every kind of sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .. import graph
from ..types import SamplingParams
from .check_cases import CaseBuilder
from .forward import Paging, decode_step, mixed_step
from .kv_cache import KVCache, upload
from .prefill_batch import MixedBatch, MixedSizes, lay_out
from .request import Sequence
from .running_batch import RunningBatch
from .scheduler import Chunk
from .sizes import DECODE, MIXED, make_sizes
from .weights import SharedWeights

# A sequence with its tokens, both log-probabilities and (with experts) route digests, one for each step of a block.
SequenceResult = tuple[Sequence, list[int], list[float], list[float], list[int] | None]


@dataclass(frozen=True)
class Block:
    """Steps that were launched together, and their results.

    Attributes:
        sequences: by row, at the launch.
        version: of the weights.
        words: host tensor int32 [rows, words of a result, steps or more], valid once `ready` has occurred.
        prompts, prompt_words: with experts, the prompts that ended and the route digests in their pages, one prompt
            after another, int32 [pages, page size].
    """

    sequences: list[Sequence | None]
    steps: int
    version: int
    words: Tensor
    ready: torch.cuda.Event | None
    prompts: list[Chunk] = field(default_factory=list)
    prompt_words: Tensor | None = None

    def results(self) -> Iterator[SequenceResult]:
        """Wait for the results, and return those of each sequence; tokens after its last one are -1. Also stores the
        route digests of prompts that ended in their samples."""
        if self.ready is not None:
            self.ready.synchronize()
        if self.prompt_words is not None:
            page_size = self.prompt_words.shape[1]
            pages = self.prompt_words.split([-(-len(chunk.prefill.token_ids) // page_size) for chunk in self.prompts])
            for chunk, found in zip(self.prompts, pages, strict=True):
                digests = found.flatten().tolist()
                for sample in chunk.started:
                    sample.prompt_routes = sample.prompt_routes or digests[: len(sample.prompt_ids)]
        words = self.words[:, :, : self.steps].transpose(0, 1).contiguous()
        logprobs = words[1:3].view(torch.float32)
        routes = words[3].tolist() if len(words) > 3 else [None] * len(self.sequences)
        columns = zip(self.sequences, words[0].tolist(), *logprobs.tolist(), routes, strict=True)
        return (column for column in columns if column[0] is not None)


def _copy_to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


class Runner:
    """Launches decode and mixed steps, with a program for each size; graphs are made when first needed, or before that
    in `warm_up`."""

    def __init__(
        self, weights: SharedWeights, cache: KVCache, rows: RunningBatch, max_tokens: int, runtime: graph.Runtime
    ) -> None:
        self.cache, self.rows = cache, rows
        least = weights.model.spread.min_rows
        self._sizes, self._runtime = make_sizes(rows, cache, max_tokens, runtime, least), runtime
        self._decode: dict[int, graph.Program] = {}  # by rows
        self._mixed: dict[MixedSizes, tuple[graph.Program, Tensor]] = {}  # with the memory of their `MixedBatch`
        self.set_weights(weights)

    def set_weights(self, weights: SharedWeights) -> None:
        """Run later steps with these weights. Graphs of the previous weights are closed."""
        for program in [*self._decode.values(), *(program for program, _ in self._mixed.values())]:
            program.drop()
        self._decode.clear()
        self._mixed.clear()
        self.weights, self._model = weights, weights.model
        self._model_inputs = graph.module_inputs(weights.model)
        page_size, null_page = self.cache.page_size, self.cache.null_page
        self._paging = self._decode_paging = Paging(page_size, null_page, self.rows.width * page_size)
        self._constants = {**weights.model.trace_constants(), "paging": self._paging}

    def widen(self, tokens: int) -> None:
        """Make room for sequences of `tokens` tokens. All results must have been read."""
        self.rows.widen(self.cache.pages_for(tokens))
        self.set_weights(self.weights)

    @torch.inference_mode()
    def decode(self, running: list[Sequence], steps: int) -> Block:
        rows, version = self.rows, self.weights.version
        size = self._sizes.rows_for(len(running))
        rows.compact(size)
        rows.flush()
        self._decode_paging = replace(self._paging, max_context=self._sizes.decode_context(size))
        truncated, greedy = rows.truncated > 0, rows.greedy > 0
        grouped = self._sizes.is_grouped(size, truncated, greedy)
        self._decode_program(size)(times=steps, truncated=truncated, greedy=greedy, grouped=grouped)
        return self._block(size, steps, version)

    @torch.inference_mode()
    def mixed(self, chunks: list[Chunk]) -> Block:
        version, (sizes, statics) = self.weights.version, self._sizes.mixed_sizes(chunks)
        self._run_mixed(chunks, sizes, statics)
        return self._block(sizes.rows, 1, version, chunks)

    def _run_mixed(self, chunks: list[Chunk], sizes: MixedSizes, statics: dict[str, bool]) -> None:
        self.rows.flush()
        program, batch = self._mixed_program(sizes)
        pinned = self.rows.device.type == "cuda"
        batch.copy_(lay_out(chunks, sizes, self.rows.null_row, pinned), non_blocking=True)
        program({}, **statics)

    def _block(self, rows: int, steps: int, version: int, chunks: Iterable[Chunk] = ()) -> Block:
        sequences, words = self.rows.sequences[:rows], _copy_to_host(self.rows.results[:rows])
        ended, prompt_words, routes = [c for c in chunks if c.started], None, self.cache.routes
        if ended and routes is not None:
            prompts = [chunk.prefill for chunk in ended]
            pages = [page for p in prompts for page in p.pages[: self.cache.pages_for(len(p.token_ids))]]
            prompt_words = _copy_to_host(routes.index_select(0, upload(pages, routes.device)))
        ready = None
        if self.rows.results.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Block(sequences, steps, version, words, ready, ended, prompt_words)

    def expect(self, sequences: int) -> None:
        """Let graphs have rows for `sequences` sequences, from the first `warm_up` on."""
        self._sizes.set_largest(sequences)

    @torch.inference_mode()
    def warm_up(self, sequences: int, prompt_tokens: int, sampling: SamplingParams) -> list[int]:
        """Make the graphs, largest first, for up to `sequences` sequences with prompts of up to `prompt_tokens` tokens,
        while no row is in use. Returns the numbers of prompt tokens that mixed steps now have graphs for; more tokens
        are run in several steps."""
        for sizes in self._sizes.mixed_graphs(sequences, prompt_tokens, sampling.n):
            self.rows.update_groups(sizes.rows)  # clears groups that an earlier step of more rows may have left
            self._run_mixed([], sizes, {})
        for rows, statics in self._sizes.decode_graphs(sequences, prompt_tokens, sampling):
            self.rows.update_groups(rows)
            self.rows.flush()
            self._decode_program(rows)({}, **statics)
        return [tokens for tokens in self._sizes.tokens if tokens <= self._sizes.max_tokens]

    def _decode_program(self, rows: int) -> graph.Program:
        if rows not in self._decode:
            like = next(iter(self._decode.values()), None)
            self._decode[rows] = self._program("decode", like, self.rows.tensors(rows))
        return self._decode[rows]

    def _mixed_program(self, sizes: MixedSizes) -> tuple[graph.Program, Tensor]:
        """The mixed program of these sizes, and the memory of its `MixedBatch`."""
        if sizes in self._mixed:
            return self._mixed[sizes]
        with torch.inference_mode(False):
            flat = torch.zeros(sum(sizes.fields), dtype=torch.int64, device=self.rows.device)
            batch = MixedBatch.view(flat, sizes)._asdict()
        tensors = self.rows.tensors(sizes.rows) | {f"prompt.{name}": tensor for name, tensor in batch.items()}
        like = next((program for program, _ in self._mixed.values()), None)
        made = self._program("mixed", like, tensors | {"tables": self.rows.table}), flat
        if self._sizes.is_bucketed:
            self._mixed[sizes] = made
        return made

    def _program(self, name: str, like: graph.Program | None, tensors: dict[str, Tensor]) -> graph.Program:
        """The program `name` on these tensors; `like` is the same program on others."""
        inputs = replace(self._model_inputs, buffer={**self._model_inputs.buffer, **tensors}, kv=self.cache.tensors())
        if like is not None:
            return like.bind_to(inputs)
        body, dynamic = (self._decode_body, DECODE) if name == "decode" else (self._mixed_body, MIXED)
        return self._runtime.program(name, body, inputs, {"kv", "buffer"}, dynamic, self._constants)

    def _decode_body(self, inputs: graph.Inputs, **statics: bool) -> dict[str, Tensor]:
        with graph.substitute_inputs(self._model, inputs):
            decode_step(self._model, inputs, self._decode_paging, **statics)
        return {}

    def _mixed_body(
        self, inputs: graph.Inputs, truncated: bool = True, greedy: bool = True, grouped: bool = True
    ) -> dict[str, Tensor]:
        with graph.substitute_inputs(self._model, inputs):
            mixed_step(self._model, inputs, self._paging, truncated, greedy, grouped)
        return {}

    def check_cases(self) -> graph.Work:
        """Launches on which to check all graphs made so far against eager."""
        check = CaseBuilder(self.rows, self.cache, self._model.config.vocab_size)
        work = [(program, check.decode_cases(program, size)) for size, program in self._decode.items()]
        return work + [(program, check.mixed_cases(batch, sizes)) for sizes, (program, batch) in self._mixed.items()]
