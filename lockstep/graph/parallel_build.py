"""Several processes make different graphs in parallel, before all of them ask for every graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..cache.fingerprint import is_modified
from ..distributed import ONE_PROCESS
from .builder import PrebuiltGraphs
from .launch.launcher import GraphLauncher
from .runtime import Runtime
from .store.artifact import dumps, loads
from .warm_up import rehearse


class _NeedsLaunch(Exception):
    """What follows a launch depends on its results."""


def build_in_parallel(runtime: Runtime, parts: Sequence[Callable[[], None]]) -> bool:
    """Let rank i make the graphs that `parts[i]` calls, and send them to all ranks. Returns whether it did.

    Nothing is launched, and only graphs are exchanged: a part must not communicate. Graphs that were not made here (all
    of them, if a process runs other code than it imported) are made when all ranks ask for them together.
    """
    if runtime.eager or len(parts) == 1:
        return False
    peers, builder = runtime.peers, runtime.builder
    if peers.size == 1 or builder.backend.shared or builder.config.dump or any(peers.gather(is_modified())):
        return False
    made: PrebuiltGraphs = {}
    before = len(builder.store.lookups) if builder.store else 0

    def part() -> dict[Any, tuple[bytes, bool]]:
        with suppress(_NeedsLaunch):
            for make in parts[peers.rank : peers.rank + 1]:
                make()
        return {key: (dumps(graph), stored) for key, (graph, stored) in made.items()}

    builder.peers, builder.own_part = ONE_PROCESS, made
    try:
        with runtime.warm_up.launch_with(rehearse if runtime.warm_up.launch is rehearse else _blank):
            given = peers.run_on_all(part)
    finally:
        builder.peers, builder.own_part = peers, None
    builder.prebuilt = dict(made)
    looked = builder.store.lookups[before:] if builder.store else []
    others = [of_rank for rank, of_rank in enumerate(peers.gather((given, looked))) if rank != peers.rank]

    def take() -> None:
        for graphs, lookups in others:
            for key, (data, stored) in graphs.items():
                builder.prebuilt[key] = builder.accept(loads(data, runtime.device), stored), stored
            if builder.store:
                builder.store.lookups += lookups

    peers.run_on_all(take)
    return True


def _blank(graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    blank = graph.zero_outputs()
    if blank is None:
        raise _NeedsLaunch
    return blank
