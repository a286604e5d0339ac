"""Several processes. One process needs none of this, and so far one process is what a run has."""

from __future__ import annotations

import os

from ..errors import InputError


def require_single_process() -> None:
    """Refuse a launch under `torchrun` with several ranks, which would train as many unrelated copies."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise InputError(f"WORLD_SIZE is {world}: this version trains in one process; start it without torchrun")
