"""Signals that ask a process to end, as exceptions, so that a run writes its summary and report before it ends."""

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

_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_SAME_SIGNAL = 0.5  # seconds within which signals count as one: the launcher also receives a Ctrl-C, and forwards it
_LAUNCHER_DELAY = 0.005  # seconds that a launcher may take to signal one process after another
_RETURN_SECONDS = 2.0  # seconds that the main thread has to return from a collective or the device when it must end
INTERRUPTED = 128 + signal.SIGINT  # the exit code of a command that Ctrl-C ended
_received: list[signal.Signals] = []


def exit_on_interrupts_in_imports() -> None:
    """Make Ctrl-C end the process at once while a module is being imported; a command calls this first. It must not
    raise there: the interrupted code may drop the exception (torch does) or leave half a module behind. Outside imports
    it raises `KeyboardInterrupt`, which `raise_on_signals` raises again if it was lost. An ignored Ctrl-C stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)


def _handle_interrupt(_: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"lockstep: interrupted\n")
            os._exit(INTERRUPTED)
        frame = frame.f_back
    _received.append(signal.SIGINT)
    raise KeyboardInterrupt


_DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler, _handle_interrupt)


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """A context in which the first SIGTERM or SIGHUP raises `Terminated`, a second one ends the process at once, and
    Ctrl-C raises `KeyboardInterrupt`. `reraise_received` raises an exception again that was lost, and so does entering
    this context after an earlier Ctrl-C. Signals that are ignored (`nohup`) or handled already stay so, and outside the
    main thread nothing changes."""
    numbers = [number for number in (*_END_SIGNALS, signal.SIGINT) if signal.getsignal(number) in _DEFAULT_HANDLERS]
    try:
        with handle_signals(_raise_for_signal, numbers):
            reraise_received()
            yield
    finally:
        _received.clear()


@contextlib.contextmanager
def handle_signals(handler: Handler, numbers: Iterable[int]) -> Iterator[None]:
    """A context in which `handler` handles these signals; without effect outside the main thread, which alone may."""
    if not _in_main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier_handler in earlier.items():
            signal.signal(number, earlier_handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise_for_signal(number: int, _: FrameType | None) -> NoReturn:
    _received.append(signal.Signals(number))
    if number != signal.SIGINT:
        for end_signal in _END_SIGNALS:
            if signal.getsignal(end_signal) is _raise_for_signal:
                signal.signal(end_signal, signal.SIG_DFL)
    raise exception_for(number)


class EndRequest(NamedTuple):
    """Whether a rank was asked to end: `number` is the signal, 0 for none. `may_affect_rewards`: it came before the
    latest step's rewards were given, or close enough to have reached processes that rewards start. All ranks act on the
    `max`."""

    may_affect_rewards: bool = False
    number: int = 0


class EndRequested(Exception):
    """The run was asked to end (`ending`), and the step was abandoned before it changed anything."""

    def __init__(self, ending: EndRequest) -> None:
        super().__init__(ending)
        self.ending = ending


class OtherProcesses(Protocol):
    """The other processes of a run."""

    def lost(self) -> bool:
        """Whether one is lost, so that waiting is pointless."""

    def all_end(self) -> None:
        """Note that all processes are ending because of a signal."""


class SignalDelay:
    """A context in which the first signal is deferred for some seconds: the caller polls for it between steps with
    `poll`, and leaving the context raises it if the caller did not. It raises as usual when the time is over, at a
    second signal, or at once if another process is lost; if the main thread does not return from a collective or the
    device soon after that, the process is ended. With 0 seconds, or for signals that `raise_on_signals` does not
    handle, nothing changes.

    A thread learns of signals at once, through a socket: Python runs handlers only in the main thread, once it is back.

    Args:
        seconds: the same in all processes of a run.
        tell: called with the signal's name, on a thread of its own, since its output may block.
        others: the run's other processes.
        last_words: called with the signal's number, on a thread of its own, before the process is ended.
    """

    def __init__(
        self, seconds: float, tell: Callable[[str], None], others: OtherProcesses, last_words: Callable[[int], None]
    ) -> None:
        self.seconds, self._tell, self._others, self._last_words = seconds, tell, others, last_words
        self.number = 0  # the signal that came; 0: none
        self._received_at = self._rewards_given_at = 0.0
        self._raising_for = 0  # the signal that the main thread must raise for
        self._left, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> SignalDelay:
        numbers = (*_END_SIGNALS, signal.SIGINT) if self.seconds > 0 and _in_main_thread() else ()
        self._handled = [number for number in numbers if signal.getsignal(number) is _raise_for_signal]
        if self._handled:
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._thread.start()
            self._before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
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
            if (another := signal.set_wakeup_fd(self._before)) not in (-1, self._sender.fileno()):
                signal.set_wakeup_fd(another)
            self._sender.close()
            self._thread.join()
            self._receiver.close()
        if kind is None and self.number:
            _raise_for_signal(self.number, None)

    def poll(self, rewards_given: bool = False) -> EndRequest:
        """What this rank knows of signals. `rewards_given`: a step's rewards were given just now."""
        if rewards_given and not self.number:
            self._rewards_given_at = time.monotonic()
        return EndRequest(self.number > 0 and self._received_at < self._rewards_given_at + _LAUNCHER_DELAY, self.number)

    def end(self, number: int) -> NoReturn:
        """Raise for a signal of any process of the run, as `raise_on_signals` does. All ranks call this."""
        self._others.all_end()
        self._leave()
        _raise_for_signal(number, None)

    def restore_defaults(self) -> None:
        """Restore default handlers in a forked child, which others end."""
        signal.set_wakeup_fd(-1)
        for number in self._handled:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raising_for:
            self._leave()
            _raise_for_signal(self._raising_for, frame)
        self._record(number)  # before the main thread continues
        own = self._sender.fileno()
        if (another := signal.set_wakeup_fd(own, warn_on_full_buffer=False)) != own:  # an event loop replaced it
            self._sender.send(bytes([number]))
            if another != -1:
                signal.set_wakeup_fd(another)

    def _record(self, number: int) -> None:
        with self._lock:
            if not self.number:
                self.number, self._received_at = number, time.monotonic()

    def _watch(self) -> None:
        """Make the main thread raise when the first signal's time is over or a signal must not wait; ends on exit."""
        until: float | None = None
        while True:
            self._receiver.settimeout(None if until is None else max(until - time.monotonic(), 0.001))
            try:
                received = self._receiver.recv(1)
            except TimeoutError:
                return self._make_main_raise(self.number)
            if not received:
                return
            (number,) = received
            if number not in self._handled:
                continue
            if self._others.lost() or (until is not None and time.monotonic() - self._received_at >= _SAME_SIGNAL):
                return self._make_main_raise(number)
            if until is None:
                self._record(number)
                until = self._received_at + self.seconds
                _call_on_thread(self._tell, signal.Signals(self.number).name)

    def _make_main_raise(self, number: int) -> None:
        with self._lock:
            if self._left.is_set():
                return
            self._raising_for = number
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        if not self._left.wait(_RETURN_SECONDS) and not hasattr(sys, "ps1"):  # ps1: an interactive session
            _call_on_thread(self._last_words, number).join(_RETURN_SECONDS)
            os._exit(128 + number)

    def _leave(self) -> None:
        for number in self._handled:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, _raise_for_signal)
        with self._lock:
            self._left.set()


def _call_on_thread(function: Callable[[T], None], value: T) -> threading.Thread:
    thread = threading.Thread(target=function, args=(value,), daemon=True)
    thread.start()
    return thread


_delays: list[SignalDelay] = []  # those that are entered
_mask = threading.local()  # the signal mask of a thread that forks


def _block_signals() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_END_SIGNALS, signal.SIGINT))


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _restore_defaults_in_child() -> None:
    for delay in _delays:
        delay.restore_defaults()
    _unblock_signals()


os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_defaults_in_child)


def exception_for(number: int) -> KeyboardInterrupt:
    """The exception that a signal raises."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(signal.Signals(number))


def reraise_received() -> None:
    """Raise again for a signal whose exception was lost: Python drops those raised in a finalizer or a callback."""
    if _received:
        raise exception_for(_received[0])
