"""Calls of environments, which are answered in any order: none holds up another, nor the generator."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any


@dataclass(frozen=True)
class Failure:
    """A call that raised, or took too long: what happened in a line, and the traceback."""

    reason: str
    traceback: str = ""


@dataclass(frozen=True)
class Answer:
    """What a call returned, or how it failed, after so many seconds."""

    key: Hashable
    value: Any
    seconds: float


@dataclass(eq=False)
class _Here:
    """A call that some thread waits for, to be made in the thread that takes answers."""

    function: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        try:
            self.outcome.set_result(self.function())
        except BaseException as error:
            self.outcome.set_exception(error)


_own = threading.local()  # of a call's thread: the queue that answers go to


def in_the_main_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns, or raises, in the thread that takes answers: signals work there alone. The generator
    waits for it."""
    answers = getattr(_own, "answers", None)
    if answers is None:  # this is that thread
        return function()
    here = _Here(function)
    answers.put((None, 0, here))
    return here.outcome.result()


class Calls:
    """Functions that are called beside the caller's thread: plain ones in a thread each, coroutines in one event loop.

    A call that takes longer than `timeout` seconds (0: no limit) has failed; a thread that hangs is left behind, as
    nothing can end it, and a coroutine is cancelled. Where all are `instant`, plain ones are called here and now.
    """

    def __init__(self, timeout: float, instant: bool) -> None:
        self._timeout, self._all_instant = timeout, instant
        self._answers: SimpleQueue[tuple[Hashable, int, Any]] = SimpleQueue()
        self._open: dict[Hashable, tuple[int, float]] = {}  # the call's number, and when it began
        self._running: dict[Hashable, Any] = {}  # coroutines
        self._instant: list[Answer] = []  # that have not been asked for
        self._number = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._instant)

    def call(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it; its answer comes under `key`."""
        began, is_async = time.monotonic(), inspect.iscoroutinefunction(function)
        if self._all_instant and not is_async:
            value = _outcome(function, arguments)
            self._instant.append(Answer(key, value, time.monotonic() - began))
            return
        self._number = number = self._number + 1
        self._open[key] = (number, began)
        if is_async:
            coroutine = _outcome_of_coroutine(function, arguments)
            self._running[key] = future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
            future.add_done_callback(
                lambda done: None if done.cancelled() else self._answers.put((key, number, done.result()))
            )
        else:
            threading.Thread(
                target=lambda: self._answers.put((key, number, self._beside(function, arguments))), daemon=True
            ).start()

    def _beside(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        _own.answers = self._answers
        return _outcome(function, arguments)

    def answers(self, wait: bool) -> list[Answer]:
        """What has come since the last call, and what is overdue; with `wait` at least one, if any call is open."""
        found, self._instant = self._instant, []
        while self._open:
            while (taken := self._next(wait and not found)) is not None:
                key, number, value = taken
                if isinstance(value, _Here):
                    value.run()
                elif key in self._open and self._open[key][0] == number:  # else it came too late
                    found.append(self._close(key, value))
            found += self._overdue()
            if found or not wait:
                break
        return found

    def abandon(self) -> None:
        """Expect no more answers."""
        for future in self._running.values():
            future.cancel()
        self._open.clear()
        self._running.clear()
        self._instant.clear()

    def _next(self, wait: bool) -> tuple[Hashable, int, Any] | None:
        try:
            if not wait:
                return self._answers.get_nowait()
            return self._answers.get(timeout=self._patience())
        except Empty:
            return None

    def _patience(self) -> float | None:
        """Seconds until the first call is overdue."""
        if not self._timeout:
            return None
        first = min(began for _, began in self._open.values())
        return max(0.0, first + self._timeout - time.monotonic())

    def _overdue(self) -> list[Answer]:
        if not self._timeout:
            return []
        now = time.monotonic()
        late = [key for key, (_, began) in self._open.items() if now - began >= self._timeout]
        for key in late:
            if key in self._running:
                self._running[key].cancel()
        reason = f"it took longer than task.environment_timeout, {self._timeout:g} s"
        return [self._close(key, Failure(reason)) for key in late]

    def _close(self, key: Hashable, value: Any) -> Answer:
        self._running.pop(key, None)
        return Answer(key, value, time.monotonic() - self._open.pop(key)[1])


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:  # also what would end this thread alone, such as SystemExit
        return _failed(error)


async def _outcome_of_coroutine(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return await function(*arguments)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> Failure:
    return Failure(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One that runs in a thread of its own for as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
