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
from ..machine import by_torchrun, torchrun_follows
from ..session.signals import handled_by, raised_for
from .crash import stacks_to

STACKS, FAULT_FILE, SIGNAL_FILE = "stacks", "fault.txt", "signal.txt"
_ASK = signal.SIGURG  # asks a process for its stack; ignored by default
_WAIT = 2.0  # seconds that a process has to answer
_REPORT = 20.0  # seconds that the other ranks wait for the first's report before they leave; launchers kill after 30
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
def told_once(run_dir: Path, world: World) -> Iterator[Faults]:
    """A context in which a fault that not all ranks see alike, such as a process that is gone or stopped, is reported
    by one of them and leaves the stacks of all in the run's folder. An error that this or another rank has reported has
    `reported` set. A rank that ends because it was asked to is not a fault: the others end as if asked too."""
    folder, own = run_dir / STACKS, _Rank(world.rank, platform.node(), os.getpid())
    if world.size == 1:
        yield Faults(folder, io.StringIO(), own, [])
        return
    world.broadcast_from_first(lambda: shutil.rmtree(folder, ignore_errors=True))
    with _stack_file(folder / f"rank-{world.rank}.txt", world.is_first) as file:
        faults = Faults(folder, file, own, [r for r in world.gather(own) if r.host == own.host and r != own])
        try:
            with world.report_deadline_with(faults.told), world.detect_lost_peers():
                yield faults
        except BaseException as error:
            faults.handle(error)
            raise
        finally:
            faults.tidy()


@contextlib.contextmanager
def _stack_file(path: Path, first: bool) -> Iterator[IO[str]]:
    """The file for this process's stack when it is asked for and, on ranks other than the first, which has its own file
    for that, at a crash."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError:  # on the first rank, the run itself reports it
        file = open(os.devnull, "a", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(_ASK, file=file, all_threads=True)
    try:
        with contextlib.nullcontext() if first else stacks_to(file):
            yield file
    finally:
        faulthandler.unregister(_ASK)
        with contextlib.suppress(OSError):  # a full disk, which the run's own error reports
            file.close()


class Faults:
    """Faults as one rank sees them; `beside` are the other ranks of its host."""

    def __init__(self, folder: Path, file: IO[str], own: _Rank, beside: list[_Rank]) -> None:
        self._folder, self._file, self._own, self._beside = folder, file, own, beside
        self._all_end = False

    def all_end(self) -> None:
        """Note that all ranks are ending because of a signal, which every rank knows."""
        self._all_end = True

    def leaves(self, number: int) -> None:
        """Record that this rank ends in an orderly way for a signal, so that the others do not count it as lost."""
        with contextlib.suppress(OSError):  # a single process has no such folder
            (self._folder / SIGNAL_FILE).write_text(str(int(number)))
        with contextlib.suppress(OSError):
            self._path(self._own).unlink()

    def handle(self, error: BaseException) -> None:
        """Report the fault, or mark `error` as reported by another rank. Raises `PeerLost` in place of a signal that a
        launcher sent because a process died, and the signal's exception in place of `PeerLost` if a rank ended for
        one."""
        known: Any = error
        if hasattr(error, "reported") or isinstance(error, InputError):
            return
        if isinstance(error, KeyboardInterrupt):
            if not self.lost() or not isinstance(error, Terminated):
                if self._all_end:
                    self._let_the_first_report()
                self.leaves(error.args[0] if isinstance(error, Terminated) else signal.SIGINT)
                return
            known = PeerLost("another process of the run is gone")
        if isinstance(error, PeerLost) and (number := self._left_for()) and not self.lost():
            self.leaves(number)
            raise raised_for(number) from error
        if isinstance(known, (ParityError, NonFiniteError)):  # raised on all ranks alike
            known.reported = self._own.rank != 0
        elif isinstance(known, Exception):
            with handled_by(signal.SIG_IGN, [signal.SIGTERM]):  # sent by a launcher that finds a process dead
                self._tell(known)
        if known is not error:
            raise known from error

    def lost(self) -> bool:
        """Whether another process of this host died; one that left in order has removed its file."""
        return any(rank.state() == "gone" and self._path(rank).exists() for rank in self._beside)

    def _left_for(self) -> int:
        """The signal for which another rank has ended; 0 if none has."""
        try:
            return int((self._folder / SIGNAL_FILE).read_text())
        except (OSError, ValueError):
            return 0

    def _let_the_first_report(self) -> None:
        """Wait for the first rank, which may be writing the report: a launcher ends all once any process has left."""
        first, until = self._folder / "rank-0.txt", time.monotonic() + _REPORT
        while self._own.rank and first.exists() and not self.lost() and time.monotonic() < until:
            time.sleep(0.01)

    def _tell(self, error: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk
            self._file.write("".join(traceback.format_exception(error)))
            self._file.flush()
        if isinstance(error, LockstepError):
            message = self.told(str(error))
            error.args, error.reported = (message or str(error),), True
            if message:  # print now, since a launcher may end the process at any time from here on
                print(f"lockstep: failed: {message}{torchrun_follows()}", file=sys.stderr, flush=True)
        elif message := self.told(f"{type(error).__name__}: {error}"):
            more = ", and what torchrun says of it" if by_torchrun() else ""
            print(f"lockstep: failed: {message}\n(its traceback follows{more})", file=sys.stderr, flush=True)

    def told(self, message: str) -> str:
        """`message` with what is known of the fault, for this rank to report; empty if another rank has reported it.
        Before returning, all ranks of this host have been made to write their stacks."""
        wrong = [f"{rank} is {state}" for rank in self._beside if (state := rank.state())]
        by = f"told by {self._own}; the stacks of all ranks are in {self._folder}"
        full = "\n".join([message, *wrong, by])
        try:
            with (self._folder / FAULT_FILE).open("x", encoding="utf-8") as file:
                file.write(full + "\n")
        except FileExistsError:
            full = ""
        except OSError:  # this host does not see the run's folder
            pass
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._ask_others()
        return full

    def _ask_others(self) -> None:
        """Make the other ranks of this host write their stacks. A stopped one is continued for that, and then ends."""
        asked = [rank for rank in self._beside if self._empty(rank)]
        for rank in asked:
            with contextlib.suppress(OSError):
                os.kill(rank.process, _ASK)
                os.kill(rank.process, signal.SIGCONT)
        until = time.monotonic() + _WAIT
        while (silent := [rank for rank in asked if self._empty(rank)]) and time.monotonic() < until:
            if all(rank.state() == "gone" for rank in silent):
                break
            time.sleep(0.01)
        for rank in silent:
            with contextlib.suppress(OSError):
                self._path(rank).write_text(f"{rank} {'is gone' if rank.state() else 'did not answer'}\n")

    def tidy(self) -> None:
        """Remove files that hold no information: all of them, if nothing failed."""
        known = [self._folder / FAULT_FILE, self._folder / SIGNAL_FILE]
        if self._own.rank == 0 and not any(file.exists() for file in known):
            shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._empty(self._own):
                self._path(self._own).unlink()
            if [*self._folder.iterdir()] == known[1:]:  # no rank is left to read it
                known[1].unlink()
            self._folder.rmdir()

    def _path(self, rank: _Rank) -> Path:
        return self._folder / f"rank-{rank.rank}.txt"

    def _empty(self, rank: _Rank) -> bool:
        try:
            return self._path(rank).stat().st_size == 0
        except OSError:
            return False
