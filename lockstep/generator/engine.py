"""The engine: requests in, completions out, continuous batching in between.

Steps are launched in blocks. On a GPU a block is launched before the results of the previous one are read (`AHEAD`), so
the device does not wait for the host. A sequence that stopped in the meantime is idle on the device. One that only the
host can stop (at a stop string) goes on, and its surplus tokens are dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace

from torch import Tensor

from ..config import GeneratorConfig
from ..errors import InputError
from ..graph import EAGER, Runtime, Work
from ..types import SampleIdentity, SamplingParams, Trajectory
from .kv_cache import KVCache
from .request import Prefill, Sequence
from .runner import Block, Runner
from .running_batch import RunningBatch
from .scheduler import Chunk, Scheduler
from .sizes import num_rows
from .weights import SharedWeights

AGREEMENT_INTERVAL = 64  # launches between two calls of `Engine.check_agreement`
AHEAD = 1  # blocks on a GPU whose results may be unread when the next one is launched
MIN_CONTEXT = 64  # tokens that the block table has room for at first; doubled for longer requests


class Engine:
    """Generates with the given weights, and keeps two log-probabilities and the weights' version for each token.

    Args:
        cache_tokens: capacity of the KV cache (`plan_cache_tokens`).
        detokenize: token ids to text; needed for stop strings and for `Trajectory.text`.
        runtime: runs the steps, by default eagerly. Its `timings` measure launches (`prefill`, `decode`) and the
            reading of results (`read`).
        ahead: blocks whose results may be unread when the next one is launched; by default `AHEAD` on a GPU and 0 on a
            CPU, which has nothing to gain.

    Attributes:
        requests: the samples of each unfinished request, by its id.
        check_agreement: called with a digest of the schedule every `AGREEMENT_INTERVAL` launches; it raises if ranks
            that generate together differ.
        on_launch: called after every launch.
        special_token: the id of the special token with this text, or None. As a stop string it stops at the token,
            which has no text in a completion.
    """

    def __init__(
        self,
        weights: SharedWeights,
        config: GeneratorConfig,
        cache_tokens: int,
        detokenize: Callable[[list[int]], str] | None = None,
        runtime: Runtime = EAGER,
        ahead: int | None = None,
    ) -> None:
        model = weights.model
        self.config = config
        self.model_config = model.config
        self.detokenize = detokenize
        device = model.embed.device
        count, pages = num_rows(config, model.spread.min_rows), cache_tokens // config.page_size
        local, masked = model.config.per_rank(model.spread.axis.size), model.masks is not None
        self.cache = KVCache(local, pages, config.page_size, model.embed, masked, runtime.borrower)
        width = self.cache.pages_for(MIN_CONTEXT)
        routed = model.config.moe_layers > 0
        rows = RunningBatch(count, width, config.steps_per_sync, self.cache.null_page, device, routed)
        self.scheduler = Scheduler(config, self.cache, rows)
        self.runtime, self.timings = runtime, runtime.timings
        runtime.compile_layers_of(model)
        self.runner = Runner(weights, self.cache, rows, config.max_num_batched_tokens, runtime)
        self.ahead = (AHEAD if device.type == "cuda" else 0) if ahead is None else ahead
        self._in_flight: deque[Block] = deque()  # launched, with results not read yet
        self._grown: list[Sequence] = []  # sequences with tokens that `advance` has not returned yet
        self._ids = itertools.count()
        self.check_agreement: Callable[[str], None] | None = None
        self.on_launch: Callable[[], None] = lambda: None
        self.special_token: Callable[[str], int | None] = lambda _: None
        self._launches = 0
        self.requests: dict[int, list[Sequence]] = {}

    def generate(
        self, prompt_ids: list[list[int]], sampling: list[SamplingParams], identities: list[SampleIdentity]
    ) -> list[list[Trajectory]]:
        """Complete each prompt `sampling.n` times; samples are numbered as in `add_request`. If it raises, none of
        these requests is left in the engine."""
        found: list[dict[int, Trajectory]] = [{} for _ in prompt_ids]
        with closing(self.stream(prompt_ids, sampling, identities)) as grown:
            for prompt, sample, _, completion in grown:
                if completion is not None:
                    found[prompt][sample] = completion
        return [[samples[i] for i in sorted(samples)] for samples in found]

    def stream(
        self, prompt_ids: list[list[int]], sampling: list[SamplingParams], identities: list[SampleIdentity]
    ) -> Generator[tuple[int, int, list[int], Trajectory | None], None, None]:
        """`generate`, yielding each sample as it grows: the prompt's index, the sample's number, its tokens so far, and
        its completion once it is finished. Closing the generator aborts unfinished requests."""
        assert not self.requests, "it runs its own requests to the end; others are queued"
        ids: dict[int, int] = {}  # request id to the index of its prompt
        total, finished = sum(params.n for params in sampling), 0
        try:
            for index, request in enumerate(zip(prompt_ids, sampling, identities, strict=True)):
                ids[self.add_request(*request)] = index
            while self.requests:
                grown = self.advance()
                finished += sum(sample.completion is not None for sample in grown)
                self.timings.report_progress(f"{finished} of {total}")
                for sample in grown:
                    yield ids[sample.request_id], sample.identity.sample, sample.token_ids, sample.completion
        finally:
            for request_id in ids:
                self.abort(request_id)

    def warm_up(self, sequences: int, tokens: int, sampling: SamplingParams) -> None:
        """Make the graphs for up to `sequences` sequences at once, each of up to `tokens` tokens with its prompt.
        Requests within these limits capture nothing later. Call it once for each kind of sampling."""
        if self.runtime.layers is not None:
            for prompts, n in (([[0]], 1), ([[0, 0, 0]], 1), ([[0, 0], [0, 0, 0]], 2)):  # every way layers are called
                few = SamplingParams(n=n, max_completion_length=3, ignore_eos=True)
                self.generate(prompts, [few] * len(prompts), [SampleIdentity(0, 0, 0, 0)] * len(prompts))
        if sequences < 1:
            return
        assert not self.scheduler.busy, "warm_up() before the first request, or between requests"
        self.drain()
        self._widen_table(tokens)
        sequences = min(sequences, self.config.max_num_seqs)
        longest_prompt = max(1, tokens - sampling.max_completion_length)
        self.scheduler.sizes = self.runner.warm_up(sequences, longest_prompt, sampling)
        if self.scheduler.sizes:
            self.scheduler.max_tokens = self.scheduler.sizes[0]

    def expect(self, sequences: int) -> None:
        """Call before several `warm_up`, with the most sequences of any: they then make the same graphs whenever they
        are repeated, as ranks do that divide the making of graphs."""
        if sequences:
            self.runner.expect(min(sequences, self.config.max_num_seqs))

    def check_cases(self) -> Work:
        """Launches on which to check the warmed-up graphs against eager, before the first request."""
        return self.runner.check_cases()

    def lend(self) -> list[Tensor]:
        """GPU memory of the cache that is unused before the first request. It is zero, and the borrower must leave it
        so."""
        return self.cache.lend() if self.cache.k.is_cuda else []

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        """Queue a request and return its id. Its n samples are numbered from `identity.sample`.

        Requests may be added at any time between launches: no bit of a sample depends on when, or on what else runs.
        Raises `InputError` if the request could never run.
        """
        self.require_runnable(prompt_ids, sampling, identity.group)
        self._widen_table(len(prompt_ids) + sampling.max_completion_length)
        request_id = next(self._ids)
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        named = (token for token in map(self.special_token, sampling.stop) if token is not None)
        stop_ids = frozenset((*eos, *sampling.stop_token_ids, *named))
        prompt_ids = list(prompt_ids)
        samples = [
            Sequence(request_id, prompt_ids, sampling, replace(identity, sample=identity.sample + i), stop_ids)
            for i in range(sampling.n)
        ]
        self.requests[request_id] = samples
        self.scheduler.waiting.append(Prefill(prompt_ids, samples))
        return request_id

    def abort(self, request_id: int) -> list[Trajectory]:
        """Cancel a request and return its samples as far as they came; nothing for an unknown or finished id."""
        for sequence in self.scheduler.remove_request(request_id):
            sequence.finish("abort", self.detokenize)
        self._grown = [s for s in self._grown if s.request_id != request_id]
        return [s.completion for s in self.requests.pop(request_id, []) if s.completion is not None]

    def advance(self) -> list[Sequence]:
        """Launch one mixed step, or several decode steps if no prompt can start. Returns the live samples that have new
        tokens (on a GPU, from the previous launch), with `completion` set if finished. After an exception, running
        requests must be aborted."""
        grown = self._launch()
        for request_id in {sample.request_id for sample in grown if sample.completion is not None}:
            if all(sample.completion is not None for sample in self.requests[request_id]):
                del self.requests[request_id]
        return grown

    @property
    def launched_ahead(self) -> bool:
        """Whether there are launches whose results have not been read."""
        return bool(self._in_flight)

    def _launch(self) -> list[Sequence]:
        if self.cache.borrower is not None:
            self.cache.reclaim()
        version = self.runner.weights.version
        if any(block.version != version for block in self._in_flight):
            self.drain()
        chunks = self.scheduler.schedule_prefill(version)
        block = self._launch_mixed(chunks) if chunks else self._launch_decode()
        if block is None:
            assert self._in_flight or self._grown or not self.scheduler.busy, "a waiting request must fit an idle cache"
            self.drain()
        else:
            self._in_flight.append(block)
            self.scheduler.clock += block.steps
        self.drain(self.ahead)
        self._launches += 1
        self.on_launch()
        if self.check_agreement is not None and self._launches % AGREEMENT_INTERVAL == 0:
            self.check_agreement(self.scheduler.digest())
        grown, self._grown = self._grown, []
        return list(dict.fromkeys(grown))

    def _launch_mixed(self, chunks: list[Chunk]) -> Block:
        self._reserve(1)
        copies: list[tuple[int, int]] = []
        ending = [chunk for chunk in chunks if not chunk.prefill.remaining]
        for chunk in ending:
            chunk.started, more = self.scheduler.fork(chunk.prefill)
            copies += more
        tokens = sum(chunk.count for chunk in chunks)
        with self.timings.measure("prefill", on_device=True, tokens=tokens, sequences=len(self.scheduler.running)):
            block = self.runner.mixed(chunks)
        for chunk in ending:
            ended = chunk.prefill
            self.scheduler.register(ended.token_ids, ended.pages, ended.cache_version)
        if copies:
            self.cache.copy_pages(*map(list, zip(*copies, strict=True)))
        return block

    def _launch_decode(self) -> Block | None:
        """Launch a block of decode steps; None if every running sequence will have ended by then anyway."""
        running, clock = self.scheduler.running, self.scheduler.clock
        steps = min(self.config.steps_per_sync, max((s.end for s in running), default=clock) - clock)
        if self.scheduler.waiting:  # for slots or pages: check sooner whether some are free
            steps = min(steps, max(1, self.config.steps_per_sync // 2))
        steps = self._reserve(steps) if steps > 0 else 0
        if steps < 1:
            return None
        with self.timings.measure("decode", on_device=True, steps=steps, sequences=len(running)):
            return self.runner.decode(running, steps)

    def _reserve(self, steps: int) -> int:
        """Reserve pages for `steps` steps, or for as many as pages allow, and return how many. Preempts sequences if
        there are not enough pages for one step."""
        while self.scheduler.running:
            fitting = self.scheduler.reserve(steps)
            if fitting > 0:
                return fitting
            if self._in_flight:
                self.drain()
            else:
                self.scheduler.preempt(self.scheduler.running[-1])  # the youngest
        return 0

    def drain(self, ahead: int = 0) -> None:
        """Wait for and read the results of all launches but the last `ahead` blocks. The next `advance` returns what
        they add."""
        while len(self._in_flight) > ahead:
            with self.timings.measure("read"):
                self._process_results(self._in_flight.popleft())

    def _process_results(self, block: Block) -> None:
        for sequence, tokens, logprobs, model_logprobs, routes in block.results():
            if sequence.finish_reason is not None:  # finished before this launch, or stopped by the host since
                continue
            sequence.append(tokens, logprobs, model_logprobs, block.version, routes)
            if sequence.sampling.stop:
                assert self.detokenize is not None
                sequence.stop_at_string(self.detokenize, len(tokens))
            if sequence.finish_reason is not None:
                self.scheduler.release(sequence)
                sequence.finish(sequence.finish_reason, self.detokenize)
            self._grown.append(sequence)

    def _widen_table(self, tokens: int) -> None:
        """Widen the block table for sequences of `tokens` tokens if needed, which drops the graphs made so far."""
        room = MIN_CONTEXT
        while room < tokens:
            room *= 2
        if self.cache.pages_for(room) > self.scheduler.rows.width:
            self.drain()
            self.runner.widen(room)

    def require_runnable(self, prompt_ids: list[int], sampling: SamplingParams, group: int) -> None:
        """Raise `InputError` if such a request could never run; the message calls it prompt `group` + 1."""
        vocabulary, context = self.model_config.vocab_size, self.model_config.max_position_embeddings
        extremes = (min(prompt_ids), max(prompt_ids)) if prompt_ids else ()
        outside = next((t for t in extremes if not 0 <= t < vocabulary), None)
        stops = sampling.stop_token_ids
        bad_stop = next((t for t in stops if not isinstance(t, int) or not 0 <= t < vocabulary), None)
        new, cache = sampling.max_completion_length, self.cache
        length = len(prompt_ids) + new
        faults = (
            (not prompt_ids, "the prompt has no tokens"),
            (outside is not None, f"token id {outside} is outside the model's vocabulary of {vocabulary}"),
            (bad_stop is not None, f"stop_token_ids has {bad_stop!r}, which is no token id below {vocabulary}"),
            (min(sampling.n, new) < 1, "n and max_completion_length must be at least 1"),
            (bool(sampling.stop) and self.detokenize is None, "stop strings need a tokenizer"),
            (
                length > context,
                f"prompt of {len(prompt_ids)} tokens plus {new} new ones exceeds the model's context of {context}; "
                "shorten one of them",
            ),
            (
                cache.pages_for(length) > cache.num_pages,
                f"{length} tokens do not fit the KV cache of {cache.num_pages * cache.page_size}; raise "
                "generator.kv_cache_tokens",
            ),
        )
        for is_wrong, message in faults:
            if is_wrong:
                raise InputError(f"prompt {group + 1}: {message}")
