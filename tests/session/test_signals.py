"""SIGTERM and SIGHUP as exceptions, only where nobody else handles them."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import DEADLINE, running

from lockstep.errors import Terminated
from lockstep.session.signals import Delay, ended_by_signals, interrupts_in_imports, raise_received


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


def delayed(seconds: float = DEADLINE, pointless: bool = False) -> tuple[Delay, list[str]]:
    told: list[str] = []
    return Delay(seconds, told.append, lambda: pointless), told


def test_a_signal_waits_for_who_looks_for_it() -> None:
    delay, told = delayed()
    with pytest.raises(KeyboardInterrupt) as ended, ended_by_signals(), delay:
        assert delay.number == 0
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # as one that was sent to a launcher, too
        raise_received()  # nothing
        assert delay.number == signal.SIGTERM
        delay.end(signal.SIGTERM)
    assert told == ["SIGTERM"] and ended.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_once_and_for_so_long(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    raised = KeyboardInterrupt if number == signal.SIGINT else Terminated
    delay, told = delayed(0.01)
    with pytest.raises(raised), ended_by_signals(), delay:
        signal.raise_signal(number)
        time.sleep(DEADLINE)  # which its end interrupts
    assert told == [number.name]
    monkeypatch.setattr("lockstep.session.signals._ONE", 0.0)
    for other, times in ((delayed()[0], 2), (delayed(pointless=True)[0], 1), (delayed(0.0)[0], 1)):
        with pytest.raises(raised), ended_by_signals(), other:
            for _ in range(times - 1):
                signal.raise_signal(number)
            with pytest.raises(raised) as ended:
                signal.raise_signal(number)
            assert number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL
            raise ended.value
    before = signal.getsignal(number)
    with delayed()[0]:  # others handle it
        assert signal.getsignal(number) is before
    with ended_by_signals(), ThreadPoolExecutor(1) as pool:  # a run in a thread beside one in the main thread
        assert pool.submit(lambda: delayed()[0].__enter__().number).result() == 0


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
