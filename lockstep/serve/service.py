"""Between HTTP and the engine: admits requests, and routes the batcher's updates to those that wait for them.

All of this runs in the event loop's thread, except for `_deliver`, by which the batcher's thread hands updates over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import Request

from ..errors import InputError, PromptTooLong
from ..generator import Engine
from ..session.text.policy import Policy
from ..types import GENERATE_DOMAIN, SampleIdentity, SamplingParams
from .batcher import Batcher, Job, News
from .bodies import ChatBody, CompletionBody, SamplingFields
from .errors import ApiError, bad_field, shutting_down
from .metrics import ServerMetrics
from .settings import Settings
from .ticket import Ticket

MAX_CACHED_TOKENS = 1 << 16  # cached texts of tokens: decoding a token takes longer than sampling it
MAX_EXACT_INTEGER = 1 << 53  # smaller integers are exact in every language's JSON

_T = TypeVar("_T")


class Service:
    """The state and operations that routes share.

    Args:
        context: the most tokens of a prompt and its completion together.
        seed: seeds the generator of seeds for requests without one.

    Attributes:
        tool_format: how the model's chat template expresses tool calls; None: it does not, or in an unknown format.
        token_text: the text of a single token.
        open_samples: samples of requests that are not answered yet.
        stopping: whether the server is shutting down, and accepts no more requests.
    """

    def __init__(self, policy: Policy, engine: Engine, settings: Settings, context: int, seed: int) -> None:
        self.policy, self.settings, self.context = policy, settings, context
        self.batcher = Batcher(engine, self._deliver)
        self.metrics = ServerMetrics(engine)
        self.max_samples = engine.config.max_num_seqs + settings.max_waiting
        self.open_samples, self._encoding, self.stopping = 0, 0, False
        self.tool_format = policy.tool_format
        decode = policy.tokenizer.decode
        self.token_text = lru_cache(MAX_CACHED_TOKENS)(lambda token_id: decode([token_id], skip_special_tokens=False))
        self._check = engine.require_runnable
        self._seeds = random.Random(seed)
        self._tickets: dict[Job, Ticket] = {}
        self._encoder = ThreadPoolExecutor(1, "encode")  # one thread: a tokenizer encodes one text at a time
        self._loop: asyncio.AbstractEventLoop | None = None

    def token_namer(self, body: ChatBody | CompletionBody) -> Callable[[int], str]:
        """How log-probabilities name a token: by its text or, if the request asks for that, by its id."""
        return "token_id:{}".format if body.return_tokens_as_token_ids else self.token_text

    def close(self) -> None:
        """Stop encoding prompts."""
        self._encoder.shutdown(wait=False)

    async def run_encoder(self, field: str, encode: Callable[[], _T]) -> _T:
        """The result of `encode`, run in a separate thread. Its `InputError` becomes an `ApiError` for `field`. Raises
        `ApiError` at once if the server ends, or is full with a sample for each request that is being encoded."""
        self._require_room(self._encoding + 1)
        self._encoding += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)
        except InputError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            raise bad_field(field, str(error), code) from error
        finally:
            self._encoding -= 1

    def with_sampled_tokens(self, request: Request, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation, with token ids of sampled turns that the server knows; here none, as clients send them."""
        return messages

    def stop_strings(self, body: ChatBody) -> tuple[str, ...]:
        """The strings at which the answers of the conversation stop: those of the request."""
        return tuple(body.stop)

    def check_model(self, name: str) -> None:
        """Raise `ApiError` if a request names another model than the one served; it need not name any."""
        if name and name != self.settings.name:
            message = f"the model {name!r} is not served here; {self.settings.name!r} is"
            raise ApiError(404, message, "model", "model_not_found")

    def job(self, prompt_ids: list[int], body: SamplingFields, max_tokens: int, field: str, group: int = 0) -> Job:
        """The job for a prompt. Raises `ApiError` if it could never run; `field` is the name of the prompt's field."""
        sampling = body.sampling(max_tokens)
        total = len(prompt_ids) + max_tokens
        if total > self.context:
            raise bad_field(
                field,
                f"the prompt has {len(prompt_ids)} tokens, and max_tokens is {max_tokens}; together they may be "
                f"{self.context} at most",
                "context_length_exceeded",
            )
        self.require_capacity(sampling.n, "n")
        self.check(prompt_ids, sampling, field, group)
        assert body.seed is not None, "given one by `ensure_seed`"
        return Job(prompt_ids, sampling, SampleIdentity(body.seed, GENERATE_DOMAIN, 0, group))

    def check(self, prompt_ids: list[int], sampling: SamplingParams, field: str, group: int = 0) -> None:
        """Raise `ApiError` for what the engine could never run; `field` is the name of the prompt's field."""
        vocabulary = self.policy.model.config.vocab_size
        if any(not 0 <= token < vocabulary for token in sampling.stop_token_ids):
            raise bad_field("stop_token_ids", f"stop_token_ids must be token ids of the model, each below {vocabulary}")
        try:
            self._check(prompt_ids, sampling, group)
        except InputError as error:
            raise bad_field(field, str(error)) from error

    def require_capacity(self, samples: int, field: str) -> None:
        """Raise `ApiError` for more samples than the server ever has room for."""
        if samples > self.max_samples:
            raise bad_field(field, f"{samples} samples are asked for; the server has room for {self.max_samples}")

    def ensure_seed(self, body: SamplingFields) -> int:
        """The request's seed. A request without one is given a random one, which its answer reports."""
        if body.seed is None:
            body.seed = self._seeds.randrange(MAX_EXACT_INTEGER)
        return body.seed

    def open_ticket(self, request: Request, jobs: list[Job], stream: bool = False) -> Ticket:
        """A ticket for running a request's jobs; `stream`: with updates as samples grow. `ApiError`: the server is
        full, or ends."""
        self._require_room(sum(job.sampling.n for job in jobs))
        for job in jobs:
            job.streamed = stream
        self.metrics.prompt_tokens.inc(sum(len(job.prompt_ids) for job in jobs))
        return Ticket(request, jobs, self.metrics, self.submit_ticket, self.close_ticket)

    def _require_room(self, samples: int) -> None:
        if self.stopping:
            raise shutting_down()
        if self.open_samples + samples > self.max_samples:
            message = f"{self.open_samples} samples run or wait, of {self.max_samples} that may; try again later"
            raise ApiError(429, message, code="server_full")

    def submit_ticket(self, ticket: Ticket) -> None:
        """Submit the ticket's jobs to the batcher, whose news will arrive in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.open_samples += ticket.samples
        for job in ticket.jobs:
            self._tickets[job] = ticket
            self.batcher.submit(job)

    def close_ticket(self, ticket: Ticket) -> None:
        """Forget the ticket's jobs, and cancel those that still run."""
        self.open_samples -= ticket.samples
        for job in ticket.jobs:
            self._tickets.pop(job, None)
            if job in ticket.unfinished:
                self.batcher.cancel(job)

    def _deliver(self, news: News) -> None:
        """Called in the batcher's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and all that waited with it
                self._loop.call_soon_threadsafe(self._dispatch, news)

    def _dispatch(self, news: News) -> None:
        for job, item in news:
            if (ticket := self._tickets.get(job)) is not None:
                ticket.news.put_nowait((job, item))
