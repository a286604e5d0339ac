"""The lock that keeps a run folder to one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError

LOCK_FILE = ".lock"  # names the lock's holder; the file that a killed process leaves behind locks nothing

_log = logging.getLogger("lockstep")
_open_lock_files: set[int] = set()  # descriptors of this process's lock files, which a forked child closes


def _close_in_forked_child() -> None:
    while _open_lock_files:
        os.close(_open_lock_files.pop())


os.register_at_fork(after_in_child=_close_in_forked_child)


@contextlib.contextmanager
def lock_run_folder(run_dir: Path) -> Iterator[None]:
    """A context in which no other process can hold this folder. The lock is the kernel's (`flock`) and ends with the
    process, even if forked children live on. Raises `InputError` if another process, which it names, holds the folder,
    or the folder cannot be written."""
    path = run_dir / LOCK_FILE
    file = _open_locked(path)
    _open_lock_files.add(file)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock is held, though the file does not name the holder
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {platform.node()}".encode())
        yield
    finally:
        if file in _open_lock_files:  # not in a forked child
            with contextlib.suppress(OSError):
                path.unlink()  # before the lock is released, so that nobody locks the deleted file
            _open_lock_files.remove(file)
            with contextlib.suppress(OSError):  # other code may have closed all files
                os.close(file)


def _open_locked(path: Path) -> int:
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"{path.parent} cannot be written: {error}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            holder = os.read(file, 200).decode(errors="replace") or "another process"
            os.close(file)
            raise InputError(
                f"{path.parent} is in use: {holder} is training in it; wait until that has ended, or stop it"
            ) from None
        except OSError as error:
            _log.warning("%s cannot be locked (%s): nothing keeps a second process out of it", path.parent, error)
            return file
        os.close(file)  # its holder deleted it meanwhile
