"""SIGTERM and SIGHUP as exceptions, only where nobody else handles them."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import Terminated
from lockstep.signals import ended_by_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_an_exception_and_the_next_ends_the_process(number: signal.Signals) -> None:
    with pytest.raises(Terminated) as ended, ended_by_signals():
        try:
            signal.raise_signal(number)
        finally:
            assert signal.getsignal(number) is signal.SIG_DFL
    assert ended.value.args == (number,)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_change_nothing() -> None:
    def handler() -> object:
        with ended_by_signals():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is signal.SIG_DFL
