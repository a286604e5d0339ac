"""timeline.json: a Chrome trace that opens whatever ended the run, of a bounded size, on one clock."""

from __future__ import annotations

import json
import math
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.run.timeline import ALL_STEPS, MAX_SPANS_PER_NAME, Timeline, is_recorded, read_timeline
from lockstep.timings import Span


def opened(path: Path) -> list[dict[str, Any]]:
    """The events as a viewer reads them: of an array that may lack its end, which a comma may come before."""
    text = path.read_text()
    return json.loads(text if text.endswith("]\n") else text.rstrip(",\n") + "]")


def written(path: Path, *names: str, began: float | None = None, close: bool = True) -> Timeline:
    began = time.perf_counter() if began is None else began
    timeline = Timeline(path, "run", began)
    timeline.write([Span(name, began + i, 0.5) for i, name in enumerate(names)])
    if close:
        timeline.close()
    return timeline


def test_events_are_those_of_the_format(tmp_path: Path) -> None:
    path, began = tmp_path / "timeline.json", time.perf_counter() - 2
    timeline = Timeline(path, 'a "run"', began)
    spans = [Span("decode", began + 1, 0.25, facts={"steps": 8}), Span("decode", began + 1.5, 0.5, True)]
    timeline.write(spans, {"reward": 0.5, "nan": math.nan, "none": None, "text": "NaN"})
    assert opened(path)[-1]["args"] == {"value": 0.5}  # on disk, whoever kills the process now
    timeline.close()
    events = json.loads(path.read_text())
    assert [(e["ph"], e["name"]) for e in events] == [
        *(("M", "process_name"), ("M", "thread_name"), ("M", "thread_name")),
        *(("X", "decode"), ("X", "decode"), ("C", "reward"), ("i", "end")),
    ]
    assert events[0]["args"]["name"] == 'a "run"' and [e["args"]["name"] for e in events[1:3]] == ["host", "device"]
    assert {e["pid"] for e in events} == {1} and [e.get("tid") for e in events] == [None, 1, 2, 1, 2, 1, 1]
    host, device = events[3:5]
    assert (host["ts"], host["dur"], host["args"]) == (1e6, 250_000, {"steps": 8})
    assert (device["ts"], device["dur"]) == (1.5e6, 500_000)
    assert 2e6 < events[5]["ts"] <= events[6]["ts"] < 60e6
    assert [(process, span.name, span.on_device) for process, span in read_timeline(path)] == [
        (1, "decode", False),
        (1, "decode", True),
    ]


@pytest.mark.parametrize("ended", ["closed", "killed", "torn"])
def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path, ended: str) -> None:
    path = tmp_path / "timeline.json"
    written(path, "first", "second", close=ended == "closed")
    if ended == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    written(path, "third", began=time.perf_counter() + 5, close=False)
    spans = list(read_timeline(path))
    assert [(p, s.name) for p, s in spans] == [(1, "first")] + [(1, "second")] * (ended != "torn") + [(2, "third")]
    assert spans[0][1].began == 0 and 5 < spans[-1][1].began < 60
    assert [e["args"]["name"] for e in opened(path) if e["name"] == "process_name"] == ["run", "run, process 2"]


@pytest.mark.parametrize(
    "content", ["", "[", "nonsense", "[\n{},\n", '[\n{"args": {"unix_time": 1e999}},\n', "[\n" + "[" * 10**5 + ",\n"]
)
def test_a_file_that_is_no_timeline_is_begun_anew(tmp_path: Path, content: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(content)
    assert list(read_timeline(path)) == []
    written(path, "only")
    assert [e["name"] for e in json.loads(path.read_text())][3:] == ["only", "end"]


def test_the_size_grows_with_the_logarithm_of_the_steps() -> None:
    kept = [step for step in range(1, 8 * ALL_STEPS + 1) if is_recorded(step)]
    assert kept[:ALL_STEPS] == list(range(1, ALL_STEPS + 1))
    for doubling in (1, 2, 4):
        assert sum(doubling * ALL_STEPS < step <= 2 * doubling * ALL_STEPS for step in kept) == ALL_STEPS // 2


def test_a_step_of_many_blocks_says_how_many_it_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, "run", 0.0)
    many = [
        Span("decode", float(i), 1.0, on_device) for i in range(MAX_SPANS_PER_NAME + 7) for on_device in (False, True)
    ]
    timeline.write([*many, Span("generate", 0.0, 100.0)])
    names = [span.name for _, span in read_timeline(path)]
    assert names == ["decode"] * 2 * MAX_SPANS_PER_NAME + ["generate"]
    assert opened(path)[-1]["args"] == {"decode": 14}


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    timeline = written(tmp_path / "timeline.json", "kept", close=False)
    size = (tmp_path / "timeline.json").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(LockstepError, match=r"could not write .*timeline\.json: .*File too large"):
            timeline.write([Span("lost", 0.0, 1.0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    written(tmp_path / "timeline.json", "more")
    assert [span.name for _, span in read_timeline(tmp_path / "timeline.json")] == ["kept", "more"]


def test_parts_stay_within_their_whole(tmp_path: Path) -> None:
    """A viewer nests what lies within, to the last digit that the file has."""
    draw = random.Random(0)
    timeline = Timeline(tmp_path / "timeline.json", "run", 0.0)
    for _ in range(200):
        a, b, c, d = sorted(draw.uniform(0, 1000) for _ in range(4))
        timeline.write([Span("one", b, c - b), Span("two", c, d - c), Span("whole", a, d - a)])
    events = [e for e in opened(tmp_path / "timeline.json") if e["ph"] == "X"]
    for one, two, whole in zip(*[iter(events)] * 3, strict=True):
        assert whole["ts"] <= one["ts"] and one["ts"] + one["dur"] == two["ts"]
        assert two["ts"] + two["dur"] == whole["ts"] + whole["dur"]
