"""Concurrent calls of environments' methods, answered in any order: none delays another, or the generator."""

from __future__ import annotations

import asyncio
import inspect
import sys
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
from ..user_functions import safe_str


@dataclass(frozen=True)
class Failure:
    """A call that raised or took too long: a line that says what happened, and the traceback."""

    reason: str
    traceback: str = ""


@dataclass(frozen=True)
class Answer:
    """What a call returned, or its `Failure`, and the seconds that it took."""

    key: Hashable
    value: Any
    seconds: float


_LOOP_THREAD = "lockstep-environments"
_LOOP_RESPONDS_S = 0.5  # the event loop is blocked if it takes longer to run a callback
_FOR_MAIN_THREAD = 0  # instead of a call's number, marks a function to run in the thread that takes answers
_current = threading.local()  # `call`, in the thread of a call: its `ConcurrentCalls`, and its number there


def run_in_main_thread(function: Callable[[], Any]) -> Any:
    """The result of `function`, or its exception, when run in the thread that takes answers, which is the main thread,
    where alone signal handlers can be set. The generator waits for it."""
    calls, _ = getattr(_current, "call", (None, 0))
    if calls is None:  # already in that thread
        return function()
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)
            _raise_if_interrupt(error)

    calls.deliver(_FOR_MAIN_THREAD, run)
    return outcome.result()


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, or its exception, for code in the thread of a call. The coroutine ends with the call:
    it is cancelled once nobody waits for the call's answer."""
    calls, number = getattr(_current, "call", (None, 0))
    if calls is None:
        return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()
    return calls.start_coroutine(number, coroutine).result()


class ConcurrentCalls:
    """Calls functions concurrently: plain ones in a thread each, coroutine functions in one event loop.

    A call that takes longer than `timeout` seconds (0: no limit) has failed: a coroutine is cancelled, and a thread is
    abandoned, as nothing can end it. If all are `instant`, plain functions are called at once, by the caller.
    """

    def __init__(self, timeout: float, instant: bool) -> None:
        self._timeout, self._all_instant = timeout, instant
        self._answers: SimpleQueue[tuple[int, Any, float]] = SimpleQueue()  # a call's number, its value, the time
        self._open: dict[int, tuple[Hashable, float]] = {}  # by number: the key, and the time it began
        self._running: dict[int, Future[Any]] = {}  # coroutines
        self._instant: list[Answer] = []  # not yet returned by `answers`
        self._number = 0

    def __len__(self) -> int:
        return len(self._open) + len(self._instant)

    def call(self, key: Hashable, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function; its answer will have this `key`."""
        began, is_async = time.monotonic(), inspect.iscoroutinefunction(function)
        if self._all_instant and not is_async:
            self._instant.append(Answer(key, _outcome(function, arguments), time.monotonic() - began))
            return
        self._number = number = self._number + 1
        self._open[number] = (key, began)
        if is_async:
            future = self.start_coroutine(number, _outcome_of_coroutine(function, arguments))
            future.add_done_callback(lambda done: None if done.cancelled() else self.deliver(number, done.result()))
        else:
            threading.Thread(target=self._call_in_thread, args=(number, function, arguments), daemon=True).start()

    def _call_in_thread(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        _current.call = self, number
        self.deliver(number, _outcome(function, arguments))

    def deliver(self, number: int, value: Any) -> None:
        """Hand `answers` the value of a call or, with `_FOR_MAIN_THREAD`, a function to run there. Any thread may call
        this."""
        self._answers.put((number, value, time.monotonic()))

    def start_coroutine(self, number: int, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine for a call, until the call is closed at the latest. Any thread may call this."""
        self._running[number] = future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
        if number not in self._open:
            future.cancel()
        return future

    def answers(self, wait: bool) -> list[Answer]:
        """New answers, including those of overdue calls; with `wait`, at least one if any call is open."""
        answers, self._instant = self._instant, []
        while self._open:
            while (delivered := self._next(wait and not answers)) is not None:
                number, value, came = delivered
                if number == _FOR_MAIN_THREAD:
                    value()
                elif number in self._open:  # else it is late
                    answers.append(self._close(number, value, came))
            answers += self._close_overdue()
            if answers or not wait:
                break
        return answers

    def abandon(self) -> None:
        """Drop all open calls, cancelling coroutines."""
        self._instant.clear()
        self._open.clear()
        for future in list(self._running.values()):
            future.cancel()
        self._running.clear()

    def _next(self, wait: bool) -> tuple[int, Any, float] | None:
        """The next answer in the queue, or None; with `wait`, wait for one until the first call is overdue."""
        timeout = None
        if wait and self._timeout:
            first = min(began for _, began in self._open.values())
            timeout = max(0.0, first + self._timeout - time.monotonic())
        with suppress(Empty):
            return self._answers.get(wait, timeout)
        return None

    def _close_overdue(self) -> list[Answer]:
        if not self._timeout:
            return []
        now = time.monotonic()
        overdue = [number for number, (_, began) in self._open.items() if now - began >= self._timeout]
        failure = Failure(f"it took longer than task.environment_timeout, {self._timeout:g} s")
        is_async = any(number in self._running for number in overdue)
        of_coroutine = _describe_blocked_loop(failure) if is_async else failure
        return [self._close(n, of_coroutine if n in self._running else failure, now) for n in overdue]

    def _close(self, number: int, value: Any, came: float) -> Answer:
        key, began = self._open.pop(number)
        future = self._running.pop(number, None)
        if future is not None:
            future.cancel()  # no effect if it is done
        return Answer(key, value, came - began)


def _outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except BaseException as error:  # including what would only end this thread, such as SystemExit
        _raise_if_interrupt(error)
        return _failure(error)


def _raise_if_interrupt(error: BaseException) -> None:
    """Raise a `KeyboardInterrupt` of the main thread: signals reach it anywhere, through no fault of what it called."""
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error


async def _outcome_of_coroutine(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return await function(*arguments)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    """The failure, with a traceback unless the error is this package's own, whose message says all."""
    lines = [] if isinstance(error, LockstepError) else traceback.format_exception(error)
    return Failure(f"{type(error).__name__}: {safe_str(error)}", "".join(lines))


def _describe_blocked_loop(failure: Failure) -> Failure:
    """The failure of an overdue coroutine, with what the event loop is busy with if some coroutine blocks it."""
    responds = threading.Event()
    event_loop().call_soon_threadsafe(responds.set)
    if responds.wait(_LOOP_RESPONDS_S):
        return failure
    (frame,) = [sys._current_frames()[t.ident or 0] for t in threading.enumerate() if t.name == _LOOP_THREAD]
    stack = "".join(traceback.format_stack(frame))
    return Failure(f"{failure.reason}; an async function, which should await, blocks all others", stack)


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The process's event loop for environments, which runs in a separate thread until the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_on, args=(loop,), name=_LOOP_THREAD, daemon=True).start()
    return loop


def _run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, and go on after an exception that ends it: a task that calls `sys.exit` ends no other."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
