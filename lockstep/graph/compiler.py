"""From functions to graphs: capture, passes and verifier once a key, then launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..config import CompileConfig, resolve_compile
from ..timings import Timings
from . import compat
from .bound import BoundGraph
from .capture import GraphBody, capture
from .cudagraph import CudaRecorder, Recorder
from .ir import Captured, Dynamic, Inputs, Role, Static
from .passes import pipeline, run_passes
from .piecewise import ATTENTION
from .text import write_stages
from .verify import NOT_GRAPH_SAFE, verify

Level = Literal["full", "piecewise", "captured", "eager"]  # how a function runs, from the fastest down


class Compiler:
    """What both roles compile with: one configuration, one list of passes, one pool of CUDA graphs.

    Args:
        recorder: what makes CUDA graphs; by default the device's own.
        not_graph_safe: see `verify`.
        timings: where the time spent is added up.

    Attributes:
        captures: traces made so far. One serves every value of a function's open sizes.
        recompiles: graphs that were made after `end_warm_up`, each for a choice of statics and sizes.
        functions: what was made by `function`.
        rehearsing: see `rehearsal`.
        timings: host seconds in `import_tracer`, `trace`, `passes`, `compile` (`rehearsal`), `record` (each graph's
            first launch) and `verify` (the comparison with eager, `trust`).
        nodes: for each trace its title with what each pass did to the number of nodes.
    """

    def __init__(
        self,
        config: CompileConfig,
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        not_graph_safe: Mapping[str, str] = NOT_GRAPH_SAFE,
        timings: Timings | None = None,
    ) -> None:
        config = resolve_compile(config, device.type == "cuda")
        assert config.cudagraph_mode is not None
        recorded = config.cudagraph_mode != "none"
        self.recorder = (recorder or CudaRecorder(device)) if recorded else None
        self.passes = pipeline(config.canonicalize, config.recompute, saved_gib=config.activation_memory_gib)
        self.mode = config.cudagraph_mode
        self.dump = Path(config.dump) if config.dump else None
        self.captures = self.recompiles = 0
        self._not_graph_safe = not_graph_safe
        self.rehearsing = self._warm = False
        self._lowered: dict[str, Level] = {}
        self.functions: list[GraphFunction] = []
        self.timings = timings or Timings()
        self.nodes: dict[str, tuple[str, ...]] = {}

    def function(
        self,
        name: str,
        body: GraphBody,
        inputs: Inputs,
        writes: Collection[Role] = (),
        dynamic: Dynamic | None = None,
    ) -> GraphFunction:
        """`body` as graphs bound to the static tensors of `inputs`; see `capture.capture` and `GraphFunction`."""
        return self.add(GraphFunction(self, name, body, inputs, writes, dynamic or {}))

    def add(self, function: GraphFunction) -> GraphFunction:
        """Keep count of a function's graphs, and close them in the end."""
        self.functions.append(function)
        return function

    def level(self, name: str) -> Level:
        """How a graph of this function runs that is made now. In mode `full_and_piecewise` shapes beyond the warmed-up
        ones are met in pieces."""
        if name in self._lowered:
            return self._lowered[name]
        if self.mode == "full_and_piecewise":
            return "piecewise" if self._warm else "full"
        return "captured" if self.mode == "none" else self.mode

    def capture(
        self,
        name: str,
        body: GraphBody,
        inputs: Inputs,
        statics: Mapping[str, Static],
        writes: Collection[Role],
        dynamic: Dynamic,
    ) -> Captured:
        """Trace, rewrite and verify."""
        self.captures += 1
        with self.timings.measured("import_tracer"):
            compat.import_tracer()
        with self.timings.measured("trace"):
            captured = capture(name, body, inputs, statics=statics, writes=writes, dynamic=dynamic)
        with self.timings.measured("passes"):
            captured = run_passes(captured, self.passes, self._verify)
        self.nodes[captured.title] = captured.log
        return captured

    def lower(self, name: str) -> Level:
        """From now on every function of this name runs one level further down; returns that."""
        levels = get_args(Level)
        self._lowered[name] = levels[levels.index(self.level(name)) + 1]
        for function in self.functions:
            if function.name == name:
                function.close()
        return self._lowered[name]

    def recorded(self, captured: Captured, level: Level) -> Captured:
        """What `capture` returned, made ready to run at `level`."""
        wanted = level in ("full", "piecewise")
        passes = pipeline(False, recorded=wanted, split_at=ATTENTION if level == "piecewise" else ())
        with self.timings.measured("passes"):
            return run_passes(captured, passes, lambda c: self._verify(c) if c.recorded else c)

    def _verify(self, captured: Captured) -> Captured:
        return verify(captured, self._not_graph_safe)

    def graph_made(self) -> None:
        """Count a new graph."""
        self.recompiles += self._warm

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within, functions make their graphs and launch none (what they return is zero), and by the end the kernels of
        those graphs are compiled, side by side; launches of any other Triton kernel are left out too."""
        from ..ops.kernels.precompile import compiling_only

        with self.timings.measured("compile"), compiling_only():
            self.rehearsing = True
            try:
                yield
            finally:
                self.rehearsing = False

    def end_warm_up(self) -> None:
        """From here on a new graph counts as a recompile; what only a check needs is let go of."""
        self._warm = True
        for function in self.functions:
            function.forget_stages()

    @property
    def launches(self) -> Counter[str]:
        """Runs of each function so far."""
        return self._count("launches")

    @property
    def replays(self) -> Counter[str]:
        """Those of them that replayed a CUDA graph."""
        return self._count("replays")

    def _count(self, what: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for function in self.functions:
            for graph in function.graphs.values():
                total[function.name] += getattr(graph, what)
        return total

    def close(self) -> None:
        """Close every graph, then the pool. Do so before a process group is destroyed."""
        for function in self.functions:
            function.close()
        if self.recorder is not None:
            self.recorder.close()


class GraphFunction:
    """A function of named tensors that runs as graphs: one for each combination of statics and user shapes.

    A graph for other values of open sizes is bound to the trace that there is.

    Args:
        traces: what was traced before, shared with the function that this one is `bound_to` other tensors.

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
        traces: dict[tuple, Captured] | None = None,
    ) -> None:
        assert not inputs.user, "user inputs come with each call"
        self.name = name
        self.graphs: dict[tuple, BoundGraph] = {}
        self.body, self.inputs = body, inputs
        self._compiler, self._writes, self._dynamic = compiler, writes, dynamic
        self._traces = {} if traces is None else traces
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
        if graph.launches:
            return graph(user, times)
        with self._compiler.timings.measured("record"):
            return graph(user, times)

    def graph(self, user: Mapping[str, Tensor], statics: Mapping[str, Static]) -> BoundGraph:
        """The graph for such inputs, made if the key is new."""
        key = (*statics.items(), *((name, tensor.shape) for name, tensor in user.items()))
        if key not in self.graphs:
            self._compiler.graph_made()
            inputs = replace(self.inputs, user=user)
            self.graphs[key] = BoundGraph(self._captured(inputs, statics), inputs, self._compiler.recorder)
        return self.graphs[key]

    def _eager(self, user: Mapping[str, Tensor], times: int, statics: Mapping[str, Static]) -> dict[str, Tensor]:
        assert not self._compiler.rehearsing, f"{self.name} has no graph to rehearse"
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(times):
                outputs = self.body(replace(self.inputs, user=user), **statics)
        return dict(outputs)

    def bound_to(self, inputs: Inputs) -> GraphFunction:
        """The same function of other static tensors. Traces serve both, where only open sizes differ."""
        arguments = self._compiler, self.name, self.body, inputs, self._writes, self._dynamic, self._traces
        return self._compiler.add(GraphFunction(*arguments))

    def _captured(self, inputs: Inputs, statics: Mapping[str, Static]) -> Captured:
        """A trace that holds for these inputs, made if there is none; with fixed sizes if an open one's does not."""
        given = tuple(statics.items())
        known = any(key[: len(given)] == given for key in self._traces)
        fixed = (*given, inputs.described({})) in self._traces or (self.one_shape and not known)
        dynamic: Dynamic = {} if fixed else self._dynamic
        while True:
            specs = inputs.described(dynamic)
            key = (*given, specs)
            if key not in self._traces:
                arguments = self.name, self.body, inputs, statics, self._writes, dynamic
                self._traces[key] = self._compiler.capture(*arguments)
            if not self._traces[key].sizes.broken(inputs.open_sizes(specs)):
                return self._at_level(key)
            dynamic = {}

    def _at_level(self, key: tuple) -> Captured:
        level = self._compiler.level(self.name)
        if (key, level) not in self._traces:
            self._traces[key, level] = made = self._compiler.recorded(self._traces[key], level)
            if self._compiler.dump is not None:
                write_stages(made, self._compiler.dump)
        return self._traces[key, level]

    def forget_stages(self) -> None:
        """Drop the graphs from before the passes: many small objects, which slow every garbage collection."""
        for key, captured in self._traces.items():
            self._traces[key] = replace(captured, before=None)
        for graph in self.graphs.values():
            graph.captured = replace(graph.captured, before=None)

    def close(self) -> None:
        """Close the graphs; a later call records anew."""
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()
