"""Several processes that need the same graphs: the first captures, the others take what it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..distributed import World
from .ir.captured import Captured
from .store.artifact import dumps, loads

MakeGraph = Callable[[], Captured]


def made_by_first(
    peers: World, title: str, described: Mapping[str, Any], device: torch.device, make: MakeGraph
) -> Captured:
    """The graph that `make` returns in the first process, in every process on its own device.

    A graph holds nothing of a process: groups of processes go by names that each has bound to its own.

    Raises:
        InputError: `described` is not the same in every process.
    """
    peers.same(f"the graph {title}", dict(described))
    made: list[Captured] = []

    def stored() -> bytes:
        made.append(make())
        return dumps(made[0])

    data = peers.from_first(stored)
    return made[0] if made else loads(data, device)
