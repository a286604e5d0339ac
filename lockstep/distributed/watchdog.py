"""The watchdog: a process whose device waits for another rank ends at its deadline, and says at what."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

GRACE = 10.0  # seconds by which the collectives' own deadlines come before ours, which ends the process


@dataclass(frozen=True)
class WatchedProcess:
    """One of the processes of a run, which waits for none without end.

    Attributes:
        timeout: seconds that a rank waits for the others.
        on_gpu: whether they train on GPUs.
    """

    rank: int = 0
    size: int = 1
    timeout: float = 0.0
    on_gpu: bool = False
    _tellers: list[Callable[[str], str]] = field(default_factory=list, repr=False, compare=False, kw_only=True)

    @contextlib.contextmanager
    def deadline(self, doing: str, timeouts: float = 1.0) -> Iterator[None]:
        """Within, waits that torch puts no end to (for a device that waits for another rank) end the process, after so
        many timeouts. It ends when the device has done what was launched."""
        if self.size == 1:
            yield
            return
        with self.watched(doing, timeouts):
            yield
            if self.on_gpu:
                torch.cuda.synchronize()

    @contextlib.contextmanager
    def watched(self, doing: str, timeouts: float = 1.0) -> Iterator[Callable[[], None]]:
        """Within, the process ends where what this yields was not called for as long as `deadline` waits: for launches
        that follow one another, of which any may wait on a device for another rank."""
        if self.size == 1:
            yield lambda: None
            return
        latest, over = [time.monotonic()], threading.Event()

        def watch() -> None:
            seconds = timeouts * self.timeout + GRACE
            while (left := latest[0] + seconds - time.monotonic()) > 0:
                if over.wait(left):
                    return
            if not over.is_set():  # it may have ended as the wait did
                self._give_up(doing, seconds)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield lambda: latest.__setitem__(0, time.monotonic())
        finally:
            over.set()
            thread.join()  # it holds this world, whose groups must not end while the interpreter does: that aborts

    @contextlib.contextmanager
    def told_by(self, told: Callable[[str], str]) -> Iterator[None]:
        """Within, what a deadline says as it ends this process is what `told` makes of it; nothing, where that is
        empty."""
        self._tellers.append(told)
        try:
            yield
        finally:
            self._tellers.pop()

    def _give_up(self, doing: str, seconds: float) -> None:
        message = (
            f"rank {self.rank} of {self.size}: {doing} did not end within {seconds:g} s "
            f"(parallel.timeout is {self.timeout:g}); another process of the run is gone or stuck"
        )
        try:
            for told in self._tellers[-1:]:
                message = told(message)
            if message:
                print(f"lockstep: failed: {message}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
