"""A function of named tensors that runs as graphs: which of them a call launches, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache.fingerprint import origin
from ..types import SideBySide
from .capture.step import GraphBody
from .ir.captured import Captured, Dynamic, Inputs, InputSpec, Level, Role, Static, title_of
from .ir.text import write_stages
from .launch.launcher import GraphLauncher
from .store.baked_constants import Constants
from .store.folder import Key
from .store.key import key_of

if TYPE_CHECKING:
    from .compiler import Compiler

_shape = attrgetter("shape")


@dataclass
class _Known:
    """Graphs of one function, whatever tensors it is bound to, by statics and descriptions of the inputs.

    Attributes:
        traces: as they were traced here, after the passes. made: those, or stored ones, ready to run at a level.
        loaded: how many of `made` were stored. retracing: stored ones are not wanted.
    """

    traces: dict[tuple, Captured] = field(default_factory=dict)
    made: dict[tuple[tuple, Level], Captured] = field(default_factory=dict)
    loaded: int = 0
    retracing: bool = False


class GraphFunction:
    """A function of named tensors that runs as graphs: one for each combination of statics and user shapes.

    A graph for other values of open sizes is bound to the trace that there is.

    Args:
        constants, lasting: see `Compiler.function`.
        known: what was traced before, shared with the function that this one is `bound_to` other tensors.

    Attributes:
        graphs: those made so far, by key.
        body, inputs: the function, and the static tensors that it is bound to.
        one_shape: no second shape is expected, so the first is traced with fixed sizes, in half the time.
    """

    def __init__(
        self,
        compiler: Compiler,
        name: str,
        body: GraphBody,
        inputs: Inputs,
        writes: Collection[Role],
        dynamic: Dynamic,
        constants: Constants | None = None,
        known: _Known | None = None,
        lasting: Collection[str] = (),
    ) -> None:
        assert not inputs.user, "user inputs come with each call"
        self.name = name
        self.graphs: dict[tuple, GraphLauncher] = {}
        self._by_layout: dict[tuple, GraphLauncher] = {}  # the same, found without a look at each tensor
        self.body, self.inputs = body, inputs
        self._compiler, self._writes, self._dynamic = compiler, writes, dynamic
        self._constants, self._known, self._lasting = constants, known or _Known(), lasting
        self.one_shape = False

    def __call__(
        self, user: Mapping[str, Tensor] | None = None, *, times: int = 1, **statics: Static
    ) -> dict[str, Tensor]:
        """Launch `times` times, capturing first if the key is new. About the outputs' lifetime see `BoundGraph`."""
        user = user or {}
        if self._compiler.level(self.name) == "eager":
            return self._eager(user, times, statics)
        graph = self.graph(user, statics)
        if self._compiler.rehearsing:
            return graph.rehearse(user)
        if self._compiler.only_making and (blank := graph.blank()) is not None:
            return blank
        if graph.launches or self._compiler.nothing_to_record:
            return graph(user, times)
        with self._compiler.timings.measured("record"):
            return graph(user, times)

    def graph(self, user: Mapping[str, Tensor], statics: Mapping[str, Static]) -> GraphLauncher:
        """The graph for such inputs, made if the key is new."""
        if not isinstance(user, SideBySide):
            return self._graph(user, statics)
        known = (*statics.items(), user.layout)
        if known not in self._by_layout:
            self._by_layout[known] = self._graph(user, statics)
        return self._by_layout[known]

    def _graph(self, user: Mapping[str, Tensor], statics: Mapping[str, Static]) -> GraphLauncher:
        key = (*statics.items(), *user, *map(_shape, user.values()))
        if key not in self.graphs:
            self._compiler.graph_made()
            inputs = replace(self.inputs, user=user)
            self.graphs[key] = GraphLauncher(
                self._captured(inputs, statics), inputs, self._compiler.recorder, self._lasting
            )
        return self.graphs[key]

    def _eager(self, user: Mapping[str, Tensor], times: int, statics: Mapping[str, Static]) -> dict[str, Tensor]:
        assert not self._compiler.rehearsing, f"{self.name} has no graph to rehearse"
        inputs = replace(self.inputs, user=user)
        with torch.no_grad():
            for _ in range(times):
                outputs = self.body(inputs, **statics)
        return dict(outputs)

    def bound_to(self, inputs: Inputs) -> GraphFunction:
        """The same function of other static tensors. Traces serve both, where only open sizes differ."""
        arguments = self._compiler, self.name, self.body, inputs, self._writes, self._dynamic
        return self._compiler.add(GraphFunction(*arguments, self._constants, self._known, self._lasting))

    def _captured(self, inputs: Inputs, statics: Mapping[str, Static]) -> Captured:
        """A graph that holds for these inputs, made if there is none; with fixed sizes if an open one's does not."""
        given = tuple(statics.items())
        keys = {key for key, _ in self._known.made}
        known = any(key[: len(given)] == given for key in keys)
        one_shape = self.one_shape and not self._compiler.compiles_forward  # both roles' sizes are open, or neither's
        fixed = (*given, inputs.described({})) in keys or (one_shape and not known)
        dynamic: Dynamic = {} if fixed else self._dynamic
        while True:
            specs = inputs.described(dynamic)
            made = self._made((*given, specs), inputs, specs, statics, dynamic)
            if not made.sizes.broken(inputs.open_sizes(specs)):
                return made
            dynamic = {}

    def _made(
        self,
        key: tuple,
        inputs: Inputs,
        specs: Sequence[InputSpec],
        statics: Mapping[str, Static],
        dynamic: Dynamic,
    ) -> Captured:
        """The graph of a key at the level of now: as it was made before, as it was stored, or made."""
        level, compiler = self._compiler.level(self.name), self._compiler
        if (key, level) not in self._known.made:
            device = specs[0].device if specs else torch.device("cpu")
            title = title_of(self.name, statics)
            stored = self._stored_under(inputs, specs, statics, level)

            def make() -> Captured:
                return self._load(stored, key, title, device) or self._trace(
                    stored, key, inputs, statics, dynamic, level
                )

            about: dict[str, Any] = {"level": level, "writes": sorted(self._writes), "origin": origin()}
            about |= {str(spec): (spec.shape, spec.stride, spec.dtype) for spec in specs}
            self._known.made[key, level] = compiler.made_once(title, about, device, make)
        return self._known.made[key, level]

    def _load(self, stored: Key | None, key: tuple, title: str, device: torch.device) -> Captured | None:
        if stored is None or key in self._known.traces or self._known.retracing:
            return None
        found = self._compiler.load(stored, title, device)
        self._known.loaded += found is not None
        return found

    def _trace(
        self,
        stored: Key | None,
        key: tuple,
        inputs: Inputs,
        statics: Mapping[str, Static],
        dynamic: Dynamic,
        level: Level,
    ) -> Captured:
        compiler = self._compiler
        if key not in self._known.traces:
            arguments = self.name, self.body, inputs, statics, self._writes, dynamic
            self._known.traces[key] = compiler.capture(*arguments)
        made = compiler.recorded(self._known.traces[key], level)
        if stored is not None:
            compiler.keep(stored, made)
        if compiler.dump is not None:
            write_stages(made, compiler.dump)
        return made

    def _stored_under(
        self, inputs: Inputs, specs: Sequence[InputSpec], statics: Mapping[str, Static], level: Level
    ) -> Key | None:
        if self._compiler.store is None or self._constants is None:
            return None
        settings = self._compiler.settings(self._constants, inputs.open_sizes(specs))
        about = specs, statics, self._writes, level, settings, self._compiler.passes
        return key_of(self.name, self.body, inputs, *about)

    @property
    def level(self) -> Level:
        """How a graph of it runs that is made now."""
        return self._compiler.level(self.name)

    @property
    def traces(self) -> list[Captured]:
        """What was traced for this function and those of other tensors, after the passes that all levels share."""
        return list(self._known.traces.values())

    def rewrite(self, passed: Callable[[Captured], Captured]) -> None:
        """Close the graphs, and run the passes on every trace anew."""
        self.close()
        self.forget_made()
        for key, captured in self._known.traces.items():
            (_, as_captured), *_ = captured.stages()
            self._known.traces[key] = passed(as_captured)

    def retrace(self) -> bool:
        """Want no more stored graphs, for this function and those of other tensors; whether there were any."""
        had, self._known.loaded, self._known.retracing = self._known.loaded > 0, 0, True
        return had

    def forget_made(self) -> None:
        """Forget the graphs that were made of traces, or stored; the traces stay."""
        self._known.made.clear()

    def forget_stages(self) -> None:
        """Drop the graphs from before the passes: many small objects, which slow every garbage collection."""
        self._known.traces = {key: replace(captured, before=None) for key, captured in self._known.traces.items()}
        self._known.made = {key: replace(captured, before=None) for key, captured in self._known.made.items()}
        for graph in self.graphs.values():
            graph.captured = replace(graph.captured, before=None)

    def close(self) -> None:
        """Close the graphs; a later call records anew."""
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()
        self._by_layout.clear()
