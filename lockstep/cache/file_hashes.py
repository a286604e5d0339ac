"""Size and SHA-256 of files. Hashing releases the interpreter lock, so several go at the rate of the cores together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def fingerprints(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`size` and `sha256` of these files of a folder, by name; `OSError` for one that cannot be read."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: _fingerprint(folder / name), names), strict=True))


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return {"size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
