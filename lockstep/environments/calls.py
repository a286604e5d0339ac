"""Calls of environments, which are answered in any order: none holds up another, nor the generator."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import LockstepError
from ..user_functions import text_of


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


_HERE = 0  # stands for the number of what is to be called in the thread that takes answers
_own = threading.local()  # of a call's thread: its `Calls`, and its number there


def in_the_main_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns, or raises, in the thread that takes answers: signals work there alone. The generator
    waits for it."""
    calls, _ = getattr(_own, "call", (None, 0))
    if calls is None:  # this is that thread
        return function()
    outcome: Future[Any] = Future()

    def here() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)
            _raise_a_signals(error)

    calls.bring(_HERE, here)
    return outcome.result()


def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns, or raises, to the thread of a call, which has an end with the call's: a coroutine that
    hangs is cancelled once nobody waits for the call's answer."""
    calls, number = getattr(_own, "call", (None, 0))
    begun = (
        asyncio.run_coroutine_threadsafe(coroutine, event_loop()) if calls is None else calls.begin(number, coroutine)
    )
    return begun.result()


class Calls:
    """Functions that are called beside the caller's thread: plain ones in a thread each, coroutines in one event loop.

    A call that takes longer than `timeout` seconds (0: no limit) has failed; a thread that hangs is left behind, as
    nothing can end it, and a coroutine is cancelled. Where all are `instant`, plain ones are called here and now.
    """

    def __init__(self, timeout: float, instant: bool) -> None:
        self._timeout, self._all_instant = timeout, instant
        self._answers: SimpleQueue[tuple[int, Any, float]] = SimpleQueue()  # of a call, by its number, and when it came
        self._open: dict[int, tuple[Hashable, float]] = {}  # by number: the key, and when it began
        self._running: dict[int, Future[Any]] = {}  # coroutines
        self._instant: list[Answer] = []  # that have not been asked for
        self._number = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._instant)

    def call(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it; its answer comes under `key`."""
        began, is_async = time.monotonic(), inspect.iscoroutinefunction(function)
        if self._all_instant and not is_async:
            self._instant.append(Answer(key, _outcome(function, arguments), time.monotonic() - began))
            return
        self._number = number = self._number + 1
        self._open[number] = (key, began)
        if is_async:
            future = self.begin(number, _outcome_of_coroutine(function, arguments))
            future.add_done_callback(lambda done: None if done.cancelled() else self.bring(number, done.result()))
        else:
            threading.Thread(target=self._beside, args=(number, function, arguments), daemon=True).start()

    def _beside(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        _own.call = self, number
        self.bring(number, _outcome(function, arguments))

    def bring(self, number: int, value: Any) -> None:
        """Have `answers` find what a call came to, or what is to be called there. Any thread may."""
        self._answers.put((number, value, time.monotonic()))

    def begin(self, number: int, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine of this call, for as long as it is open. Any thread may."""
        self._running[number] = future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
        if number not in self._open:
            future.cancel()
        return future

    def answers(self, wait: bool) -> list[Answer]:
        """What has come since the last call, and what is overdue; with `wait` at least one, if any call is open."""
        found, self._instant = self._instant, []
        while self._open:
            while (taken := self._next(wait and not found)) is not None:
                number, value, came = taken
                if number == _HERE:
                    value()
                elif number in self._open:  # else it came too late
                    found.append(self._close(number, value, came))
            found += self._overdue()
            if found or not wait:
                break
        return found

    def abandon(self) -> None:
        """Expect no more answers."""
        self._instant.clear()
        self._open.clear()
        for future in list(self._running.values()):
            future.cancel()
        self._running.clear()

    def _next(self, wait: bool) -> tuple[int, Any, float] | None:
        """What came next; with `wait`, until the first call is overdue."""
        patience = None
        if wait and self._timeout:
            first = min(began for _, began in self._open.values())
            patience = max(0.0, first + self._timeout - time.monotonic())
        with suppress(Empty):
            return self._answers.get(wait, patience)
        return None

    def _overdue(self) -> list[Answer]:
        if not self._timeout:
            return []
        now = time.monotonic()
        late = [number for number, (_, began) in self._open.items() if now - began >= self._timeout]
        reason = f"it took longer than task.environment_timeout, {self._timeout:g} s"
        return [self._close(number, Failure(reason), now) for number in late]

    def _close(self, number: int, value: Any, came: float) -> Answer:
        key, began = self._open.pop(number)
        if (future := self._running.pop(number, None)) is not None:
            future.cancel()  # of one that is done it changes nothing
        return Answer(key, value, came - began)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:  # also what would end this thread alone, such as SystemExit
        _raise_a_signals(error)
        return _failed(error)


def _raise_a_signals(error: BaseException) -> None:
    """Ctrl-C and the like reach the main thread wherever it is, and are no fault of what it called."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


async def _outcome_of_coroutine(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return await function(*arguments)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> Failure:
    """With its traceback, but of what this package raises, which says all."""
    told = [] if isinstance(error, LockstepError) else traceback.format_exception(error)
    return Failure(f"{type(error).__name__}: {text_of(error)}", "".join(told))


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One that runs in a thread of its own for as long as the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
