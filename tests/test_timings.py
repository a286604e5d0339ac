"""Phases: sums on the host, spans, and what a device says of itself without being waited for."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from lockstep.timings import Span, Timings, seconds_by_name


def test_a_phase_within_another_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device, timings = Device(monkeypatch), Timings()
    with timings.measure("outer"):
        for _ in range(2):
            with timings.measure("inner"):
                device.now += 2.0
        device.now += 1.0
    assert timings.seconds == {"outer": 1.0, "inner": 4.0}
    assert list(timings.seconds) == ["outer", "inner"]
    assert timings.take_spans() == []


def test_spans_are_kept_in_the_order_of_their_ends_until_taken() -> None:
    timings = Timings(keep_spans=True)
    before = time.perf_counter()
    with pytest.raises(KeyError), timings.measure("outer", step=3):
        with timings.measure("inner", on_device=True):  # there is none: the host's clock
            pass
        raise KeyError
    inner, outer = timings.take_spans()
    assert (inner.name, outer.name, outer.facts) == ("inner", "outer", {"step": 3})
    assert before <= outer.began <= inner.began
    assert inner.began + inner.seconds <= outer.began + outer.seconds <= time.perf_counter()
    assert not inner.on_device and timings.take_spans() == []


def test_an_observer_is_told_of_phases_as_they_happen() -> None:
    heard: list[tuple] = []
    observer = SimpleNamespace(
        phase_began=lambda phase: heard.append(("began", phase)),
        phase_progressed=lambda detail: heard.append(("told", detail)),
        phase_ended=lambda phase, seconds: heard.append(("ended", phase, seconds >= 0)),
    )
    timings = Timings(observer=observer)
    with pytest.raises(KeyError), timings.measure("outer"):
        timings.report_progress("1 of 2")
        with timings.measure("inner"):
            raise KeyError
    outer, inner = ("began", "outer"), ("began", "inner")
    assert heard == [outer, ("told", "1 of 2"), inner, ("ended", "inner", True), ("ended", "outer", True)]
    Timings().report_progress("nobody watches")


class Device:
    """A device that works through a queue, and the host's clock, in seconds. The host's own work takes no time; it
    waits for the device in `synchronize` alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.busy_until = self.now
        self.waits = 0
        monkeypatch.setattr("lockstep.timings.time", SimpleNamespace(perf_counter=lambda: self.now))

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now) + seconds

    def event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device

    def record(self) -> None:
        self.at = max(self._device.busy_until, self._device.now)

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.now = max(self._device.now, self.at)

    def elapsed_time(self, end_event: Event) -> float:
        assert self._device.now >= max(self.at, end_event.at), "not passed yet"
        return (end_event.at - self.at) * 1e3


def test_a_device_is_measured_by_its_own_clock_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    timings = Timings(keep_spans=True, event=device.event)
    for _ in range(2):  # steps
        device.waits, began = 0, device.now
        with timings.measure("forward_backward", on_device=True):
            for _ in range(3):
                with timings.measure("micro_batch", on_device=True, tokens=7):
                    device.launch(10.0)
        with timings.measure("optim_step", on_device=True):
            device.launch(20.0)
        assert device.now == began  # nothing waited
        spans = timings.take_spans()
        assert device.waits == 2  # for the first event, with nothing before it, and for the last
        assert [(s.name, s.began - began, s.seconds, s.facts) for s in spans if s.on_device] == [
            *(("micro_batch", 10.0 * i, 10.0, {"tokens": 7}) for i in range(3)),
            ("forward_backward", 0.0, 30.0, {}),
            ("optim_step", 30.0, 20.0, {}),
        ]
        assert [s.name for s in spans if not s.on_device] == ["micro_batch"] * 3 + ["forward_backward", "optim_step"]
        assert all(s.seconds == 0 for s in spans if not s.on_device)
        device.now += 5.0  # what no device takes part in
    assert timings.seconds["forward_backward"] == 0


def test_what_raised_is_not_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Device):
        def event(self) -> Event:
            assert not failed, "a device that failed takes no more"
            return super().event()

    failed = False
    timings = Timings(keep_spans=True, event=Broken(monkeypatch).event)
    with pytest.raises(ValueError), timings.measure("step", on_device=True):
        failed = True
        raise ValueError
    assert [span.on_device for span in timings.take_spans()] == [False]


def test_totals_are_the_devices_where_it_measured() -> None:
    spans = [
        Span("generate", 0.0, 3.0),
        Span("forward_backward", 3.0, 0.1),
        Span("forward_backward", 3.0, 2.0, True),
        Span("forward_backward", 5.0, 1.0, True),
        Span("generate", 9.0, 0.5),
    ]
    assert seconds_by_name(spans) == {"generate": 3.5, "forward_backward": 3.0}
