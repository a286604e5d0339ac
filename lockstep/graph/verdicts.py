"""Which checks of captured graphs have passed before, on this machine, with this code: a folder of small JSON files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..ops import user_cache
from ..ops.gate import driver_version
from ..ops.user_cache import cache_folder

PACKAGE = Path(__file__).parent.parent


class Verdicts:
    """Passed checks by what they depend on, a file each (`ops.user_cache`)."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or cache_folder()) / "verdicts"

    def passed(self, key: str) -> bool:
        """Whether this check is known to have passed."""
        found = user_cache.read(self._folder / f"{key}.json")
        return isinstance(found, dict) and found.get("key") == key

    def add(self, key: str, about: Mapping[str, Any]) -> None:
        """Remember a check that passed; `about` is for readers."""
        user_cache.write(self._folder / f"{key}.json", {"key": key, **about})


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
