"""The engine: requests in, completions out, continuous batching in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..config import GeneratorConfig
from ..errors import InputError
from ..graph import Compiler
from ..types import Completion, FinishReason, SampleIdentity, SamplingParams
from .decode_graphs import DecodeGraphs
from .kv_cache import KVCache
from .request import Prefill, Sequence
from .runner import Runner, Work
from .scheduler import Chunk, Scheduler
from .weights import SharedWeights, SnapshotWeights


class Engine:
    """Generates with the weights it is given, keeping a log-probability pair and the weights' version a token.

    Args:
        weights: the trainer's own weights or a snapshot.
        config: engine settings.
        cache_tokens: capacity of the KV cache (`plan_cache_tokens`).
        detokenize: token ids to text; needed for stop strings and for `Completion.text`.
        compiler: run decode steps as captured graphs; None calls the model.
    """

    def __init__(
        self,
        weights: SharedWeights | SnapshotWeights,
        config: GeneratorConfig,
        cache_tokens: int,
        detokenize: Callable[[list[int]], str] | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        model = weights.model
        self.weights = weights
        self.config = config
        self.model_config = model.config
        self.detokenize = detokenize
        device = model.embed.device
        pages = cache_tokens // config.page_size
        self.cache = KVCache(model.config, pages, config.page_size, model.embed.dtype, device)
        self.scheduler = Scheduler(config, self.cache)
        graphs = DecodeGraphs(self.cache, config.steps_per_sync, compiler) if compiler else None
        self.runner = Runner(weights, self.cache, device, graphs)
        self._ids = itertools.count()
        self._pending: dict[int, dict[int, Completion | None]] = {}

    def generate(
        self, prompt_ids: list[list[int]], sampling: list[SamplingParams], identities: list[SampleIdentity]
    ) -> list[list[Completion]]:
        """Complete each prompt `sampling.n` times; sample i has `identity.sample == i`. All or nothing: when it
        raises, none of these requests is left behind."""
        assert not self._pending, "generate() runs its own requests to the end; others are queued"
        ids: list[int] = []
        try:
            for prompt, params, identity in zip(prompt_ids, sampling, identities, strict=True):
                ids.append(self.add_request(prompt, params, identity))
            done: dict[int, list[Completion]] = {}
            while len(done) < len(ids):
                done |= dict(self.step())
            return [done[i] for i in ids]
        except BaseException:
            for i in ids:
                self.abort(i)
            raise

    def warm_up(self, sequences: int, tokens: int, sampling: SamplingParams) -> None:
        """Make the graphs that decoding up to so many sequences of so many tokens needs; nothing without a compiler."""
        if self.runner.graphs is not None and sequences > 0:
            sequences, greedy = min(sequences, self.config.max_num_seqs), sampling.temperature == 0
            self.runner.graphs.warm_up(self.weights.model, sequences, tokens, sampling.truncated, greedy)

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        """Queue a request; returns its id. `InputError` when it could never run."""
        self._check(prompt_ids, sampling, identity)
        request_id = next(self._ids)
        eos = () if sampling.ignore_eos else self.model_config.eos_token_ids
        stop_ids = frozenset((*eos, *sampling.stop_token_ids))
        samples = [
            Sequence(
                request_id,
                list(prompt_ids),
                sampling,
                SampleIdentity(identity.seed, identity.domain, identity.step, identity.group, i),
                stop_ids,
            )
            for i in range(sampling.n)
        ]
        self._pending[request_id] = dict.fromkeys(range(sampling.n))
        self.scheduler.waiting.append(Prefill(list(prompt_ids), samples))
        return request_id

    def abort(self, request_id: int) -> list[Completion]:
        """Cancel a request; returns what its samples had so far. Unknown or finished ids return nothing."""
        done = self._pending.pop(request_id, None)
        if done is None:
            return []
        for sequence in self.scheduler.drop(request_id):
            done[sequence.identity.sample] = self._finish(sequence, "abort")
        return [c for c in done.values() if c is not None]

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Run one mixed step, or several decode steps when no prompt waits; returns the requests that finished."""
        version = self.weights.version
        chunks = self.scheduler.schedule_prefill(version)
        if chunks:
            sampled = self._mixed_step(chunks, version)
        elif self.scheduler.running:
            sampled = self._decode_steps(version)
        else:
            assert not self.scheduler.busy, "a waiting request must fit an idle cache"
            return []
        for sequence in sampled:
            self._stop_at_string(sequence)
            if sequence.finish_reason is not None:
                self.scheduler.release(sequence)
                done = self._pending[sequence.request_id]
                done[sequence.identity.sample] = self._finish(sequence, sequence.finish_reason)
        return self._collect(list(dict.fromkeys(s.request_id for s in sampled)))

    def _collect(self, request_ids: list[int]) -> list[tuple[int, list[Completion]]]:
        """Those of the requests whose samples are all finished, no longer pending."""
        finished = []
        for request_id in request_ids:
            done = [c for c in self._pending[request_id].values() if c is not None]
            if len(done) == len(self._pending[request_id]):
                del self._pending[request_id]
                finished.append((request_id, done))
        return finished

    def _mixed_step(self, chunks: list[Chunk], version: int) -> list[Sequence]:
        """Prompt chunks together with one token of every running sequence."""
        if self.scheduler.running:
            self.scheduler.reserve_decode(1)
        decoding = list(self.scheduler.running)
        work = [Work([s.last_token], s.num_cached, s.pages) for s in decoding]
        for chunk in chunks:
            tokens = chunk.prefill.token_ids[chunk.start : chunk.start + chunk.count]
            work.append(Work(tokens, chunk.start, chunk.prefill.pages))
        finished = [(len(decoding) + i, c.prefill) for i, c in enumerate(chunks) if not c.prefill.remaining]
        drawing = list(enumerate(decoding)) + [(row, s) for row, prefill in finished for s in prefill.samples]
        drawn = self.runner.mixed(work, [row for row, _ in drawing], [s for _, s in drawing])
        results = {s: r for (_, s), r in zip(drawing, zip(*(t.tolist() for t in drawn), strict=True), strict=True)}
        for sequence in decoding:
            self._cached(sequence, 1, version)
        sampled = decoding + [s for _, prefill in finished for s in self.scheduler.fork(prefill)]
        for sequence in sampled:
            token, logprob, model_logprob = results[sequence]
            sequence.append([token], [logprob], [model_logprob], version)
        return sampled

    def _decode_steps(self, version: int) -> list[Sequence]:
        steps = self.scheduler.reserve_decode(self.config.steps_per_sync)
        running = list(self.scheduler.running)
        tokens, logprobs, model_logprobs = (t.t().tolist() for t in self.runner.decode(running, steps))
        for i, sequence in enumerate(running):
            self._cached(sequence, steps, version)
            sequence.append(tokens[i], logprobs[i], model_logprobs[i], version)
        return running

    @staticmethod
    def _cached(sequence: Sequence, count: int, version: int) -> None:
        sequence.num_cached += count
        if sequence.cache_version != version:
            sequence.cache_version = -1

    def _stop_at_string(self, sequence: Sequence) -> None:
        """End a sample at the first token after which its text contains a stop string."""
        if not sequence.sampling.stop or self.detokenize is None:
            return
        stops = sequence.sampling.stop
        if not any(s in self.detokenize(sequence.token_ids) for s in stops):
            return
        low, high = 1, len(sequence.token_ids)
        while low < high:  # the shortest prefix of tokens that contains one
            middle = (low + high) // 2
            found = any(s in self.detokenize(sequence.token_ids[:middle]) for s in stops)
            low, high = (low, middle) if found else (middle + 1, high)
        for values in (sequence.token_ids, sequence.logprobs, sequence.model_logprobs, sequence.versions):
            del values[low:]
        sequence.finish_reason = "stop"

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        sequence.finish_reason = reason
        return sequence.completion(self.detokenize(sequence.token_ids) if self.detokenize else "")

    def _check(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> None:
        where = f"request of group {identity.group}"
        if not prompt_ids:
            raise InputError(f"{where}: the prompt has no tokens")
        vocabulary = self.model_config.vocab_size
        outside = [t for t in prompt_ids if not 0 <= t < vocabulary]
        if outside:
            raise InputError(f"{where}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}")
        if sampling.n < 1 or sampling.max_completion_length < 1:
            raise InputError(f"{where}: n and max_completion_length must be at least 1")
        if sampling.stop and self.detokenize is None:
            raise InputError(f"{where}: stop strings need a tokenizer")
        length = len(prompt_ids) + sampling.max_completion_length
        if length > self.model_config.max_position_embeddings:
            raise InputError(
                f"{where}: prompt of {len(prompt_ids)} tokens plus {sampling.max_completion_length} new ones exceeds "
                f"the model's context of {self.model_config.max_position_embeddings}; shorten one of them"
            )
        if self.cache.pages_for(length) > self.cache.num_pages:
            raise InputError(
                f"{where}: {length} tokens do not fit the KV cache of "
                f"{self.cache.num_pages * self.cache.page_size}; raise generator.kv_cache_tokens"
            )
