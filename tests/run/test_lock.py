"""A run folder has one process: a second is refused with the first one's name, and the dead keep nobody out."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import running, wait_for

from lockstep.cli.main import main
from lockstep.errors import InputError
from lockstep.run import lock
from lockstep.run.lock import LOCK_FILE, lock_run_folder

QUICK = [
    *("train", "sum-digits", "--steps", "1", "--trainer.prompts-per-step", "1", "--sampling.num-generations", "2"),
    *("--sampling.max-completion-length", "4", "--task.validation-prompts", "0", "--trainer.warmup-steps", "0"),
    *("--device", "cpu", "--checkpoint.interval", "1"),
]
_HOLDER = """
import sys, time
from pathlib import Path
from lockstep.run.lock import lock_run_folder
with lock_run_folder(Path(sys.argv[1])):
    Path(sys.argv[1], "ready").touch()
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[int]:
    """Another process that holds the folder."""
    with running([sys.executable, "-c", _HOLDER, str(tmp_path)]) as process:
        wait_for((tmp_path / "ready").exists, process)
        yield process.pid


def test_a_second_process_is_told_who_is_there(tmp_path: Path, other: int) -> None:
    with pytest.raises(InputError, match=f"in use: process {other} on {platform.node()} is training in it"):
        lock_run_folder(tmp_path).__enter__()
    assert (tmp_path / LOCK_FILE).read_text() == f"process {other} on {platform.node()}"


def test_a_killed_process_keeps_nobody_out(tmp_path: Path, other: int) -> None:
    os.kill(other, signal.SIGKILL)
    os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    assert (tmp_path / LOCK_FILE).exists()
    with lock_run_folder(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} ")
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_copy_of_the_process_does_not_keep_the_folder(tmp_path: Path) -> None:
    """A reward function's child lives on, say, when the run has been killed."""
    (end, other_end), (ready, is_ready) = os.pipe(), os.pipe()
    with lock_run_folder(tmp_path):
        copy = os.fork()
        if copy == 0:
            os.close(other_end)
            os.write(is_ready, b"1")
            os.read(end, 1)  # until the test is over
            os._exit(0)
        os.read(ready, 1)
        os.close(next(iter(lock._open_lock_files)))  # as the end of this process would, without a word
        lock._open_lock_files.clear()
        with lock_run_folder(tmp_path):
            pass
    os.close(other_end)
    assert os.waitpid(copy, 0)[1] == 0
    for descriptor in (end, ready, is_ready):
        os.close(descriptor)


def test_code_that_closes_all_files_frees_the_folder(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path):
        os.close(next(iter(lock._open_lock_files)))
    with lock_run_folder(tmp_path):
        pass


def test_a_lock_that_was_deleted_under_the_next_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder deletes the file and lets go of it between the opening and the locking of the next."""
    flock, path = lock.fcntl.flock, tmp_path / LOCK_FILE

    def late(file: int, operation: int) -> None:
        if not first:
            first.append(file)
            path.unlink()
        flock(file, operation)

    first: list[int] = []
    monkeypatch.setattr(lock.fcntl, "flock", late)
    with lock_run_folder(tmp_path):
        assert path.exists() and first
        with pytest.raises(InputError, match=f"process {os.getpid()} "):
            lock_run_folder(tmp_path).__enter__()


def test_a_run_that_is_running_is_neither_resumed_nor_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main([*QUICK, "--run-dir", str(run)]) == 0
    assert not (run / LOCK_FILE).exists()
    with lock_run_folder(run):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
        for how in (["train", "--resume", str(run), "--steps", "2"], [*QUICK, "--run-dir", str(run)]):
            assert main(how) == 2
            assert f"lockstep: error: {run} is in use: process {os.getpid()} on " in capsys.readouterr().err
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert main(["train", "--resume", str(run), "--steps", "2"]) == 0
    new = tmp_path / "new"
    new.mkdir()
    with lock_run_folder(new):
        assert main([*QUICK, "--run-dir", str(new)]) == 2
    (new / LOCK_FILE).write_text("process 1 on elsewhere")  # of one that was killed before it wrote anything
    assert main([*QUICK, "--run-dir", str(new)]) == 0
