"""Levels: how each program runs, and what its launches do while graphs are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..timings import Timings
from .ir.captured import Level, plain
from .launch.launcher import GraphLauncher
from .torch_private.trace import import_tracer

if TYPE_CHECKING:
    from ..ops.precompile import Kernels

Launch = Callable[[GraphLauncher, Mapping[str, Tensor], int], dict[str, Tensor]]


class WarmUp:
    """The time in which graphs are made, of the shapes that are to come, and how programs run then and after it.

    Args:
        levels: all that there are, from the fastest down.
        first, later: how graphs run that are made within, and after it.
        records: a graph's first launch leaves something behind: a recording, or compiled kernels.

    Attributes:
        ended: it is over; see `Runtime.end_warm_up`.
        late: graphs that were made since, each for a choice of statics and sizes, and layers' variants.
        launch: what is done with a graph that is called.
        loaded: kernels of the graphs to come are, so that these need no launch before they are recorded.
    """

    def __init__(self, levels: Sequence[Level], first: Level, later: Level, timings: Timings, records: bool) -> None:
        self._levels, self._first, self._later = levels, first, later
        self._timings, self.records = timings, records
        self._lowered: dict[str, Level] = {}
        self.ended, self.late, self.loaded = False, 0, False
        self.launch: Launch = self._launch

    def level(self, name: str) -> Level:
        """How a graph of this program runs that is made now."""
        return self._lowered.get(name) or (self._later if self.ended else self._first)

    def lower(self, name: str) -> Level:
        """From now on programs of this name run one level further down; returns that."""
        self._lowered[name] = self._levels[self._levels.index(self.level(name)) + 1]
        return self._lowered[name]

    def graph_made(self) -> None:
        self.late += self.ended

    @contextmanager
    def rehearsal(self, compiles: bool = True) -> Iterator[Kernels]:
        """Within, programs make their graphs and launch none (what they return is zero), nor is any other Triton
        kernel; by the end the kernels of those graphs are compiled, side by side. Yields these kernels, for
        `preload`; they are all that is made unless it `compiles`."""
        from ..ops.precompile import compiling_only

        with self._timings.measured("compile"), compiling_only(compiles) as kernels, self.launching(rehearse):
            with self._timings.measured("import_tracer"):  # on every rank at once
                import_tracer()
            yield kernels

    def making(self) -> AbstractContextManager[None]:
        """Within, programs make their graphs, and launch only those whose first launch leaves something behind. What
        others return is zero."""
        return self.launching(self._make)

    @contextmanager
    def launching(self, launch: Launch) -> Iterator[None]:
        """Within, that is done with graphs that are called."""
        before, self.launch = self.launch, launch
        try:
            yield
        finally:
            self.launch = before

    def _launch(self, graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
        with self._timings.measured("record") if graph.records_next else nullcontext():
            return graph(user, times)

    def _make(self, graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
        without = not self.records or (self.loaded and plain(graph.captured))
        if not without or (blank := graph.blank()) is None:
            return self._launch(graph, user, times)
        if self.records:
            with self._timings.measured("record"):
                graph.record(blank)
        return blank

    def preload(self, kernels: Iterable[Any]) -> int:
        """Load kernels that a rehearsal listed in another process; how many there were."""
        if not kernels:
            return 0
        from ..ops.precompile import preload

        with self._timings.measured("compile"):
            return preload(kernels)


def rehearse(graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """What is done with graphs while nothing is launched."""
    return graph.rehearse(user)
