"""`timeline.json`: where a run's time went, as a Chrome trace for Perfetto or chrome://tracing: a JSON array with one
event per line.

Lines are only appended, and the format does not require the closing bracket, so the file of a killed run can be opened
too. Each process of a resumed run is a process of the trace; its phases are on the thread `host`, and times that a GPU
measured on the thread `device`.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..timings import Span
from .metrics import name_write_errors, write_all

TIMELINE_FILE = "timeline.json"
ALL_STEPS = 512  # the first steps are all recorded; after these the interval doubles whenever the step number does
MAX_SPANS_PER_NAME = 64  # spans of one name and thread in one `write`

HOST, DEVICE = 1, 2  # threads
_MAX_SECONDS = 1e10  # seconds


def is_recorded(step: int) -> bool:
    """Whether step `step`, counted from 1, is recorded. The file grows with the logarithm of the number of steps."""
    stride = 1 << ((step - 1) // ALL_STEPS).bit_length()
    return step % stride == 0


class Timeline:
    """Appends spans and counters, flushed to the operating system before `write` returns. The file of an earlier
    process of the run is continued after its last complete line, on the same clock; any other file is replaced by a
    timeline that starts when the process `began` (`time.perf_counter`)."""

    def __init__(self, path: Path, title: str, began: float) -> None:
        self._path = path
        kept, started, earlier = _read_existing(path)
        unix_time = time.time() - (time.perf_counter() - began)
        self._process = earlier + 1
        self._clock_zero = began - (0.0 if started is None else unix_time - started)
        name = title if not earlier else f"{title}, process {self._process}"
        with name_write_errors(path):
            self._file = path.open("r+b" if kept else "wb", buffering=0)
            self._file.truncate(kept)
            self._file.seek(kept)
        self._append(
            ([] if kept else [b"[\n"])
            + [
                _line(ph="M", name="process_name", pid=self._process, args={"name": name, "unix_time": unix_time}),
                _line(ph="M", name="thread_name", pid=self._process, tid=HOST, args={"name": "host"}),
                _line(ph="M", name="thread_name", pid=self._process, tid=DEVICE, args={"name": "device"}),
            ]
        )

    def write(self, spans: Iterable[Span], counters: Mapping[str, Any] | None = None) -> None:
        """Append spans, at most `MAX_SPANS_PER_NAME` of each name (an event counts those left out), and each counter's
        current value if it is a finite number."""
        counts: Counter[tuple[str, bool]] = Counter()
        left_out: Counter[str] = Counter()
        lines = []
        for span in spans:
            counts[span.name, span.on_device] += 1
            if counts[span.name, span.on_device] <= MAX_SPANS_PER_NAME:
                lines.append(self._span(span))
            else:
                left_out[span.name] += 1
        at = {"pid": self._process, "tid": HOST, "ts": self._microseconds(time.perf_counter())}
        if left_out:
            lines.append(_line(ph="i", name="left out", s="p", args=left_out, **at))
        for name, value in (counters or {}).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                lines.append(_line(ph="C", name=name, args={"value": value}, **at))
        self._append(lines)

    def close(self) -> None:
        at = self._microseconds(time.perf_counter())
        last = _line(ph="i", name="end", s="p", pid=self._process, tid=HOST, ts=at)
        self._append([last.removesuffix(b",\n") + b"\n]\n"])
        self._file.close()

    def _span(self, span: Span) -> bytes:
        began, ended = self._microseconds(span.began), self._microseconds(span.began + span.seconds)
        where = {"pid": self._process, "tid": DEVICE if span.on_device else HOST}
        return _line(ph="X", name=span.name, **where, ts=began, dur=ended - began, args=dict(span.facts))

    def _microseconds(self, seconds: float) -> int:
        """Rounded to integers, which keeps a nested span within its parent."""
        return round((seconds - self._clock_zero) * 1e6)

    def _append(self, lines: list[bytes]) -> None:
        with name_write_errors(self._path):
            write_all(self._file, b"".join(lines))


def _line(**event: Any) -> bytes:
    return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b",\n"


def _read_existing(path: Path) -> tuple[int, float | None, int]:
    """Of a file to continue: the bytes to keep, the Unix time of its zero, and its number of processes; for any other
    file 0, None and 0."""
    try:
        data = path.read_bytes()
        kept = data.rfind(b",\n") + 2
        first = json.loads(data[:kept].splitlines()[1].removesuffix(b","))
        started = float(first["args"]["unix_time"])
        if math.isfinite(started):
            return kept, started, data[:kept].count(b'"process_name"')
    except (OSError, ValueError, IndexError, KeyError, TypeError, RecursionError):
        pass
    return 0, None, 0


def read_timeline(path: Path) -> Iterator[tuple[int, Span]]:
    """The spans in the file, each with its process, counted from 1; damaged lines are left out."""
    with path.open("rb") if path.is_file() else io.BytesIO() as file:
        for line in file:
            try:
                event = json.loads(line.strip().removesuffix(b","))
                if event["ph"] == "X":
                    began, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
                    name, facts = str(event["name"]), dict(event["args"])
                    if abs(began) < _MAX_SECONDS and 0 <= seconds < _MAX_SECONDS:  # otherwise damaged
                        yield int(event["pid"]), Span(name, began, seconds, event["tid"] == DEVICE, facts)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
