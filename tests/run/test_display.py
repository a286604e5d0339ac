"""The progress display: what it says, and that a stream which fails ends nothing."""

from __future__ import annotations

import io
import math
import sys
import tracemalloc
from types import SimpleNamespace

import pytest
from processes import finished, unread_pipe, wait_for

from lockstep.run.display import Display, FailsafeStream, RequiredStream, sparkline
from lockstep.timings import Timings

METRICS = {
    "reward/mean": 0.5,
    "loss": 0.125,
    "response_length/mean": 12.0,
    "time/step": 2.0,
    "time/generate": 1.0,
    "time/forward_backward": 0.75,
    "time/optim_step": 0.25,
    "perf/tokens_per_s_per_gpu": 12345.6,
    "parity/tokens_checked": 1000,
    "parity/tokens_different": 0,
}


def test_display_without_a_terminal_is_a_line_a_step() -> None:
    stream = io.StringIO()
    with Display(10, stream=stream) as display:
        display.note("starting [bold]")
        display.update(0, METRICS)
        display.update(1, {"reward/mean": math.nan})
        display.update(2, METRICS | {"parity/tokens_different": 3, "groups_without_reward": 4})
    note, first, second, third = stream.getvalue().splitlines()
    assert note == "starting [bold]"
    assert first == (
        "step 1/10  reward 0.5  loss 0.125  length 12  parity identical (1,000 tokens)  "
        "2 s (generate 1, forward_backward 0.75, optim_step 0.25)  12,346 tokens/s  eta 0:18"
    )
    assert second.startswith("step 2/10  reward nan  loss -  length -")
    assert "BROKEN (3 of 2,000 tokens differ)" in third and "  reward 0.5 (4 groups have none)  loss" in third


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_display_on_a_terminal_and_with_progress_off() -> None:
    live, plain = Terminal(), Terminal()
    for stream, wanted in ((live, True), (plain, False)):
        with Display(2, live=wanted, stream=stream) as display:
            display.note("starting")
            display.update(0, METRICS)
            display.update(1, METRICS | {"reward/mean": 1.0})
    assert "▁█" in live.getvalue() and "identical (2,000 tokens)" in live.getvalue()
    assert len(plain.getvalue().splitlines()) == 3


def test_a_display_that_is_not_shown_keeps_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Display(1000, shown=False) as display:
        display.note("starting")
        tracemalloc.start()
        for step in range(1000):
            display.update(step, METRICS)
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert capfd.readouterr().err == "" and kept < 50_000  # its lines have 170,000 characters


def test_display_without_parity_or_times() -> None:
    stream = io.StringIO()
    with Display(1, stream=stream) as display:
        display.update(0, {})
    assert "parity not checked" in stream.getvalue() and "eta -" in stream.getvalue()


def test_parts_of_startup_get_a_line_each_as_they_end() -> None:
    stream = io.StringIO()
    with Display(1, stream=stream) as display:
        display.phase_began("load")
        display.phase_began("trace")
        display.phase_ended("trace", 2.0)
        assert stream.getvalue() == ""  # a part of loading
        display.phase_ended("load", 3.25)
        assert stream.getvalue() == "start-up: loading the model 3.2 s\n"
        for phase, seconds in (("task", 0.0001127), ("validation", 5.0), ("read", 5.0)):
            display.phase_began(phase)
            display.phase_ended(phase, seconds)
        display.phase_began("step")
        display.phase_ended("step", 2.0)
        display.phase_began("checkpoint")
        display.phase_ended("checkpoint", 2.0)  # no part of start-up
    assert stream.getvalue().count("\n") == 1


