"""Small JSON files that are kept between runs, in a folder of the user's own, which nobody else can have written.

Nothing in it is executed. What others could have written, or what does not parse, counts as absent; failing to write is
no error.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` under `$XDG_CACHE_HOME` or `~/.cache` (XDG Base Directory Specification)."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "lockstep"


def read(path: Path) -> Any:
    """What `write` put there, or None."""
    with contextlib.suppress(OSError, ValueError):
        if _private(path.parent) and _private(path):
            return json.loads(path.read_text(encoding="utf-8"))
    return None


def write(path: Path, value: Any) -> None:
    """Replace the file in one step; its folder is made when missing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(path.parent):
            return
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1, sort_keys=True)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _private(path: Path) -> bool:
    """Whether it is this user's, and nobody else can write to it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
