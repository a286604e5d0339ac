"""Signals that ask a process to end, as exceptions, so that a run leaves its summary and report before it goes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ..errors import Terminated

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_received: list[signal.Signals] = []


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, the first SIGTERM or SIGHUP raises `Terminated`; another ends the process at once.

    What is ignored (`nohup`) or handled already stays so, and outside the main thread, where Python delivers no
    signals, nothing changes.
    """
    _received.clear()
    mine = []
    if threading.current_thread() is threading.main_thread():
        mine = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, _: FrameType | None) -> None:
    for every in _SIGNALS:
        if signal.getsignal(every) is _raise:
            signal.signal(every, signal.SIG_DFL)
    _received.append(signal.Signals(number))
    raise Terminated(_received[0])


def raise_received() -> None:
    """Raise for a signal whose exception was lost: Python drops those that arise in a finalizer or a callback."""
    if _received:
        raise Terminated(_received[0])
