"""The warm-up: the level that each program runs at, and what its launches do while graphs are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..timings import Timings
from .ir.captured import Level, can_record_without_launch
from .launch.launcher import GraphLauncher
from .torch_private.trace import import_tracer

if TYPE_CHECKING:
    from ..ops.precompile import MissingKernels

Launch = Callable[[GraphLauncher, Mapping[str, Tensor], int], dict[str, Tensor]]


class WarmUp:
    """The phase in which graphs are made for the expected shapes, and the level of programs during and after it.

    Args:
        levels: all levels, fastest first.
        first, later: the level of graphs that are made during and after the warm-up.
        records: a graph's first launch leaves something behind: a recording, or compiled kernels.

    Attributes:
        ended: the warm-up is over; see `Runtime.end_warm_up`.
        recompiles: graphs made after it, one per combination of statics and sizes, and compiled variants of layers.
        launch: how a call of a graph is carried out.
        kernels_loaded: the graphs' kernels are loaded, so a graph can be recorded without a launch before.
    """

    def __init__(self, levels: Sequence[Level], first: Level, later: Level, timings: Timings, records: bool) -> None:
        self._levels, self._first, self._later = levels, first, later
        self._timings, self.records = timings, records
        self._lowered: dict[str, Level] = {}
        self.ended, self.recompiles, self.kernels_loaded = False, 0, False
        self.launch: Launch = self._launch

    def level(self, name: str) -> Level:
        """The level of a graph of this program that is made now."""
        return self._lowered.get(name) or (self._later if self.ended else self._first)

    def lower(self, name: str) -> Level:
        """From now on run programs of this name one level further down. Returns that level."""
        self._lowered[name] = self._levels[self._levels.index(self.level(name)) + 1]
        return self._lowered[name]

    def graph_made(self) -> None:
        self.recompiles += self.ended

    @contextmanager
    def rehearsal(self, compiles: bool = True) -> Iterator[MissingKernels]:
        """Within, programs make their graphs but launch nothing (they return zeros), and no other Triton kernel is
        launched either; at the end the graphs' kernels have been compiled in parallel. Yields these kernels, for
        `preload`; unless `compiles`, they are only listed."""
        from ..ops.precompile import compile_only

        with self._timings.measure("compile"), compile_only(compiles) as kernels, self.launch_with(rehearse):
            with self._timings.measure("import_tracer"):  # on every rank at once
                import_tracer()
            yield kernels

    def make_graphs(self) -> AbstractContextManager[None]:
        """Within, programs make their graphs, and launch only those whose first launch leaves something behind. Others
        return zeros."""
        return self.launch_with(self._make)

    @contextmanager
    def launch_with(self, launch: Launch) -> Iterator[None]:
        """Within, calls of graphs are carried out by `launch`."""
        before, self.launch = self.launch, launch
        try:
            yield
        finally:
            self.launch = before

    def _launch(self, graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
        with self._timings.measure("record") if graph.records_next else nullcontext():
            return graph(user, times)

    def _make(self, graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
        without = not self.records or (self.kernels_loaded and can_record_without_launch(graph.captured))
        if not without or (blank := graph.zero_outputs()) is None:
            return self._launch(graph, user, times)
        if self.records:
            with self._timings.measure("record"):
                graph.record(blank)
        return blank

    def preload(self, kernels: Iterable[Any]) -> int:
        """Load kernels that a rehearsal in another process listed. Returns their number."""
        if not kernels:
            return 0
        from ..ops.precompile import preload

        with self._timings.measure("compile"):
            return preload(kernels)


def rehearse(graph: GraphLauncher, user: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """A `Launch` that launches nothing; see `GraphLauncher.rehearse`."""
    return graph.rehearse(user)
