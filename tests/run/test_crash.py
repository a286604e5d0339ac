"""Rewards that end the process, or keep it from ending."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from c_library import using
from processes import DEADLINE, finished, running, running_lockstep

from lockstep.__main__ import entry
from lockstep.cli.main import main
from lockstep.ops.native import library
from lockstep.run import crash
from lockstep.run.recorder import Recorder
from lockstep.session.signals import reraise_received

REWARDS = """
import ctypes, os, threading, time

def leave(completions, **_): os._exit(3)
def fault(completions, **_): ctypes.string_at(0)
def linger(completions, **_):
    os.system("echo a grader")
    threading.Thread(target=time.sleep, args=(1000,), name="linger").start()
    return [float(i % 2) for i in range(len(completions))]
"""
TRAIN = [
    *(sys.executable, "-m", "lockstep", "train", "--steps", "1", "--trainer.warmup-steps", "0", "--run-dir", "run"),
    *("--trainer.prompts-per-step", "2", "--sampling.num-generations", "2", "--sampling.max-completion-length", "4"),
    *("--task.validation-prompts", "0", "--parity", "off", "--checkpoint.interval", "0"),
]


@pytest.mark.parametrize(
    ("reward", "code", "words"),
    [("leave", 3, ["os._exit"]), ("fault", -11, ["Segmentation fault", 'r.py", line 5 in fault'])],
)
def test_a_reward_that_ends_the_process(tmp_path: Path, reward: str, code: int, words: list[str]) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    with running_lockstep([*TRAIN[3:], "--reward", f"r.py:{reward}"], tmp_path) as process:
        process.communicate(DEADLINE)
    assert process.returncode == code
    said = (tmp_path / "run" / crash.CRASH_FILE).read_text()
    assert "ended without a word" in said and all(word in said for word in words)


def test_a_thread_that_a_reward_left_does_not_hold_up_the_end(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(REWARDS)
    soon = "from lockstep.cli import main as cli\ncli._THREAD_GRACE = 0.2\ncli.entry()"  # seconds, not five
    done = finished([sys.executable, "-c", soon, *TRAIN[3:], "--reward", "r.py:linger", "--json"], cwd=tmp_path)
    assert json.loads(done.stdout)["steps_done"] == 1 and "a grader\n" in done.stderr
    assert done.returncode == 0 and "threads that still ran were left" in done.stderr and "linger" in done.stderr
    assert not (tmp_path / "run" / crash.CRASH_FILE).exists() and (tmp_path / "run" / "report.html").exists()


def test_the_note_goes_with_the_run(tmp_path: Path) -> None:
    before = faulthandler.is_enabled()
    with pytest.raises(KeyError), crash.crash_note(tmp_path):
        assert (tmp_path / crash.CRASH_FILE).read_text().startswith("Process ")
        raise KeyError
    assert not list(tmp_path.iterdir()) and faulthandler.is_enabled() == before
    (tmp_path / crash.CRASH_FILE).write_text("of an earlier process")
    with crash.crash_note(tmp_path, has_begun=lambda: False):
        assert (tmp_path / crash.CRASH_FILE).read_text().startswith("Process ")
    assert (tmp_path / crash.CRASH_FILE).read_text() == "of an earlier process"


def test_missing_operators_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    library.warn_if_missing.cache_clear()
    with using(None), caplog.at_level(logging.WARNING):
        library.warn_if_missing()
        library.warn_if_missing()
    assert [record.message.split(" (")[0] for record in caplog.records] == ["the C operators are missing"]


def test_ctrl_c_anywhere_ends_the_command_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its modules are imported, say, or once more after the first."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.cli.main.entry", interrupted)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="130"):
            entry()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "lockstep: interrupted\n"


def test_ctrl_c_is_not_lost_in_an_import(tmp_path: Path) -> None:
    """A module may drop any exception, as torch does in places, and be imported all the same."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass\n"
    )
    with running(TRAIN, tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path])) as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (130, "lockstep: interrupted\n")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["torch.py"]


def test_ctrl_c_within_a_generated_text_of_python_has_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "from lockstep import __main__\nfrom lockstep.cli import main\n"
        "main.entry = lambda: exec('import signal; signal.raise_signal(signal.SIGINT)')\n__main__.entry()\n"
    )
    with running([sys.executable, "-m", "m"], tmp_path, PYTHONPATH=os.pathsep.join(sys.path)) as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (130, "lockstep: interrupted\n")


@pytest.mark.parametrize(
    ("number", "place", "code"),
    [
        (signal.SIGINT, "record_start", 130),
        (signal.SIGINT, "open_step_files", 130),
        (signal.SIGTERM, "warm_up_graphs", 143),
    ],
)
def test_a_signal_that_was_lost_ends_the_run_before_its_first_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    place: str,
    code: int,
) -> None:
    """As in a finalizer or a callback, where Python drops exceptions."""
    original = getattr(Recorder, place)

    def losing(*arguments: Any) -> None:
        original(*arguments)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)

    monkeypatch.setattr(Recorder, place, losing)
    monkeypatch.chdir(tmp_path)
    before = [signal.getsignal(every) for every in (signal.SIGINT, signal.SIGTERM)]
    assert main(TRAIN[3:]) == code
    reraise_received()  # nothing: it was the run's alone
    assert [signal.getsignal(every) for every in (signal.SIGINT, signal.SIGTERM)] == before
    said = capsys.readouterr().err.splitlines()
    words = "interrupted" if code == 130 else f"ended by {number.name}"
    assert said[-5:-2] == [f"lockstep: {words}", "folder  run", "report  run/report.html"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps_done"] == 0


def test_ctrl_c_after_the_outcome_changes_nothing() -> None:
    code = (
        "import atexit, os, signal\nfrom lockstep.cli import main as cli\ncli.main = lambda: 1\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\ncli.entry()"
    )
    done = finished([sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (1, "")
