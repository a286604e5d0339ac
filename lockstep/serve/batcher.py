"""One engine for the requests of many clients: jobs are accepted and results delivered between its launches.

One thread calls `step` in a loop, and it alone touches the engine. Other threads call `submit` and `cancel`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from ..errors import InputError, LockstepError
from ..generator import Engine
from ..types import SampleIdentity, SamplingParams, Trajectory

MAX_FAILURES = 3  # consecutive failed launches, after which the engine is given up
MAX_FOLLOWER_WAIT_S = 0.02  # the most seconds that a launch waits for new jobs of clients just answered

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Update:
    """Progress of a sample: its tokens since the last update (for streamed jobs; otherwise all), with both
    log-probabilities as in `Segment`, and its completion once it is finished. `sample` is its index in the job."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    completion: Trajectory | None


@dataclass(eq=False)
class Job:
    """A prompt to complete `sampling.n` times, as for `Engine.add_request`. `streamed`: updates are delivered as
    samples grow; otherwise, once per finished sample."""

    prompt_ids: list[int]
    sampling: SamplingParams
    identity: SampleIdentity
    streamed: bool = False
    delivered: list[int] = field(init=False)  # tokens of each sample
    unfinished: int = field(init=False)  # samples
    request_id: int = field(default=-1, init=False)  # the engine's

    def __post_init__(self) -> None:
        self.unfinished = self.sampling.n
        self.delivered = [0] * self.unfinished


News = list[tuple[Job, Update | Exception]]


class Batcher:
    """Runs jobs, which may arrive at any time, in one engine. `deliver` is called with the news of each turn, in the
    thread that calls `step`; an exception among them ends its job."""

    def __init__(self, engine: Engine, deliver: Callable[[News], None]) -> None:
        self.engine, self._deliver = engine, deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by the engine's id
        self._news: News = []
        self._failures = 0
        self._jobs_ended, self._launch_s = 0, 0.0  # jobs that the last launch ended, and its duration

    def submit(self, job: Job) -> None:
        self._inbox.put(partial(self._add, job))

    def cancel(self, job: Job) -> None:
        """Cancel a job unless it is finished. Once the engine's thread has seen this, nothing is delivered for it."""
        self._inbox.put(partial(self._remove, job))

    def wake(self) -> None:
        """Make a `step` that waits for jobs return. Signal handlers may call this."""
        self._inbox.put(lambda: None)

    def step(self, wait: float | None = None) -> None:
        """Accept new jobs, launch once, and deliver. Without a job, wait for one for up to `wait` seconds (None: for
        any time). `LockstepError`: the engine has failed `MAX_FAILURES` times in a row."""
        self._receive_jobs(wait)
        if self._jobs:
            try:
                began, self._jobs_ended = time.monotonic(), 0
                self._launch()
                self._failures, self._launch_s = 0, time.monotonic() - began
            except Exception as error:
                self._fail(error)
        self._deliver_news()
        if self._failures >= MAX_FAILURES:
            raise LockstepError(f"the engine failed {MAX_FAILURES} times in a row; see the messages before this one")

    def abort_all(self, error: Exception) -> None:
        """End all jobs, those that wait included, with `error`."""
        self._receive_jobs(0)
        self._drop_all(error)
        self._deliver_news()

    def _receive_jobs(self, wait: float | None) -> None:
        with suppress(queue.Empty):
            if not self._jobs:
                self._inbox.get(wait != 0, wait)()
            elif self.engine.launched_ahead:
                self._wait_for_followers()
            while True:
                self._inbox.get_nowait()()

    def _wait_for_followers(self) -> None:
        """Clients whose jobs have ended often send another at once, which would just miss the next launch: wait for as
        many jobs, for up to half the last launch's duration. The device meanwhile runs what was launched ahead."""
        until = time.monotonic() + min(self._launch_s / 2, MAX_FOLLOWER_WAIT_S)
        for _ in range(self._jobs_ended):
            self._inbox.get(timeout=max(0.0, until - time.monotonic()))()

    def _add(self, job: Job) -> None:
        try:
            job.request_id = self.engine.add_request(job.prompt_ids, job.sampling, job.identity)
            self._jobs[job.request_id] = job
        except InputError as error:
            self._news.append((job, error))
        except Exception as error:
            self._news.append((job, error))
            self._fail(error)

    def _remove(self, job: Job) -> None:
        if self._jobs.pop(job.request_id, None) is not None:
            self.engine.abort(job.request_id)

    def _launch(self) -> None:
        for grown in self.engine.advance():
            job = self._jobs[grown.request_id]
            sample = grown.identity.sample - job.identity.sample
            if grown.completion is None and not job.streamed:
                continue
            new = slice(job.delivered[sample], len(grown.token_ids))
            job.delivered[sample] = new.stop
            own_logprobs = grown.model_logprobs[new]
            update = Update(sample, grown.token_ids[new], grown.logprobs[new], own_logprobs, grown.completion)
            self._news.append((job, update))
            if grown.completion is not None:
                job.unfinished -= 1
                if not job.unfinished:
                    self._jobs_ended += 1
                    del self._jobs[grown.request_id]

    def _fail(self, error: Exception) -> None:
        """After the engine has raised, drop all jobs: those that ran are lost, and a waiting one may be the cause."""
        _log.error("the engine failed", exc_info=error)
        self._failures += 1
        self._drop_all(error)

    def _drop_all(self, error: Exception) -> None:
        for request_id, job in self._jobs.items():
            self.engine.abort(request_id)
            self._news.append((job, error))
        self._jobs.clear()

    def _deliver_news(self) -> None:
        if self._news:
            self._news, news = [], self._news
            self._deliver(news)
