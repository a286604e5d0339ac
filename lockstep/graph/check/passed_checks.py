"""Which checks of captured graphs have passed before, on this machine, with this code: a folder of small JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...cache import user_folder

MOST = 4096  # that are kept


class PassedChecks:
    """Passed checks by what they depend on, a file each (`cache.user_folder`)."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (folder or user_folder.cache_folder()) / "verdicts"

    def passed(self, key: str) -> bool:
        found = user_folder.read(self._folder / f"{key}.json")
        return isinstance(found, dict) and found.get("key") == key

    def add(self, key: str, about: Mapping[str, Any]) -> None:
        user_folder.write(self._folder / f"{key}.json", {"key": key, **about}, keep=MOST)
