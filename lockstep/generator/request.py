"""What the engine knows of a request: its samples, and how far each has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ops import sample_key
from ..types import Completion, FinishReason, SampleIdentity, SamplingParams


@dataclass(eq=False)
class Sequence:
    """One sample. Its first `num_cached` tokens (prompt and completion) have keys and values in `pages`."""

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams
    identity: SampleIdentity
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    cache_version: int = 0  # the weights that made the cached keys and values; -1: several
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        i = self.identity
        self.key = sample_key(i.seed, i.domain, i.step, i.group, i.sample)

    @property
    def length(self) -> int:
        """Prompt and completion tokens so far."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        """The newest token."""
        return (self.token_ids or self.prompt_ids)[-1]

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_completion_length - len(self.token_ids)

    def append(self, tokens: list[int], logprobs: list[float], model_logprobs: list[float], version: int) -> None:
        """Take sampled tokens up to a stop token or the length limit; what was drawn beyond is dropped."""
        for token, logprob, model_logprob in zip(tokens, logprobs, model_logprobs, strict=True):
            self.token_ids.append(token)
            self.logprobs.append(logprob)
            self.model_logprobs.append(model_logprob)
            self.versions.append(version)
            if token in self.stop_ids:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return

    def completion(self, text: str) -> Completion:
        """The finished sample."""
        assert self.finish_reason is not None
        return Completion(
            self.token_ids,
            self.logprobs,
            self.model_logprobs,
            self.versions,
            text,
            self.finish_reason,
            self.identity,
        )


@dataclass(eq=False)
class Prefill:
    """Tokens to run through the model once for all `samples`, which then go on from there apart.

    A new request is one prefill of its prompt for its n samples; a preempted sample is one of all its tokens.
    """

    token_ids: list[int]
    samples: list[Sequence]
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    cache_version: int = 0

    @property
    def remaining(self) -> int:
        """Tokens still to run."""
        return len(self.token_ids) - self.num_cached
