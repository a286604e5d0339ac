"""Where time goes: seconds by phase, and the spans they consist of, without making the host wait for the device."""

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

_MAX_SPANS = 1 << 16  # spans kept if nobody takes them


@dataclass(frozen=True)
class Span:
    """One run of a phase: when it began, on the clock of `time.perf_counter`, and how many seconds it took. With
    `on_device`, the device's time for the work launched in it. `facts`: further information on it."""

    name: str
    began: float
    seconds: float
    on_device: bool = False
    facts: Mapping[str, Fact] = field(default_factory=dict)


class PhaseObserver(Protocol):
    """An observer of what a run is doing."""

    def phase_began(self, phase: str) -> None:
        """A phase began, nested in those that have not ended."""

    def phase_progressed(self, detail: str) -> None:
        """The progress of the innermost phase, or what it is working on."""

    def phase_ended(self, phase: str, seconds: float) -> None:
        """The innermost phase ended, after `seconds`, including nested phases."""


class Timings:
    """Host seconds by phase, summed over its runs, not including nested phases.

    Args:
        keep_spans: also keep each run as a span, until `take_spans`.
        event: makes CUDA events to measure device time; None: only the host's clock is used.
        observer: notified when a phase begins or ends, and of what `report_progress` is given.

    Attributes:
        seconds: by phase, in the order in which they were first entered.
    """

    def __init__(
        self, keep_spans: bool = False, event: Callable[[], Event] | None = None, observer: PhaseObserver | None = None
    ) -> None:
        self._observer = observer
        self.seconds: dict[str, float] = {}
        self._nested_seconds = [0.0]  # of finished nested phases, at each depth
        self._keep_spans, self._event = keep_spans, event if keep_spans else None
        self._spans: deque[Span] = deque(maxlen=_MAX_SPANS)
        self._event_pairs: deque[tuple[str, Event, Event, Mapping[str, Fact]]] = deque(maxlen=_MAX_SPANS)
        self._origin: tuple[Event, float] | None = None  # an event, and its host time

    @contextmanager
    def measure(self, phase: str, on_device: bool = False, **facts: Fact) -> Iterator[None]:
        """Add the time spent within, except in nested phases, to `phase`. With `on_device`, and if there are events,
        also measure the device's time, from the start to the end of the work launched within."""
        self.seconds.setdefault(phase, 0.0)
        self._nested_seconds.append(0.0)
        if self._observer:
            self._observer.phase_began(phase)
        first = self._record_event() if on_device and self._event else None
        began = time.perf_counter()
        try:
            yield
        finally:
            total = time.perf_counter() - began
            self.seconds[phase] += total - self._nested_seconds.pop()
            self._nested_seconds[-1] += total
            if self._keep_spans:
                self._spans.append(Span(phase, began, total, False, facts))
            if self._observer:
                self._observer.phase_ended(phase, total)
        if first is not None:
            self._event_pairs.append((phase, first, self._record_event(), facts))

    def report_progress(self, detail: str) -> None:
        """Notify the observer of the progress of the innermost phase, or what it is working on."""
        if self._observer:
            self._observer.phase_progressed(detail)

    def take_spans(self) -> list[Span]:
        """The spans that ended since the last call. Waits until the device has finished the last one."""
        spans, pairs = list(self._spans), list(self._event_pairs)
        self._spans.clear()
        self._event_pairs.clear()
        if pairs:
            assert self._origin is not None
            pairs[-1][2].synchronize()
            origin, origin_time = self._origin
            for name, first, last, facts in pairs:
                began = origin_time + origin.elapsed_time(first) / 1e3
                spans.append(Span(name, began, first.elapsed_time(last) / 1e3, True, facts))
            self._origin = None  # elapsed times are float32, so the next spans get a near origin of their own
        return spans

    def _record_event(self) -> Event:
        assert self._event is not None
        if self._origin is None:
            origin = self._event()
            origin.record()
            origin.synchronize()
            self._origin = origin, time.perf_counter()
        event = self._event()
        event.record()
        return event


def seconds_by_name(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by name, including nested phases: the device's where measured, otherwise the host's."""
    spans = list(spans)
    on_device = {span.name for span in spans if span.on_device}
    seconds: dict[str, float] = {}
    for span in spans:
        if span.on_device == (span.name in on_device):
            seconds[span.name] = seconds.get(span.name, 0.0) + span.seconds
    return seconds