def test_what_is_being_done_within_a_step() -> None:
    display = Display(1, stream=io.StringIO())
    assert display.current_phase() == ""
    for phase, detail, shown in (
        ("step", "", ""),
        ("generate", "40 of 128", "generating: 40 of 128, 0 s"),
        ("decode", "", "generating: 40 of 128, 0 s"),
        ("rewards", "exact", "in rewards: exact, 0 s"),
    ):
        display.phase_began(phase)
        display.phase_progressed(detail)
        assert display.current_phase() == shown
    for phase in ("rewards", "decode", "generate"):
        display.phase_ended(phase, 1.0)
    display.phase_began("forward_backward")
    assert display.current_phase() == "training, 0 s"


def test_a_long_phase_shows_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lockstep.run.display.time", SimpleNamespace(monotonic=lambda: now[0]))
    plain, live = io.StringIO(), Terminal()
    with Display(1, stream=plain, tick=0.002) as first, Display(1, stream=live, tick=0.002) as second:
        for display in (first, second):
            display.phase_began("rewards")
            display.phase_progressed("exact")
        now[0] += 31.4
        wait_for(lambda: "exact" in plain.getvalue() and "31 s" in live.getvalue())
        now[0] += 29.0
        wait_for(lambda: plain.getvalue().count("still") == 2)
        second.note("a line")
        assert "exact" in live.getvalue()
    assert plain.getvalue() == "still in rewards: exact, 31 s\nstill in rewards: exact, 60 s\n"


def test_a_start_tells_early_what_it_is_at_however_short_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lockstep.run.display.time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = io.StringIO()
    display = Display(1, stream=stream, tick=0.002)
    measured = Timings(observer=display).measure
    with display, measured("graphs"):
        for count in range(6):
            with measured("compile"):
                now[0] += 4.0
                if count in (2, 5):
                    wait_for(lambda lines=count // 2: stream.getvalue().count("still") >= lines)
    assert stream.getvalue() == "".join(f"still compiling kernels, 4 s (graphs, {seconds} s)\n" for seconds in (12, 24))


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, math.nan, 1.0]) == "▁▄ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([math.nan]) == sparkline([]) == ""


class Failing(io.StringIO):
    """A stream whose reader has gone after `good` writes."""

    def __init__(self, good: int, error: Exception) -> None:
        super().__init__()
        self.good, self.error, self.tried = good, error, 0

    def write(self, text: str) -> int:
        self.tried += 1
        if self.tried > self.good:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "Input/output error"), ValueError("closed file")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_stream_that_fails_ends_nothing(error: Exception, terminal: bool) -> None:
    stream = Failing(2, error)
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    with Display(3, stream=stream) as display:
        for step in range(3):
            display.note("note")
            display.update(step, METRICS)
    assert stream.getvalue() and stream.tried == 3  # what failed is not tried again


def test_a_locale_without_the_characters_shows_others() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    FailsafeStream(stream).write("reward \u2581\u2588")
    assert raw.getvalue() == b"reward ??"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("latin-1", "\xfc \\u4f60"), ("ascii", "\\xfc \\u4f60"), ("utf-8", "\xfc \u4f60")]
)
def test_an_outcome_is_told_in_any_locale(encoding: str, shown: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    RequiredStream(stream).write("\xfc \u4f60")
    assert raw.getvalue() == shown.encode(encoding)


def test_no_stream_at_all() -> None:
    stream = FailsafeStream(None)
    assert stream.write("text") == 4 and not stream.isatty()
    with Display(1) as display:
        display.update(0, METRICS)


@pytest.mark.parametrize("closed", ["at the start", "by its reader"])
def test_a_process_outlives_its_standard_error(closed: str) -> None:
    code = """
import contextlib, sys
from lockstep.run.display import Display, FailsafeStream
with contextlib.redirect_stderr(FailsafeStream(sys.stderr)), Display(200) as display:
    for step in range(200):
        display.update(step, {})
        print("a library's word", file=sys.stderr)
print("done")
"""
    command = [sys.executable, "-c", code]
    if closed == "at the start":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with unread_pipe() as pipe:
        done = finished(command, stderr=pipe)
    assert (done.returncode, done.stdout) == (0, "done\n")
