"""Where start-up goes: seconds by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Seconds of host time by phase, summed over all its occurrences; a phase within another counts for itself alone.

    Attributes:
        seconds: by name, in the order in which the phases were first entered.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = [0.0]  # seconds of finished phases, at each depth

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time spent here, less that of phases within, to `phase`."""
        self.seconds.setdefault(phase, 0.0)
        self._within.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - began
            self.seconds[phase] += total - self._within.pop()
            self._within[-1] += total
