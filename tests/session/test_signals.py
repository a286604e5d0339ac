"""SIGTERM and SIGHUP as exceptions, only where nobody else handles them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from processes import DEADLINE, running, wait_for

from lockstep.errors import Terminated
from lockstep.session.signals import (
    EndRequest,
    SignalDelay,
    exit_on_interrupts_in_imports,
    raise_on_signals,
    reraise_received,
)


@pytest.fixture(autouse=True)
def hangup_is_not_ignored() -> Iterator[None]:
    """Also where the tests run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_an_exception_and_the_next_ends_the_process(number: signal.Signals) -> None:
    with pytest.raises(Terminated) as ended, raise_on_signals():
        try:
            signal.raise_signal(number)
        finally:
            assert signal.getsignal(number) is signal.SIG_DFL
    assert ended.value.args == (number,)
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.fixture(autouse=True)
def this_process_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it ends by itself no sooner."""
    monkeypatch.setattr("lockstep.session.signals._RETURN_SECONDS", DEADLINE)


class Beside:
    """Other processes of a run, of which one may be gone."""

    def __init__(self, gone: bool = False) -> None:
        self.gone, self.know = gone, False

    def lost(self) -> bool:
        return self.gone

    def all_end(self) -> None:
        self.know = True


def delayed(seconds: float = DEADLINE, gone: bool = False) -> tuple[SignalDelay, list[str], Beside]:
    told, others = list[str](), Beside(gone)
    return SignalDelay(seconds, told.append, others, lambda _: None), told, others


def test_a_signal_waits_for_who_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.session.signals._SAME_SIGNAL", DEADLINE)
    delay, told, others = delayed()
    with pytest.raises(KeyboardInterrupt) as ended, raise_on_signals(), delay:
        assert delay.poll(rewards_given=True) == EndRequest(False, 0)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # as one that was sent to a launcher, too
        assert delay.number == signal.SIGTERM  # at once
        wait_for(lambda: told == ["SIGTERM"])
        reraise_received()  # nothing
        assert delay.poll() == delay.poll(rewards_given=True) == EndRequest(True, signal.SIGTERM) and not others.know
        delay.end(signal.SIGTERM)
    assert others.know and ended.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
    with pytest.raises(Terminated), raise_on_signals(), delayed()[0]:
        signal.raise_signal(signal.SIGTERM)  # for which nobody looks
    delay, told, others = delayed()
    with pytest.raises(Terminated), raise_on_signals(), delay:
        delay.poll(rewards_given=True)
        time.sleep(0.2)  # until what rewards have started would have been told, too
        signal.raise_signal(signal.SIGTERM)
        assert delay.poll() == EndRequest(False, signal.SIGTERM)
        wait_for(lambda: told == ["SIGTERM"])
        others.gone = True
        signal.raise_signal(signal.SIGTERM)  # of a launcher that finds a process dead
        time.sleep(DEADLINE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_once_and_for_so_long(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    raised = KeyboardInterrupt if number == signal.SIGINT else Terminated
    read = threading.Event()  # of a standard error, which nobody does
    with pytest.raises(raised), raise_on_signals(), SignalDelay(0.01, lambda _: read.wait(), Beside(), lambda _: None):
        signal.raise_signal(number)
        time.sleep(DEADLINE)  # which its end interrupts
    read.set()
    monkeypatch.setattr("lockstep.session.signals._SAME_SIGNAL", 0.0)
    for other, times in ((delayed()[0], 2), (delayed(gone=True)[0], 1), (delayed(0.0)[0], 1)):
        with pytest.raises(raised), raise_on_signals(), other:
            for seconds in (0.1, DEADLINE)[-times:]:
                with pytest.raises(raised) if seconds == DEADLINE else nullcontext() as ended:
                    signal.raise_signal(number)
                    time.sleep(seconds)
            assert number == signal.SIGINT or signal.getsignal(number) is signal.SIG_DFL
            assert ended is not None
            raise ended.value
    before = signal.getsignal(number)
    with delayed()[0]:  # others handle it
        assert signal.getsignal(number) is before
    with raise_on_signals(), ThreadPoolExecutor(1) as pool:  # a run in a thread beside one in the main thread
        assert pool.submit(lambda: delayed()[0].__enter__().number).result() == 0


def test_what_rewards_do_with_signals_is_no_matter_to_a_run() -> None:
    """One forks a process and ends it by a signal; in another an event loop handles one of its own."""

    async def handled() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)

    delay, *_ = delayed()
    with pytest.raises(Terminated), raise_on_signals(), delay:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(3)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        asyncio.run(handled())
        signal.raise_signal(signal.SIGHUP)
        wait_for(lambda: delay.number != 0)
        assert delay.number == signal.SIGHUP
        delay.end(delay.number)


IN_C = """
import ctypes, signal, sys
from lockstep.session import signals
class Others:
    def lost(self): return False
signals._RETURN_SECONDS, mutex, c = 0.2, ctypes.create_string_buffer(64), ctypes.CDLL(None)
c.pthread_mutex_lock(mutex)
told = lambda number: print("ends by", number, file=sys.stderr)
with signals.raise_on_signals(), signals.SignalDelay(float(sys.argv[1]), lambda _: None, Others(), told):
    print("ready", file=sys.stderr, flush=True)
    c.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize(("seconds", "count"), [(0.1, 1), (DEADLINE, 2)])
def test_a_main_thread_that_is_in_c_ends_with_its_process(seconds: float, count: int) -> None:
    with running([sys.executable, "-c", IN_C, str(seconds)]) as process:
        assert process.stderr is not None and process.stderr.readline() == "ready\n"
        for again in range(count):
            time.sleep(0.6 * again)  # seconds above which two signals are two
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, "ends by 15\n")


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with raise_on_signals():
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
        exit_on_interrupts_in_imports()
        Drops()
        with pytest.raises(KeyboardInterrupt), raise_on_signals():
            pytest.fail("the run began")
        with raise_on_signals():
            pass  # it was told once
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_nothing() -> None:
    def handler() -> object:
        with raise_on_signals():
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
