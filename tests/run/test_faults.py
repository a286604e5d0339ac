"""A fault of one rank of several: one message, and the stacks of all."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.distributed import World
from lockstep.errors import InputError, LockstepError, ParityError, PeerLost, Terminated
from lockstep.run.faults import report_faults_once

HOST = platform.node()


class Beside(World):
    """One of two ranks, in this process; `process` is the other's."""

    process = 0

    def gather(self, value: Any, what: str = "") -> list[Any]:
        other = type(value)(1 - self.rank, HOST, self.process)
        return [other, value][:: 1 if self.rank else -1]

    def broadcast_from_first(self, make: Any) -> Any:
        return make() if self.is_first else None


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of a process that has ended, which is that of the other rank."""
    process = subprocess.Popen(["true"])
    process.wait()
    monkeypatch.setattr(Beside, "process", process.pid)
    return process.pid


def run_into(error: BaseException, run: Path, rank: int = 1) -> Any:
    """What comes out of a rank that runs into `error`, after the ranks have begun."""
    with pytest.raises(BaseException) as raised, report_faults_once(run, Beside(rank, 2, timeout=3.0)):
        (run / "stacks" / f"rank-{1 - rank}.txt").touch()
        raise error
    return raised.value


def ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a deadline ends the process."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="1"):
        patch.setattr(os, "_exit", sys.exit)
        world._give_up("a step", 13.0)


def test_the_first_to_fail_tells_and_the_others_do_not(
    tmp_path: Path, dead: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = tmp_path / "stacks"
    assert isinstance(run_into(ZeroDivisionError("odd"), tmp_path), ZeroDivisionError)
    known = f"rank 0 on {HOST} (process {dead}) is gone\ntold by rank 1 on {HOST} (process {os.getpid()}); the stacks"
    said = capsys.readouterr().err
    assert said.startswith(
        f"lockstep: failed: ZeroDivisionError: odd\n{known} of all ranks are in {stacks}\n(its trace"
    )
    own = (stacks / "rank-1.txt").read_text()
    assert "ZeroDivisionError: odd\n" in own and "most recent call first" in own and "in run_into" in own
    assert (stacks / "rank-0.txt").read_text() == f"rank 0 on {HOST} (process {dead}) is gone\n"
    later = run_into(RuntimeError("gloo: closed"), tmp_path)
    assert isinstance(later, PeerLost) and later.reported and capsys.readouterr().err == ""
    assert (stacks / "fault.txt").read_text().startswith("ZeroDivisionError: odd\n")
    stuck = Beside(1, 2, timeout=3.0)
    with report_faults_once(tmp_path, stuck):
        ends(stuck, monkeypatch)
    assert capsys.readouterr().err == ""  # the first has told of it
    ends(stuck, monkeypatch)
    assert capsys.readouterr().err.startswith("lockstep: failed: rank 1 of 2: a step did not end within 13 s")
    first = run_into(LockstepError("no room"), tmp_path, rank=0)  # of another start
    assert first.args[0].startswith("no room\nrank 1 on") and first.reported
    assert capsys.readouterr().err.startswith("lockstep: failed: no room\nrank 1 on")  # and nobody else says it


def test_a_full_disk_hides_no_message(tmp_path: Path, dead: int, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "rank-1.txt").symlink_to("/dev/full")
    found = run_into(LockstepError("no room"), tmp_path)
    said = capsys.readouterr().err
    assert isinstance(found, LockstepError) and said.startswith(f"lockstep: failed: no room\nrank 0 on {HOST}")


def test_what_all_ranks_have_leaves_nothing(tmp_path: Path, dead: int) -> None:
    shared = LockstepError("shared")
    shared.reported = True
    for error in (shared, InputError("a bad flag"), ParityError("a token"), KeyboardInterrupt()):
        assert run_into(error, tmp_path) is error and "\n" not in str(error)
        with report_faults_once(tmp_path, Beside(0, 2, timeout=3.0)):
            assert (tmp_path / "stacks").is_dir()
        assert not (tmp_path / "stacks").exists()
    assert [run_into(ParityError(), tmp_path, rank).reported for rank in (0, 1)] == [False, True]


def test_a_launchers_signal_names_the_process_that_died(tmp_path: Path, dead: int) -> None:
    lost = run_into(Terminated(signal.SIGTERM), tmp_path, rank=0)
    assert isinstance(lost, PeerLost) and f"rank 1 on {HOST} (process {dead}) is gone" in str(lost)
    Beside.process = os.getppid()
    assert isinstance(run_into(Terminated(signal.SIGTERM), tmp_path, rank=0), Terminated)


def test_who_ends_for_a_signal_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has ended for it, or ends as this one does and is at the report."""
    monkeypatch.setattr(Beside, "process", os.getppid())
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "signal.txt").write_text("1")
    ended = run_into(PeerLost("late"), tmp_path)
    assert isinstance(ended, Terminated) and ended.args == (signal.SIGHUP,)
    assert {path.name for path in (tmp_path / "stacks").iterdir()} == {"rank-0.txt", "signal.txt"}
    with pytest.raises(KeyboardInterrupt), report_faults_once(tmp_path, Beside(1, 2, timeout=3.0)) as faults:
        at_its_report = tmp_path / "stacks" / "rank-0.txt"
        threading.Timer(0.2, at_its_report.unlink).start()
        faults.all_end()
        raise KeyboardInterrupt
    assert not (tmp_path / "stacks").exists()


def test_a_stopped_process_writes_its_stack_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import faulthandler, signal, sys, time\nfile = open(sys.argv[1], 'a')\n"
        "faulthandler.register(signal.SIGURG, file=file)\nprint(flush=True)\nsys.stdin.read()\n"
    )
    (tmp_path / "stacks").mkdir()
    path = tmp_path / "stacks" / "rank-0.txt"
    command = [sys.executable, "-S", "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        monkeypatch.setattr(Beside, "process", process.pid)
        monkeypatch.setattr("lockstep.run.faults._STACK_TIMEOUT_S", 60.0)  # it answers on a busy machine too
        lost = run_into(PeerLost("late"), tmp_path)
        assert f"rank 0 on {HOST} (process {process.pid}) is stopped" in str(lost)
        assert 'File "<string>", line ' in path.read_text()
        process.communicate(timeout=60)
    assert process.returncode == 0
