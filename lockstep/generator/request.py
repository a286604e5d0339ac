"""The engine's state of a request: its samples and their progress."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ops import sample_key
from ..types import FinishReason, SampleIdentity, SamplingParams, Segment, Trajectory


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The first positions of all samples of a prompt, which share the same pages."""

    positions: int
    pages: list[int]


@dataclass(eq=False)
class Sequence:
    """One sample. While it runs, all its tokens but the last have keys and values in `pages`.

    Attributes:
        row: its row on the device while it runs, otherwise -1.
        cache_version: the version of the weights that made its keys and values; -1: several versions.
        end: the scheduler's clock after which it has its last token, if nothing stops it before.
        lease: the id of its valid entry in the scheduler's heap of leases; 0: none.
        positions: the most cache positions it may need; the keys and values of its last token are never made.
        routes, prompt_routes: as in `Segment.route_digests`.
    """

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    identity: SampleIdentity
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[int] | None = None
    prompt_routes: list[int] | None = None
    pages: list[int] = field(default_factory=list)
    cache_version: int = 0
    finish_reason: FinishReason | None = None
    row: int = -1
    end: int = 0
    lease: int = 0
    shared: SharedPrefix | None = None
    completion: Trajectory | None = None

    def __post_init__(self) -> None:
        i = self.identity
        self.key = sample_key(i.seed, i.domain, i.step, i.group, i.sample)
        self.positions = len(self.prompt_ids) + self.sampling.max_completion_length - 1

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.sampling.max_completion_length - len(self.token_ids)

    def append(
        self,
        tokens: list[int],
        logprobs: list[float],
        model_logprobs: list[float],
        version: int,
        routes: list[int] | None = None,
    ) -> None:
        """Add sampled tokens up to a stop token or the length limit, and drop any beyond."""
        remaining = self.sampling.max_completion_length - len(self.token_ids)
        count = min(len(tokens), remaining)
        if not self.stop_ids.isdisjoint(tokens[:count]):
            count = 1 + next(i for i, token in enumerate(tokens) if token in self.stop_ids)
            self.finish_reason = "stop"
        elif count == remaining:
            self.finish_reason = "length"
        if count < len(tokens):
            tokens, logprobs, model_logprobs = tokens[:count], logprobs[:count], model_logprobs[:count]
        self.token_ids += tokens
        self.logprobs += logprobs
        self.model_logprobs += model_logprobs
        self.versions += [version] * count
        if routes is not None:
            self.routes = self.routes or []
            self.routes += routes[:count]
        if version != self.cache_version:
            self.cache_version = -1

    def stop_at_string(self, text_of: Callable[[list[int]], str], new: int) -> None:
        """If the last `new` tokens complete a stop string, end at the first token after which the text contains one."""

        def has_one(token_ids: list[int]) -> bool:
            text = text_of(token_ids)
            return any(stop in text for stop in self.sampling.stop)

        longest = max(map(len, self.sampling.stop))
        tail = new + 4 * longest + 8  # a character has at most four tokens; the first of a text may decode otherwise
        ended = self.finish_reason is not None  # check all of it: tokens without text may have hidden a stop string
        if not (ended or has_one(self.token_ids[-tail:])) or not has_one(self.token_ids):
            return
        shorter = range(len(self.token_ids))
        least = bisect_left(shorter, True, lo=1, key=lambda count: has_one(self.token_ids[:count]))
        for values in (self.token_ids, self.logprobs, self.model_logprobs, self.versions, self.routes or []):
            del values[least:]
        self.finish_reason = "stop"

    def finish(self, reason: FinishReason, text_of: Callable[[list[int]], str] | None) -> None:
        """Make its completion, with the text if there is a detokenizer."""
        text = "" if text_of is None else text_of(self.token_ids)
        self.finish_reason = reason
        drawn = self.token_ids, True, self.logprobs, self.model_logprobs, self.versions, self.routes, text
        segments = [Segment(self.prompt_ids, route_digests=self.prompt_routes), Segment(*drawn)]
        name = f"group {self.identity.group} sample {self.identity.sample}"
        self.completion = Trajectory(segments, reason, self.identity, name)


@dataclass(eq=False)
class Prefill:
    """Tokens to run through the model once for all `samples`, which then continue separately.

    A new request is a prefill of its prompt for its n samples; a preempted sample is a prefill of all its tokens.
    """

    token_ids: list[int]
    samples: list[Sequence]
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    cache_version: int = 0
    row: int = -1  # the first sample's row, taken when the prefill starts

    @property
    def remaining(self) -> int:
        return len(self.token_ids) - self.num_cached
