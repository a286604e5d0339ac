"""What several processes leave if one of them fails, dies or stops: a single message, and the stack of each."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..distributed import World
from ..errors import InputError, LockstepError, NonFiniteError, ParityError, PeerLost, Terminated
from ..machine import is_torchrun_worker, torchrun_report_note
from ..session.signals import exception_for, handle_signals
from .crash import dump_stacks_on_crash

STACKS, FAULT_FILE, SIGNAL_FILE = "stacks", "fault.txt", "signal.txt"
_STACK_SIGNAL = signal.SIGURG  # asks a process for its stack; ignored by default
_STACK_TIMEOUT_S = 2.0  # seconds that a process has to answer
_REPORT_TIMEOUT_S = 20.0  # seconds that the other ranks wait for the first's report; launchers kill after 30
_STATES = {"Z": "gone", "X": "gone", "T": "stopped"}  # states in /proc/N/stat


@dataclass(frozen=True)
class _Rank:
    rank: int
    host: str
    process: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.process})"

    def state(self) -> str:
        """What is wrong with a process of this host, as far as can be seen: "gone", "stopped", or ""."""
        try:
            os.kill(self.process, 0)
            return _STATES.get(Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0], "")
        except (ProcessLookupError, FileNotFoundError):
            return "gone" if Path("/proc/self/stat").exists() else ""
        except OSError:
            return ""


@contextlib.contextmanager
def report_faults_once(run_dir: Path, world: World) -> Iterator[FaultReporter]:
    """A context in which a fault that not all ranks see alike, such as a process that is gone or stopped, is reported
    by one of them and leaves the stacks of all in the run's folder. An error that this or another rank has reported has
    `reported` set. A rank that ends because it was asked to is not a fault: the others end as if asked too."""
    folder, own = run_dir / STACKS, _Rank(world.rank, platform.node(), os.getpid())
    if world.size == 1:
        yield FaultReporter(folder, io.StringIO(), own, [])
        return
    world.broadcast_from_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    with _open_stack_file(folder / f"rank-{world.rank}.txt", world.is_first) as file:
        faults = FaultReporter(folder, file, own, [r for r in world.gather(own) if r.host == own.host and r != own])
        try:
            with world.report_deadline_with(faults.report), world.detect_lost_peers():
                yield faults
        except BaseException as error:
            faults.handle(error)
            raise
        finally:
            faults.remove_empty_files()


@contextlib.contextmanager
def _open_stack_file(path: Path, first: bool) -> Iterator[IO[str]]:
    """The file for this process's stack when it is asked for and, on ranks other than the first, which has its own file
    for that, at a crash."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError:  # on the first rank, the run itself reports it
        file = open(os.devnull, "a", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
    try:
        with contextlib.nullcontext() if first else dump_stacks_on_crash(file):
            yield file
    finally:
        faulthandler.unregister(_STACK_SIGNAL)
        with contextlib.suppress(OSError):  # a full disk, which the run's own error reports
            file.close()


class FaultReporter:
    """Reports the faults that one rank sees; `local_peers` are the other ranks of its host."""

    def __init__(self, folder: Path, file: IO[str], own: _Rank, local_peers: list[_Rank]) -> None:
        self._folder, self._file, self._own, self._local_peers = folder, file, own, local_peers
        self._all_end = False

    def all_end(self) -> None:
        """Note that all ranks are ending because of a signal, which every rank knows."""
        self._all_end = True

    def record_signal_exit(self, number: int) -> None:
        """Record that this rank ends in an orderly way for a signal, so that the others do not count it as lost."""
        with contextlib.suppress(OSError):  # a single process has no such folder
            (self._folder / SIGNAL_FILE).write_text(str(int(number)))
        with contextlib.suppress(OSError):
            self._stack_path(self._own).unlink()

    def handle(self, error: BaseException) -> None:
        """Report the fault, or mark `error` as reported by another rank. Raises `PeerLost` in place of a signal that a
        launcher sent because a process died, and the signal's exception in place of `PeerLost` if a rank ended for
        one."""
        if hasattr(error, "reported") or isinstance(error, InputError):
            return
        known: Any = error
        if isinstance(error, KeyboardInterrupt):
            if not self.lost() or not isinstance(error, Terminated):
                if self._all_end:
                    self._wait_for_first_report()
                self.record_signal_exit(error.args[0] if isinstance(error, Terminated) else signal.SIGINT)
                return
            known = PeerLost("another process of the run is gone")
        if isinstance(error, PeerLost) and (number := self._peer_exit_signal()) and not self.lost():
            self.record_signal_exit(number)
            raise exception_for(number) from error
        if isinstance(known, (ParityError, NonFiniteError)):  # raised on all ranks alike
            known.reported = self._own.rank != 0
        elif isinstance(known, Exception):
            with handle_signals(signal.SIG_IGN, [signal.SIGTERM]):  # sent by a launcher that finds a process dead
                self._report_error(known)
        if known is not error:
            raise known from error

    def lost(self) -> bool:
        """Whether another process of this host died; one that left in order has removed its file."""
        return any(rank.state() == "gone" and self._stack_path(rank).exists() for rank in self._local_peers)

    def _peer_exit_signal(self) -> int:
        """The signal for which another rank has ended; 0 if none has."""
        try:
            return int((self._folder / SIGNAL_FILE).read_text())
        except (OSError, ValueError):
            return 0

    def _wait_for_first_report(self) -> None:
        """Wait for the first rank, which may be writing the report: a launcher ends all once any process has left."""
        first, until = self._folder / "rank-0.txt", time.monotonic() + _REPORT_TIMEOUT_S
        while self._own.rank and first.exists() and not self.lost() and time.monotonic() < until:
            time.sleep(0.01)

    def _report_error(self, error: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk
            self._file.write("".join(traceback.format_exception(error)))
            self._file.flush()
        if isinstance(error, LockstepError):
            message = self.report(str(error))
            error.args, error.reported = (message or str(error),), True
            if message:  # print now, since a launcher may end the process at any time from here on
                print(f"lockstep: failed: {message}{torchrun_report_note()}", file=sys.stderr, flush=True)
        elif message := self.report(f"{type(error).__name__}: {error}"):
            more = ", and what torchrun says of it" if is_torchrun_worker() else ""
            print(f"lockstep: failed: {message}\n(its traceback follows{more})", file=sys.stderr, flush=True)

    def report(self, message: str) -> str:
        """`message` with what is known of the fault, for this rank to report; empty if another rank has reported it.
        Before returning, all ranks of this host have been made to write their stacks."""
        states = [(rank, rank.state()) for rank in self._local_peers]
        lost_peers = [f"{rank} is {state}" for rank, state in states if state]
        source = f"told by {self._own}; the stacks of all ranks are in {self._folder}"
        full = "\n".join([message, *lost_peers, source])
        try:
            with (self._folder / FAULT_FILE).open("x", encoding="utf-8") as file:
                file.write(full + "\n")
        except FileExistsError:
            full = ""
        except OSError:  # this host does not see the run's folder
            pass
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._request_stacks()
        return full

    def _request_stacks(self) -> None:
        """Make the other ranks of this host write their stacks. A stopped one is continued for that, and then ends."""
        asked = [rank for rank in self._local_peers if self._has_empty_stack(rank)]
        for rank in asked:
            with contextlib.suppress(OSError):
                os.kill(rank.process, _STACK_SIGNAL)
                os.kill(rank.process, signal.SIGCONT)
        until = time.monotonic() + _STACK_TIMEOUT_S
        while (silent := [rank for rank in asked if self._has_empty_stack(rank)]) and time.monotonic() < until:
            if all(rank.state() == "gone" for rank in silent):
                break
            time.sleep(0.01)
        for rank in silent:
            with contextlib.suppress(OSError):
                self._stack_path(rank).write_text(f"{rank} {'is gone' if rank.state() else 'did not answer'}\n")

    def remove_empty_files(self) -> None:
        """Remove files that hold no information: all of them, if nothing failed."""
        fault, signal_file = self._folder / FAULT_FILE, self._folder / SIGNAL_FILE
        if self._own.rank == 0 and not fault.exists() and not signal_file.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._has_empty_stack(self._own):
                self._stack_path(self._own).unlink()
            if [*self._folder.iterdir()] == [signal_file]:  # no rank is left to read it
                signal_file.unlink()
            self._folder.rmdir()

    def _stack_path(self, rank: _Rank) -> Path:
        return self._folder / f"rank-{rank.rank}.txt"

    def _has_empty_stack(self, rank: _Rank) -> bool:
        try:
            return self._stack_path(rank).stat().st_size == 0
        except OSError:
            return False
