"""Where time goes: seconds by phase, and the spans that they are made of, without making the host wait for a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.cuda import Event  # with `enable_timing`

Fact = str | int | float

_MOST_KEPT = 1 << 16  # spans, should nobody take them


@dataclass(frozen=True)
class Span:
    """A phase that ran: when it began, as `time.perf_counter` counts, and how many seconds it took; `on_device` by the
    device's clock, of what was launched in it. `facts` is what is told of it."""

    name: str
    began: float
    seconds: float
    on_device: bool = False
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Watcher(Protocol):
    """Whoever is told what a run is doing, as it happens."""

    def began(self, phase: str) -> None:
        """A phase began, within those that have not ended."""

    def told(self, detail: str) -> None:
        """How far the innermost phase is, or what it is at."""

    def ended(self, phase: str, seconds: float) -> None:
        """The innermost phase ended; it took so many seconds, phases within included."""


class Timings:
    """Host seconds by phase, summed over all its occurrences; a phase within another counts for itself alone.

    Args:
        keep_spans: keep each occurrence too, until `take`.
        event: makes the events that measure what a device does; None where the host's clock measures everything.
        watcher: told of each phase as it begins and ends, and of what `tell` is given.

    Attributes:
        seconds: by name, in the order in which the phases were first entered.
    """

    def __init__(
        self, keep_spans: bool = False, event: Callable[[], Event] | None = None, watcher: Watcher | None = None
    ) -> None:
        self._watcher = watcher
        self.seconds: dict[str, float] = {}
        self._within = [0.0]  # seconds of finished phases, at each depth
        self._keep, self._event = keep_spans, event if keep_spans else None
        self._spans: deque[Span] = deque(maxlen=_MOST_KEPT)
        self._pairs: deque[tuple[str, Event, Event, Mapping[str, Fact]]] = deque(maxlen=_MOST_KEPT)
        self._origin: tuple[Event, float] | None = None  # an event, and when it passed as the host counts

    @contextmanager
    def measured(self, phase: str, on_device: bool = False, **facts: Fact) -> Iterator[None]:
        """Add the time spent here, less that of phases within, to `phase`; `on_device` by the device's clock as well,
        if there is one, from when it comes to what is launched here to when it is done with it."""
        self.seconds.setdefault(phase, 0.0)
        self._within.append(0.0)
        if self._watcher:
            self._watcher.began(phase)
        first = self._recorded() if on_device and self._event else None
        began = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - began
            self.seconds[phase] += total - self._within.pop()
            self._within[-1] += total
            if self._keep:
                self._spans.append(Span(phase, began, total, False, facts))
            if self._watcher:
                self._watcher.ended(phase, total)
        if first is not None:
            self._pairs.append((phase, first, self._recorded(), facts))

    def tell(self, detail: str) -> None:
        """Tell whoever watches how far the innermost phase is, or what it is at."""
        if self._watcher:
            self._watcher.told(detail)

    def take(self) -> list[Span]:
        """The spans that ended since the last call. Waits until the device has come to the end of the last."""
        spans, pairs = list(self._spans), list(self._pairs)
        self._spans.clear()
        self._pairs.clear()
        if pairs:
            assert self._origin is not None
            pairs[-1][2].synchronize()
            origin, at = self._origin
            for name, first, last, facts in pairs:
                began = at + origin.elapsed_time(first) / 1e3
                spans.append(Span(name, began, first.elapsed_time(last) / 1e3, True, facts))
            self._origin = None  # an event's distance is a float32: the next spans start near one of their own
        return spans

    def _recorded(self) -> Event:
        assert self._event is not None
        if self._origin is None:
            origin = self._event()
            origin.record()
            origin.synchronize()
            self._origin = origin, time.perf_counter()
        event = self._event()
        event.record()
        return event


def totals(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each name, phases within included: the device's where it measured, otherwise the host's."""
    spans = list(spans)
    on_device = {span.name for span in spans if span.on_device}
    found: dict[str, float] = {}
    for span in spans:
        if span.on_device == (span.name in on_device):
            found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found
