"""Worker processes for reward functions: a crash or an endless loop there fails one call, not the run.

Each process is `python -m lockstep.environments.rewards.worker`, started when first needed, and again after it died.
Messages are pickles over a socket pair that only it and this process hold.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pickle import PicklingError
from queue import SimpleQueue
from typing import Any

from .calls import Arguments, Failed, Outcome

_START_SECONDS = 120.0  # for importing the function's module
_POLL_SECONDS = 0.5  # seconds between looks at whether the process is there


class RewardWorkers:
    """`count` processes that share the calls. A process is killed if a call, not counting the import of its module,
    takes longer than `timeout` seconds; 0: no limit."""

    def __init__(self, count: int, timeout: float = 0.0) -> None:
        self._timeout = timeout
        self._workers = [_Worker() for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def begin(self, call: tuple[str, Arguments, int]) -> Future[Outcome]:
        """Begin a call (spec, arguments, number of completions)."""
        return self._threads.submit(self._call, call)

    def outcomes(self, futures: Sequence[Future[Outcome]]) -> list[Outcome]:
        """The outcomes of these calls, once all have finished."""
        try:
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C or a signal: a call that hangs would hold up the run's end
            self.abandon(futures)
            raise

    def abandon(self, futures: Sequence[Future[Outcome]]) -> None:
        """Cancel these calls, killing the processes that run them."""
        while wait([future for future in futures if not future.cancel()], 0.1).not_done:
            self.close()

    def close(self) -> None:
        """Kill the processes; later calls start new ones."""
        _stop_all(self._workers)

    def _call(self, call: tuple[str, Arguments, int]) -> Outcome:
        worker = self._idle.get()
        try:
            return worker.call(*call, timeout=self._timeout or None)
        finally:
            self._idle.put(worker)


class _Worker:
    """A worker process, which is started at the first call."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # held by the thread of a call
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection | None = None
        self._loaded: set[str] = set()

    def call(self, spec: str, arguments: Arguments, count: int, timeout: float | None) -> Outcome:
        """The function's outcome; `Failed` if the process died, or was killed for taking too long."""
        with self._lock:
            if self._process is None:
                self._start()
            if spec not in self._loaded:
                answer = self._ask(("load", spec), _START_SECONDS)
                if isinstance(answer, Failed):
                    return answer
                self._loaded.add(spec)
            return self._ask(("call", spec, arguments, count), timeout)

    def stop(self) -> None:
        """Kill the process. Another thread's call fails first, before the connection that it reads is closed."""
        while not self._lock.acquire(timeout=0.05):
            if (process := self._process) is not None:
                process.kill()
        try:
            process, self._process = self._process, None
            self._loaded.clear()
            if process is not None:
                process.kill()
                process.wait()
            if self._channel is not None:
                self._channel.close()
        finally:
            self._lock.release()

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", f"{__package__}.worker", str(theirs.fileno())]
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # imports as here
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the run, with which the worker ends
        )
        theirs.close()
        self._channel = ours

    def _ask(self, message: tuple[Any, ...], timeout: float | None) -> Any:
        assert self._channel is not None
        try:
            self._channel.send(message)
        except (PicklingError, AttributeError, TypeError) as error:  # what pickle raises, before anything is sent
            return Failed(f"cannot be sent to its process: {error}", fatal=True)
        except OSError:
            return self._failure_of_exit()
        try:
            if not self._wait_for_answer(timeout):
                self.stop()
                limit = "task.reward_timeout" if message[0] == "call" else "for importing its module"
                return Failed(f"gave no answer within {timeout:g} s ({limit}) and was stopped")
            return self._channel.recv()
        except (EOFError, OSError):
            return self._failure_of_exit()

    def _wait_for_answer(self, timeout: float | None) -> bool:
        """Whether the process answers in time. Raises `EOFError` if it has ended, although what it forked may keep the
        connection open."""
        assert self._channel is not None and self._process is not None
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self._channel.poll(min(_POLL_SECONDS, max(0.0, until - time.monotonic()))):
            if self._process.poll() is not None and not self._channel.poll():
                raise EOFError
            if time.monotonic() >= until:
                return False
        return True

    def _failure_of_exit(self) -> Failed:
        """The failure of a call whose process closed its connection."""
        assert self._process is not None
        how = "closed its connection"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=5)
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.stop()
        return Failed(f"ended its process ({how})")


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()
