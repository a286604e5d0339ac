"""Where the verdicts of `gate.py` are kept: a file of the user's own, which nobody else can have written."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

Outcome = Literal["kept", "replaced", "broken"]


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/lockstep`, or `~/.cache/lockstep` (XDG Base Directory Specification)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "lockstep"


class Store:
    """Outcomes by shape for one fingerprint: `gate-<fingerprint>.json` in a folder that is the user's alone.

    A folder or file that others could have written, or that does not parse, counts as empty. Failing to write is no
    error: the next run checks again.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._path = folder, folder / f"gate-{key[:32]}.json"

    def load(self) -> dict[str, Outcome]:
        """What is known."""
        try:
            if not (_private(self._folder) and _private(self._path)):
                return {}
            raw: Any = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        valid = isinstance(raw, dict) and all(outcome in get_args(Outcome) for outcome in raw.values())
        return raw if valid else {}

    def save(self, outcomes: dict[str, Outcome]) -> None:
        """Replace the file in one step."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _private(self._folder):
                return
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=self._path.name)  # mode 0600
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(outcomes, file, indent=1, sort_keys=True)
                os.replace(name, self._path)
            except BaseException:
                os.unlink(name)
                raise


def _private(path: Path) -> bool:
    """Whether it is this user's, and nobody else can write to it."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
