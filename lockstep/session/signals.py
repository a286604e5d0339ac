"""Signals that ask a process to end, as exceptions, so that a run leaves its summary and report before it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

from ..errors import Terminated

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

_ASKED_TO_END = (signal.SIGTERM, signal.SIGHUP)
_ONE = 0.5  # seconds in which signals are one: a terminal's Ctrl-C reaches a launcher as well, which passes it on
INTERRUPTED = 128 + signal.SIGINT  # the exit code of a command that Ctrl-C ended
_received: list[signal.Signals] = []


def interrupts_in_imports() -> None:
    """Of a command, from its first line: Ctrl-C while a module is imported ends the process at once. There it must not
    raise: what it interrupts may drop the exception (torch does), or leave half a module behind. Out of imports it
    raises `KeyboardInterrupt`, as `ended_by_signals` does once more. Where Ctrl-C is ignored it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)


def _interrupted(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"lockstep: interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    _received.append(signal.SIGINT)
    raise KeyboardInterrupt


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, the first SIGTERM or SIGHUP raises `Terminated`, and another ends the process at once; Ctrl-C raises
    `KeyboardInterrupt`. `raise_received` raises them once more, should they have been lost, and so does entering it for
    a Ctrl-C that a command was sent before. What is ignored (`nohup`) or handled already stays so, and outside the main
    thread nothing changes."""
    numbers = (*_ASKED_TO_END, signal.SIGINT)
    try:
        with handled_by(_raise, [number for number in numbers if signal.getsignal(number) in _DEFAULTS]):
            raise_received()
            yield
    finally:
        _received.clear()


@contextlib.contextmanager
def handled_by(handler: Handler, numbers: Iterable[int]) -> Iterator[None]:
    """Within it `handler` is called for these signals; afterwards what was before. Outside the main thread, which alone
    may say so, nothing changes."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler, _interrupted)


def _raise(number: int, _: FrameType | None) -> NoReturn:
    _received.append(signal.Signals(number))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    for every in _ASKED_TO_END:
        if signal.getsignal(every) is _raise:
            signal.signal(every, signal.SIG_DFL)
    raise Terminated(_received[-1])


class Delay:
    """The first signal within it raises nothing for so many seconds: until then its caller looks for it between steps.
    Another one, its end, or one for which nothing is worth waiting for is as without it. Where `ended_by_signals` does
    not handle them, or for no seconds at all, nothing changes.

    Args:
        seconds: alike in all processes of a run.
        tell: called with the signal's name, from a thread.
        pointless: whether to end at once, as when other processes are gone.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None], pointless: Callable[[], bool]) -> None:
        self.seconds, self._tell, self._pointless = seconds, tell, pointless
        self._first, self._came_at, self._late = 0, 0.0, False
        self._came, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> Delay:
        in_main = threading.current_thread() is threading.main_thread()  # which alone may handle signals
        numbers = (*_ASKED_TO_END, signal.SIGINT) if self.seconds > 0 and in_main else ()
        self._handled = [number for number in numbers if signal.getsignal(number) is _raise]
        if self._handled:
            self._thread.start()  # now: a handler may come while another is being started
            for number in self._handled:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._over.set()
        self._came.set()
        if self._handled:
            self._thread.join()

    @property
    def number(self) -> int:
        """Of the signal that came; 0 while none did."""
        return self._first

    def end(self, number: int) -> NoReturn:
        """Raise for a signal, of this process or another of the run, as `ended_by_signals` does."""
        self._restore()
        _raise(number, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._first and not self._late and time.monotonic() - self._came_at < _ONE:
            return
        if self._first or self._pointless():
            self._restore()
            _raise(number, frame)
        self._first, self._came_at = number, time.monotonic()
        self._came.set()

    def _watch(self) -> None:
        self._came.wait()
        if not self._first:
            return
        self._tell(signal.Signals(self._first).name)
        if not self._over.wait(self.seconds):
            self._late = True
            signal.pthread_kill(threading.main_thread().ident or 0, self._first)

    def _restore(self) -> None:
        for number in self._handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, _raise)


def raise_received() -> None:
    """Raise for a signal whose exception was lost: Python drops those that arise in a finalizer or a callback."""
    if _received:
        number = _received[0]
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
