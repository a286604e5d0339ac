"""Which checks of captured graphs have passed before, on this machine, with this code: a folder of small JSON files."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..ops.gate import driver_version

PACKAGE = Path(__file__).parent.parent


def cache_folder() -> Path:
    """`$LOCKSTEP_CACHE`, else `lockstep` under `$XDG_CACHE_HOME` or `~/.cache`."""
    if own := os.environ.get("LOCKSTEP_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep"


class Verdicts:
    """Passed checks by what they depend on. Only a folder that no one else may write is read, and nothing in it is
    executed; a file that cannot be read counts as absent."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or cache_folder()) / "verdicts"

    def passed(self, key: str) -> bool:
        """Whether this check is known to have passed."""
        if not self._private():
            return False
        try:
            return json.loads((self._folder / f"{key}.json").read_text("utf-8"))["key"] == key
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def add(self, key: str, about: Mapping[str, Any]) -> None:
        """Remember a check that passed; `about` is for readers. A folder that cannot be written is left alone."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._private():
                return
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": key, **about}, file)
            os.replace(name, self._folder / f"{key}.json")
        except OSError:
            return

    def _private(self) -> bool:
        """Whether the folder is the user's own and closed to others."""
        try:
            found = self._folder.stat()
        except OSError:
            return False
        return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077


def key(*parts: object) -> str:
    """What a check depends on: `parts`, the machine and the code of this package."""
    text = json.dumps([repr(part) for part in (*parts, _machine(), _sources())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _machine() -> tuple[str, ...]:
    """Software and hardware that a graph's bits may depend on."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else torch.backends.cpu.get_cpu_capability()
    return torch.__version__, triton, str(torch.version.cuda), driver_version(), gpu


@cache
def _sources() -> str:
    """A hash of every source file of the package: operators, models, and the check itself."""
    found = hashlib.sha256()
    for path in sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".c", ".h")):
        found.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
