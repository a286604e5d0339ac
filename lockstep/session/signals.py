"""Signals that ask a process to end, as exceptions, so that a run leaves its summary and report before it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from ..errors import Terminated

T = TypeVar("T")
Handler = Callable[[int, FrameType | None], object] | signal.Handlers

_ASKED_TO_END = (signal.SIGTERM, signal.SIGHUP)
_ONE = 0.5  # seconds in which signals are one: a terminal's Ctrl-C reaches a launcher as well, which passes it on
_ON_ITS_WAY = 0.005  # seconds between processes that a launcher sends a signal one after another
_SOON = 2.0  # seconds that a main thread which is to end has to be back from a collective or a device
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
    """Within it `handler` is called for these signals. Outside the main thread, which alone may, nothing changes."""
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
    if number != signal.SIGINT:
        for every in _ASKED_TO_END:
            if signal.getsignal(every) is _raise:
                signal.signal(every, signal.SIG_DFL)
    raise raised_for(number)


class Ending(NamedTuple):
    """What a rank is asked for, as all see it (`max`): by which signal, 0 for none, and whether it came, or may have
    reached what rewards start, before the latest step's rewards were given."""

    spoiled: bool = False
    number: int = 0


class AskedToEnd(Exception):
    """A step was given up before it changed anything, as the run was asked to end; with the `Ending`."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class Others(Protocol):
    """The other processes of a run."""

    def lost(self) -> bool:
        """Whether one is gone, so that nothing is worth waiting for."""

    def all_end(self) -> None:
        """They end for a signal as well."""


class Delay:
    """The first signal within it raises nothing for so many seconds: until then its caller looks for it between steps,
    and where nobody did its end raises. Another one, the end of its time, or one for which nothing is worth waiting for
    is as without it; a main thread that is not back from a collective or a device soon after that ends with the
    process. Where `ended_by_signals` does not handle them, or for no seconds at all, nothing changes.

    A thread is told of signals through a socket, as they come: Python's handlers run when the main thread is back.

    Args:
        seconds: alike in all processes of a run.
        tell: called with the signal's name, from a thread, as whoever reads what it writes may not.
        others: what is asked and told of the run's other processes.
        last_words: called with the signal's number, from a thread, before the process is ended.
    """

    def __init__(
        self,
        seconds: float,
        tell: Callable[[str], None],
        others: Others,
        last_words: Callable[[int], None],
    ) -> None:
        self.seconds, self._tell, self._others, self._last_words = seconds, tell, others, last_words
        self.number = 0  # of the signal that came; 0 while none did
        self._came_at = self._given_at = 0.0
        self._ends_by = 0  # what the main thread is to raise for
        self._over, self._deciding = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> Delay:
        in_main = threading.current_thread() is threading.main_thread()  # which alone may handle signals
        numbers = (*_ASKED_TO_END, signal.SIGINT) if self.seconds > 0 and in_main else ()
        self._handled = [number for number in numbers if signal.getsignal(number) is _raise]
        if self._handled:
            self._heard, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._thread.start()
            self._before = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            _delays.append(self)
            for number in self._handled:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if not self._handled:
            return
        try:
            self._leave()
        finally:
            _delays.remove(self)
            if (another := signal.set_wakeup_fd(self._before)) not in (-1, self._told.fileno()):
                signal.set_wakeup_fd(another)
            self._told.close()
            self._thread.join()
            self._heard.close()
        if kind is None and self.number:
            _raise(self.number, None)

    def asked(self, rewards_given: bool = False) -> Ending:
        """What this rank knows of signals. `rewards_given`: a step's were, just now."""
        if rewards_given and not self.number:
            self._given_at = time.monotonic()
        return Ending(self.number > 0 and self._came_at < self._given_at + _ON_ITS_WAY, self.number)

    def end(self, number: int) -> NoReturn:
        """Raise for a signal, of this process or another of the run, as `ended_by_signals` does. All ranks call it."""
        self._others.all_end()
        self._leave()
        _raise(number, None)

    def forget(self) -> None:
        """Of a copy of the process, which others end: signals do there what they do by default."""
        signal.set_wakeup_fd(-1)
        for number in self._handled:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends_by:
            self._leave()
            _raise(self._ends_by, frame)
        self._came(number)  # before the main thread goes on
        own = self._told.fileno()
        if (another := signal.set_wakeup_fd(own, warn_on_full_buffer=False)) != own:  # an event loop has taken it
            self._told.send(bytes([number]))
            if another != -1:
                signal.set_wakeup_fd(another)

    def _came(self, number: int) -> None:
        with self._deciding:
            if not self.number:
                self.number, self._came_at = number, time.monotonic()

    def _watch(self) -> None:
        """End by the first signal, once its time is over, or by one that ends at once, unless it was left before."""
        until: float | None = None
        while True:
            self._heard.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            try:
                came = self._heard.recv(1)
            except TimeoutError:
                return self._end_by(self.number)
            if not came:
                return
            (number,) = came
            if number not in self._handled:
                continue
            if self._others.lost() or (until is not None and time.monotonic() - self._came_at >= _ONE):
                return self._end_by(number)
            if until is None:
                self._came(number)
                until = self._came_at + self.seconds
                _call_beside(self._tell, signal.Signals(self.number).name)

    def _end_by(self, number: int) -> None:
        with self._deciding:
            if self._over.is_set():
                return
            self._ends_by = number
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._over.wait(_SOON) and not hasattr(sys, "ps1"):  # of an interactive session
            _call_beside(self._last_words, number).join(_SOON)
            os._exit(128 + number)

    def _leave(self) -> None:
        for number in self._handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, _raise)
        with self._deciding:
            self._over.set()


def _call_beside(function: Callable[[T], None], value: T) -> threading.Thread:
    thread = threading.Thread(target=function, args=(value,), daemon=True)
    thread.start()
    return thread


_delays: list[Delay] = []  # within which this process is
_mask = threading.local()  # of a thread that forks


def _hold_signals() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ASKED_TO_END, signal.SIGINT))


def _let_signals_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _forget_delays() -> None:
    for delay in _delays:
        delay.forget()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_forget_delays)


def raised_for(number: int) -> KeyboardInterrupt:
    """What a signal raises."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(signal.Signals(number))


def raise_received() -> None:
    """Raise for a signal whose exception was lost: Python drops those that arise in a finalizer or a callback."""
    if _received:
        raise raised_for(_received[0])
