"""Several processes that need the same graphs: the first captures, the others take what it made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from .ir.captured import Captured
from .store.artifact import dumps, loads

T = TypeVar("T")
MakeGraph = Callable[[], Captured]


class Ranks(Protocol):
    """The processes of a run, each of which calls the same of these methods in the same order."""

    @property
    def first(self) -> bool:
        """Whether this is the process that captures."""

    def gather(self, value: T) -> list[T]:
        """Every process's value, in every process."""

    def from_first(self, make: Callable[[], T]) -> T:
        """What the first process's `make` returns, or raises, in every process."""

    def same(self, what: str, described: dict[str, Any]) -> None:
        """Refuse, in every process, what is not the same in all, by its name."""


def made_by_first(
    peers: Ranks, title: str, described: Mapping[str, Any], device: torch.device, make: MakeGraph
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


def anywhere(peers: Ranks | None, here: bool) -> bool:
    """Whether it is so in any process."""
    return here if peers is None else any(peers.gather(here))
