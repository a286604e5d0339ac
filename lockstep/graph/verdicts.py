"""Which checks of captured graphs have passed before, on this machine, with this code: a folder of small JSON files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ops import user_cache
from ..ops.user_cache import cache_folder
from .origin import origin

MOST = 4096  # that are kept


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
        user_cache.write(self._folder / f"{key}.json", {"key": key, **about}, keep=MOST)


def key(*parts: object) -> str:
    """What a check depends on: `parts`, the machine and the code of this package."""
    text = json.dumps([repr(part) for part in (*parts, origin())])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
