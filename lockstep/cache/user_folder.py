"""Files that are kept between runs, in a folder of the user's own, which nobody else can have written.

What others could have written counts as absent, and so does JSON that does not parse; failing to write is no error,
but said once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

_log = logging.getLogger("lockstep")
_unwritable: set[Path] = set()  # caches that a warning was given for


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` under `$XDG_CACHE_HOME` or `~/.cache` (XDG Base Directory Specification); of a
    user without a home, as in a container that has no name for its user, `lockstep-UID` in the temporary folder."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    root = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(root):
        return Path(root) / "lockstep"
    try:
        return Path.home() / ".cache" / "lockstep"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"


def read(path: Path) -> Any:
    """The JSON that `write` put there, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(read_bytes(path) or b"null")
    return None


def write(path: Path, value: Any, keep: int | None = None) -> bool:
    """Replace the file by JSON; see `write_bytes`. Its folder then has at most `keep` files: beyond that the oldest go,
    and with them an eighth, as looking at all their times takes a while."""
    written = write_bytes(path, json.dumps(value, indent=1, sort_keys=True).encode())
    with contextlib.suppress(OSError):
        if written and keep is not None and len(os.listdir(path.parent)) > keep:
            for old in newest(path.parent)[keep - keep // 8 :]:
                with contextlib.suppress(OSError):
                    old.unlink()
    return written


def newest(folder: Path, pattern: str = "*") -> list[Path]:
    """The folder's files, the last written or used first; none of a folder that cannot be read."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may delete it
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def read_bytes(path: Path) -> bytes | None:
    """What `write_bytes` put there, or None."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if not foreign(path.parent.stat()) and not foreign(os.fstat(file.fileno())):
            return file.read()
    return None


def write_bytes(path: Path, data: bytes) -> bool:
    """Replace the file in one step, whoever else does so, too; its folder is made when missing. Whether it worked."""
    try:
        _make(path.parent)
        if why := foreign(path.parent.stat()):
            raise PermissionError(f"{path.parent}: {why}")
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        _warn(cache_folder(), error)
        return False
    return True


def _warn(root: Path, error: OSError) -> None:
    """Say that nothing is kept, once a process: it costs time at every start, and nothing else."""
    if root not in _unwritable:
        _unwritable.add(root)
        _log.warning(
            "the cache %s cannot be written (%s), so every start makes graphs, kernels and checks anew; set "
            "LOCKSTEP_CACHE to a folder of your own",
            *(root, error),
        )


def _make(folder: Path) -> None:
    """Make a folder for this user alone, and what is missing of those above it alike: `mkdir` has the umask decide for
    these, which may let others write to them."""
    if not folder.exists():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def foreign(status: os.stat_result) -> str | None:
    """Why a file or folder may hold what somebody else wrote, or None."""
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
