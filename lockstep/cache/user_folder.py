"""Files that are kept between runs, in a folder that only this user can write.

A file that somebody else could have written counts as absent, and so does invalid JSON. Failing to write is not an
error, but logged once.
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
_unwritable: set[Path] = set()  # cache folders that a warning was logged for


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` under `$XDG_CACHE_HOME` or `~/.cache` (XDG Base Directory Specification); for
    a user without a home, as in a container with an unnamed user, `lockstep-UID` in the temporary folder."""
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
    """The JSON value that `write` stored, or None."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(read_bytes(path) or b"null")
    return None


def write(path: Path, value: Any, keep: int | None = None) -> bool:
    """Replace the file by JSON; see `write_bytes`. If its folder then has more than `keep` files, the oldest are
    deleted down to 7/8 of `keep`, since reading all their times is slow and should be rare."""
    written = write_bytes(path, json.dumps(value, indent=1, sort_keys=True).encode())
    with contextlib.suppress(OSError):
        if written and keep is not None and len(os.listdir(path.parent)) > keep:
            for old in newest(path.parent)[keep - keep // 8 :]:
                with contextlib.suppress(OSError):
                    old.unlink()
    return written


def newest(folder: Path, pattern: str = "*") -> list[Path]:
    """The folder's files, most recently modified first; none if the folder cannot be read."""
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):  # another process may delete it
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def read_bytes(path: Path) -> bytes | None:
    """The bytes that `write_bytes` stored, or None."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if not untrusted_reason(path.parent.stat()) and not untrusted_reason(os.fstat(file.fileno())):
            return file.read()
    return None


def write_bytes(path: Path, data: bytes) -> bool:
    """Replace the file atomically, creating its folder if needed. Returns whether it worked."""
    try:
        _make_private(path.parent)
        if why := untrusted_reason(path.parent.stat()):
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
        _warn_once(cache_folder(), error)
        return False
    return True


def _warn_once(root: Path, error: OSError) -> None:
    """Warn once per process that nothing is kept, which only costs time at every start."""
    if root not in _unwritable:
        _unwritable.add(root)
        _log.warning(
            "the cache %s cannot be written (%s), so every start makes graphs, kernels and checks anew; set "
            "LOCKSTEP_CACHE to a folder of your own",
            *(root, error),
        )


def _make_private(folder: Path) -> None:
    """Create a folder, and missing parents, for this user alone: `mkdir(parents=True)` would leave the mode of parents
    to the umask, which may let others write."""
    if not folder.exists():
        _make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def untrusted_reason(status: os.stat_result) -> str | None:
    """Why somebody else may have written to a file or folder, or None."""
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None
