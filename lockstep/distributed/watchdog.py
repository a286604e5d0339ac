"""The watchdog: ends a process whose device has waited too long for another rank, and says what it was doing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

GRACE = 10.0  # seconds that our deadline leaves the collectives' own timeouts to raise first; ours ends the process


@dataclass(frozen=True)
class WatchedProcess:
    """A process of a run, with a limit on how long it waits for the others.

    Attributes:
        timeout: seconds that a rank waits for the others.
        on_gpu: whether they train on GPUs.
    """

    rank: int = 0
    size: int = 1
    timeout: float = 0.0
    on_gpu: bool = False
    _reporters: list[Callable[[str], str]] = field(default_factory=list, repr=False, compare=False, kw_only=True)

    @contextlib.contextmanager
    def deadline(self, doing: str, timeouts: float = 1.0) -> Iterator[None]:
        """A context that ends the process if it is still inside after `timeouts` times the timeout: for waits without a
        limit in torch, such as for a device that waits for another rank. On exit it synchronizes the device."""
        if self.size == 1:
            yield
            return
        with self.rolling_deadline(doing, timeouts):
            yield
            if self.on_gpu:
                torch.cuda.synchronize()

    @contextlib.contextmanager
    def rolling_deadline(self, doing: str, timeouts: float = 1.0) -> Iterator[Callable[[], None]]:
        """A context that ends the process when the function it yields has not been called for as long as `deadline`
        waits: for a series of launches, any of which may wait on the device for another rank."""
        if self.size == 1:
            yield lambda: None
            return
        latest, over = [time.monotonic()], threading.Event()

        def watch() -> None:
            seconds = timeouts * self.timeout + GRACE
            while (left := latest[0] + seconds - time.monotonic()) > 0:
                if over.wait(left):
                    return
            if not over.is_set():  # the context may have exited just as the time ran out
                self._give_up(doing, seconds)

        def restart() -> None:
            latest[0] = time.monotonic()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield restart
        finally:
            over.set()
            thread.join()  # it references this world, and groups destroyed at interpreter shutdown abort the process

    @contextlib.contextmanager
    def report_deadline_with(self, reporter: Callable[[str], str]) -> Iterator[None]:
        """A context in which a deadline that ends this process prints `reporter(message)`; nothing if that is empty."""
        self._reporters.append(reporter)
        try:
            yield
        finally:
            self._reporters.pop()

    def _give_up(self, doing: str, seconds: float) -> None:
        message = (
            f"rank {self.rank} of {self.size}: {doing} did not end within {seconds:g} s "
            f"(parallel.timeout is {self.timeout:g}); another process of the run is gone or stuck"
        )
        try:
            for reporter in self._reporters[-1:]:
                message = reporter(message)
            if message:
                print(f"lockstep: failed: {message}", file=sys.stderr, flush=True)
        finally:
            os._exit(1)
