"""Signals that ask a process to end, as exceptions, so that a run leaves its summary and report before it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from ..errors import Terminated

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

_ASKED_TO_END = (signal.SIGTERM, signal.SIGHUP)
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


def _raise(number: int, _: FrameType | None) -> None:
    _received.append(signal.Signals(number))
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    for every in _ASKED_TO_END:
        if signal.getsignal(every) is _raise:
            signal.signal(every, signal.SIG_DFL)
    raise Terminated(_received[-1])


def raise_received() -> None:
    """Raise for a signal whose exception was lost: Python drops those that arise in a finalizer or a callback."""
    if _received:
        number = _received[0]
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
