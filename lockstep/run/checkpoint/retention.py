"""Which checkpoints a run has and which are kept."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def prune(folder: Path, step: int, keep_last: int) -> None:
    """Delete all checkpoints but the `keep_last` newest of those up to `step`, and what killed processes left."""
    kept = [other for other in steps(folder) if other <= step][-keep_last:]
    for other in steps(folder):
        if other not in kept:
            retire(folder / f"step_{other}")
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def retire(path: Path) -> None:
    """Hide a checkpoint by a single rename, for `prune` to delete; a half-deleted one would look damaged."""
    aside = path.parent / f".tmp-old-{path.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)


def steps(folder: Path) -> list[int]:
    """The steps with a checkpoint in `folder`, complete or damaged, in order."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)
