"""Sizes and hashes of files, or of samples of large ones. Hashing releases the GIL, so files are hashed in parallel."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`size` and `sha256` of the named files of a folder, by name. `OSError`: one of them cannot be read."""
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: _hash_file(folder / name), names), strict=True))


def _hash_file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return {"size": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


WHOLE, SAMPLES, SAMPLE = 1 << 24, 64, 1 << 12  # bytes hashed whole; else number and bytes of samples


def sampled_hash(path: Path) -> str:
    """The size and a hash of a file, as text; a large file is hashed in samples. If it cannot be read, why not."""
    try:
        with path.open("rb") as file:
            size, found = os.fstat(file.fileno()).st_size, hashlib.blake2b(digest_size=6)
            large = size > WHOLE
            for i in range(SAMPLES if large else 1):
                file.seek(i * (size - SAMPLE) // (SAMPLES - 1) if large else 0)
                found.update(file.read(SAMPLE if large else size))
    except OSError as error:
        return error.strerror or "cannot be read"
    return f"{size:,} bytes, {found.hexdigest()}"
