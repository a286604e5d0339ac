"""The file that a run leaves in its folder if its process ends without a message: a kill, a C crash, or `os._exit`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

CRASH_FILE = "crash.txt"

_EXPLANATION = """Process {process} ended without a word: this file is removed when a run ends in any other way.

Either something killed it (SIGKILL, or the system when memory ran out), or a reward function ended it (`os._exit`), or
code in C crashed; then Python's stack follows. `--task.reward-workers 1` keeps rewards in a process of their own, whose
end costs one call and not the run. `lockstep report` makes the report of the steps that were done.

"""


@contextlib.contextmanager
def dump_stacks_on_crash(file: IO[str]) -> Iterator[None]:
    """A context in which a crash in C code writes Python's stack to `file`."""
    before = faulthandler.is_enabled()
    faulthandler.enable(file)
    try:
        yield
    finally:
        faulthandler.disable()
        if before:
            with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error may have no descriptor
                faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]


@contextlib.contextmanager
def crash_note(run_dir: Path, has_begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A context in which `run_dir` has a file that explains an abrupt end of this process; leaving it removes the file.
    Unless `has_begun()` by then, an earlier process's file is put back."""
    path, earlier, file = run_dir / CRASH_FILE, None, None

    def remove(begun: bool) -> None:
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
            if earlier is None or begun:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(earlier)

    try:
        earlier = path.read_bytes() if path.exists() else None
        run_dir.mkdir(parents=True, exist_ok=True)
        file = path.open("w", encoding="utf-8")
        file.write(_EXPLANATION.format(process=os.getpid()))
        file.flush()
    except OSError:  # the run itself will report that it cannot write there
        with contextlib.suppress(OSError):
            remove(begun=False)
        yield
        return
    try:
        with dump_stacks_on_crash(file):
            yield
    finally:
        remove(has_begun())
