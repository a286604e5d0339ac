"""SIGTERM and SIGHUP as exceptions, only where nobody else handles them."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import DEADLINE, running

from lockstep.errors import Terminated
from lockstep.session.signals import ended_by_signals, interrupts_in_imports


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """Also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_was_lost_before_a_run_is_raised_when_it_begins() -> None:
    class Drops:
        def __del__(self) -> None:  # Python drops what a finalizer raises
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts_in_imports()
        Drops()
        with pytest.raises(KeyboardInterrupt), ended_by_signals():
            pytest.fail("the run began")
        with ended_by_signals():
            pass  # it was told once
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    def handler() -> object:
        with ended_by_signals():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handler).result() is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_process_of_a_test_ends_by_signals_that_the_tests_ignore_and_by_itself(number: signal.Signals) -> None:
    """Under `nohup` a run waited for a SIGHUP that it ignored, and stayed behind when the tests were ended."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with running([sys.executable, "-S", "-c", "while True: pass"]) as process:
            assert signal.getsignal(number) is signal.SIG_IGN
            assert resource.prlimit(process.pid, resource.RLIMIT_CPU) == (DEADLINE, DEADLINE)
            process.send_signal(number)
            assert process.wait(timeout=60) == -number
    finally:
        signal.signal(number, before)
