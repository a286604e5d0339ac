"""A device computation: a function of named tensors that runs eagerly or as captured graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from torch import Tensor, no_grad

from ..types import CoalescedTensors
from .builder import GraphBuilder, GraphCache
from .capture.request import Request
from .capture.step import GraphBody
from .ir.captured import Captured, Dynamic, Inputs, Level, Role, Static
from .launch.cudagraph import CudaRecorder
from .launch.launcher import GraphLauncher
from .store.baked_constants import Constants
from .warm_up import WarmUp, rehearse

_shape = attrgetter("shape")


@dataclass(frozen=True)
class Toolchain:
    """What programs are made and launched with. `launches`, `replays`: counts of closed graphs, by program."""

    builder: GraphBuilder
    warm_up: WarmUp
    recorder: CudaRecorder | None
    programs: list[Program] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, repr=False)
class Program:
    """A function of named tensors, run at the level that the runtime chose: eagerly, or as graphs, one per combination
    of statics and user shapes. Graphs that differ only in the values of open sizes share one trace.

    Attributes:
        body, inputs: the function, and the static tensors that it is bound to.
        writes, dynamic: see `capture`. constants: see `Request`.
        cache: the traces, shared with programs of the same function on other tensors (`bind_to`).
        lasting: names of small outputs that stay valid while other graphs are launched; see `Outputs`.
        one_shape: no second shape is expected, so the first is traced with fixed sizes, in half the time.
    """

    tools: Toolchain
    name: str
    body: GraphBody
    inputs: Inputs
    writes: Collection[Role] = ()
    dynamic: Dynamic = field(default_factory=dict)
    constants: Constants | None = None
    cache: GraphCache = field(default_factory=GraphCache)
    lasting: Collection[str] = ()
    one_shape: bool = False
    graphs: dict[tuple, GraphLauncher] = field(default_factory=dict)
    _by_layout: dict[tuple, GraphLauncher] = field(
        default_factory=dict
    )  # `graphs` by statics and layout of the tensors

    def __post_init__(self) -> None:
        assert not self.inputs.user, "user inputs come with each call"
        if self.tools.warm_up.level(self.name) != "eager":
            self.tools.programs.append(self)

    @property
    def level(self) -> Level:
        """The level of a graph that is made now."""
        return self.tools.warm_up.level(self.name)

    def __call__(
        self, user: Mapping[str, Tensor] | None = None, *, times: int = 1, **statics: Static
    ) -> dict[str, Tensor]:
        """Launch `times` times, capturing a graph first if needed. For the outputs' lifetime see `GraphLauncher`."""
        user, warm_up = user or {}, self.tools.warm_up
        if warm_up.level(self.name) != "eager":
            return warm_up.launch(self.graph(user, statics), user, times)
        assert warm_up.launch is not rehearse, f"{self.name} has no graph to rehearse"
        inputs = replace(self.inputs, user=user)
        with no_grad():
            for _ in range(times):
                outputs = self.body(inputs, **statics)
        return dict(outputs)

    def graph(self, user: Mapping[str, Tensor], statics: Mapping[str, Static]) -> GraphLauncher:
        if not isinstance(user, CoalescedTensors) or self.tools.builder.own_part is not None:
            return self._graph(user, statics)
        known = (*map(repr, statics.items()), user.layout)  # 1, 1.0 and True are equal, but make different graphs
        if known not in self._by_layout:
            self._by_layout[known] = self._graph(user, statics)
        return self._by_layout[known]

    def _graph(self, user: Mapping[str, Tensor], statics: Mapping[str, Static]) -> GraphLauncher:
        key = (*map(repr, statics.items()), *user, *map(_shape, user.values()))
        if key not in self.graphs:
            self.tools.warm_up.graph_made()
            inputs = replace(self.inputs, user=user)
            captured = self._captured(inputs, statics)
            made = GraphLauncher(captured, inputs, self.tools.recorder, self.lasting)
            if self.tools.builder.own_part is not None:  # it is bound once every process has it
                return made
            self.graphs[key] = made
        return self.graphs[key]

    def bind_to(self, inputs: Inputs) -> Program:
        """The same function on other static tensors. The programs share traces where only open sizes differ."""
        return replace(self, inputs=inputs, one_shape=False, graphs={}, _by_layout={})

    def request(self, inputs: Inputs, statics: Mapping[str, Static]) -> Request:
        return Request(self.name, self.body, inputs, statics, self.writes, self.dynamic, self.constants)

    def _captured(self, inputs: Inputs, statics: Mapping[str, Static]) -> Captured:
        """A graph that is valid for these inputs; with fixed sizes if they break a condition on its open sizes."""
        builder, wanted = self.tools.builder, self.request(inputs, statics)
        fixed = replace(wanted, dynamic={})
        keys, given = {key for key, _ in self.cache.ready}, tuple(map(repr, statics.items()))
        known = any(key[: len(given)] == given for key in keys)
        one_shape = self.one_shape and not builder.backend.shared  # shared regions need open sizes in both roles
        if fixed.key in keys or (one_shape and not known):
            return builder.graph(fixed, self.level, self.cache)
        found = builder.graph(wanted, self.level, self.cache)
        return builder.graph(fixed, self.level, self.cache) if found.sizes.broken_conditions(wanted.sizes) else found

    def forget_stages(self) -> None:
        """See `GraphCache.forget_stages`."""
        for graph in self.graphs.values():
            graph.captured = replace(graph.captured, before=None)

    def close(self) -> None:
        """Close the graphs. A later call makes new ones."""
        for graph in self.graphs.values():
            self.tools.launches[self.name] += graph.launches
            self.tools.replays[self.name] += graph.replays
            graph.close()
        self.graphs.clear()
        self._by_layout.clear()

    def drop(self) -> None:
        """Close the graphs for good: the runtime keeps no reference to this program or its tensors."""
        self.close()
        if self in self.tools.programs:
            self.tools.programs.remove(self)
