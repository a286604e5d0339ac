"""An open request whose client waits for the answer, or leaves. All of this runs in the event loop's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Self

from fastapi import Request

from ..errors import InputError, LockstepError
from ..session.generate import require_finite_logprobs
from ..types import Trajectory
from .batcher import Job, Update
from .errors import ApiError, bad_field
from .metrics import ServerMetrics


class ClientLeft(Exception):
    """The client has disconnected."""


class Ticket:
    """The jobs of one request, which run while the ticket is held: `async with` it, which calls `submit` and finally
    `close`, and read its updates. Leaving the block cancels what is unfinished. If the client leaves, reading raises
    `ClientLeft`."""

    def __init__(
        self,
        request: Request,
        jobs: list[Job],
        metrics: ServerMetrics,
        submit: Callable[[Ticket], None],
        close: Callable[[Ticket], None],
    ) -> None:
        self.request, self.jobs = request, jobs
        self.samples = sum(job.sampling.n for job in jobs)
        self.unfinished = {job: job.sampling.n for job in jobs}  # by job, its unfinished samples
        self.news: asyncio.Queue[tuple[Job, Update | Exception] | None] = asyncio.Queue()
        self._metrics, self._submit, self._close = metrics, submit, close

    async def __aenter__(self) -> Self:
        self._began, self._first = time.monotonic(), True
        self._watch = asyncio.create_task(self._watch_client())
        self._submit(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watch.cancel()
        self._close(self)
        if kind is None:
            self._metrics.seconds.observe(time.monotonic() - self._began)
        elif issubclass(kind, (ClientLeft, asyncio.CancelledError)):
            self._metrics.left.inc()

    async def _watch_client(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self.news.put_nowait(None)

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Updates of samples, each with the index of its job, until all are finished."""
        index = {job: i for i, job in enumerate(self.jobs)}
        while self.unfinished:
            found = await self.news.get()
            if found is None:
                raise ClientLeft
            job, item = found
            if isinstance(item, Exception):
                del self.unfinished[job]
                raise _as_api_error(item)
            if self._first and job.streamed:
                self._first = False
                self._metrics.first_token.observe(time.monotonic() - self._began)
            if item.completion is not None:
                self._finish(job, index[job], item.completion)
            yield index[job], item

    def _finish(self, job: Job, index: int, completion: Trajectory) -> None:
        self.unfinished[job] -= 1
        if not self.unfinished[job]:
            del self.unfinished[job]
        self._metrics.sampled_tokens.inc(len(completion.token_ids))
        try:
            require_finite_logprobs(index, completion)
        except LockstepError as error:
            raise ApiError(500, str(error), code="non_finite") from error

    async def completions(self) -> list[list[Trajectory]]:
        """The samples of each job, once all are finished."""
        found: list[dict[int, Trajectory]] = [{} for _ in self.jobs]
        async for index, update in self.updates():
            if update.completion is not None:
                found[index][update.sample] = update.completion
        return [[of_job[i] for i in range(len(of_job))] for of_job in found]


def _as_api_error(error: Exception) -> ApiError:
    """What the client is told about the error that ended its job."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return bad_field("prompt", str(error))
    return ApiError(500, f"the engine failed: {type(error).__name__}")
