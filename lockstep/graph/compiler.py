"""From functions to graphs: capture, passes and verifier once a key, then launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ..config import CompileConfig, resolve_compile
from ..config.compile import GRAPHS
from ..timings import Timings
from .capture.joint import capture_joint
from .capture.layers import LayerCompiler
from .capture.step import Differentiated, GraphBody, capture
from .function import GraphFunction
from .ir.captured import Captured, Dynamic, GraphError, Inputs, Level, Role, Static
from .ir.verify import NOT_GRAPH_SAFE, verify
from .launch.cudagraph import CudaRecorder, GraphRecorder
from .launch.piecewise import ATTENTION
from .passes import BACKWARD_PASS, common_digests, lacking, pipeline, run_passes
from .passes.compiled_subgraph import Regions
from .ranks import MakeGraph, Ranks, made_by_first
from .store.baked_constants import Constants, flattened
from .store.folder import Key, Store
from .torch_private import inductor as torch_inductor
from .torch_private import trace as torch_trace


class Compiler:
    """What both roles run their functions with: one configuration, one list of passes, one pool of CUDA graphs.

    Args:
        recorder: what makes CUDA graphs; by default the device's own.
        not_graph_safe: see `verify`.
        timings: where the time spent is added up.
        store: where graphs are kept between processes; None: nowhere.
        mesh: the sizes of the device mesh's dimensions, which graphs depend on.
        peers: the other processes that capture the same graphs, until the warm-up ends; None: there are none.
        regions: those that were compiled before, to be used again.

    Attributes:
        eager: no function is captured; each is called as it is.
        layers: calls a model's layers, where these are what is compiled.
        loaded: graphs that were not traced, as they were stored.
        captures: traces made so far, each for every value of a function's open sizes; or variants of layers.
        recompiles: graphs that were made after `end_warm_up`, each for a choice of statics and sizes.
        functions: what was made by `function`, to be captured.
        nothing_to_record: a graph's first launch is like any other.
        rehearsing, only_making: see `rehearsal` and `making`.
        timings: host seconds in `load_graphs`, `import_tracer`, `trace`, `passes`, `store_graphs`, `compile`
            (`rehearsal`), `record` (each graph's first launch) and `verify` (the comparison with eager, `trust`).
        nodes: for each trace its title with what each pass did to the number of nodes.
    """

    def __init__(
        self,
        config: CompileConfig,
        device: torch.device,
        *,
        recorder: GraphRecorder | None = None,
        not_graph_safe: Mapping[str, str] = NOT_GRAPH_SAFE,
        timings: Timings | None = None,
        store: Store | None = None,
        mesh: Mapping[str, int] | None = None,
        peers: Ranks | None = None,
        regions: Regions | None = None,
    ) -> None:
        config = resolve_compile(config, device.type == "cuda")
        assert config.cudagraph_mode is not None
        self.eager = config.capture not in GRAPHS
        backend: Literal["eager", "inductor"] = "inductor" if config.backend == "inductor" else "eager"
        self.layers = LayerCompiler(backend, self.layer_made) if config.capture == "layer" else None
        recorded = config.cudagraph_mode != "none"
        self.recorder = (recorder or CudaRecorder(device)) if recorded else None
        self._sharded = sharded = any(size > 1 for size in (mesh or {}).values())
        self.timings = timings or Timings()
        self.regions = regions if regions is not None else Regions(self.timings)
        self.compiled = config.inductor if backend == "inductor" and not self.eager else ()
        self.passes = pipeline(
            config.canonicalize,
            config.recompute,
            saved_gib=config.activation_memory_gib,
            resharded=sharded and config.reshard_after_forward,
            bucketed=sharded and config.bucket_collectives,
            reordered=sharded and config.reorder_collectives,
            compiled=self.compiled,
            regions=self.regions,
            fused=device.type == "cuda",
        )
        self.mode, self.joint = config.cudagraph_mode, config.capture == "joint"
        self.dump = Path(config.dump) if config.dump else None
        self.captures = self.recompiles = self.loaded = 0
        # A dump shows every pass, and regions are shared by graphs that are made together.
        self.store = None if self.dump or self.compiles_forward else store
        self.peers = peers
        self._settings = {
            "capture": config.capture,
            "backend": "inductor" if self.compiled else "eager",
            "mesh": dict(mesh or {}),
        }
        # The budget is for the bytes that were traced; the partitioner and Inductor weigh calls by their sizes.
        self._weighs_sizes = self.joint or config.activation_memory_gib > 0 or bool(self.compiled)
        self._not_graph_safe = not_graph_safe
        self.nothing_to_record = self.recorder is None and device.type == "cpu"
        self.rehearsing = self.only_making = self._warm = False
        self._lowered: dict[str, Level] = {}
        self.functions: list[GraphFunction] = []
        self.nodes: dict[str, tuple[str, ...]] = {}

    def function(
        self,
        name: str,
        body: GraphBody,
        inputs: Inputs,
        writes: Collection[Role] = (),
        dynamic: Dynamic | None = None,
        constants: Constants | None = None,
        lasting: Collection[str] = (),
    ) -> GraphFunction:
        """`body` as graphs bound to the static tensors of `inputs`; see `capture.step.capture` and `GraphFunction`.

        Args:
            constants: every Python value that the body takes from elsewhere than its arguments and that a trace bakes
                in, by name. None: unknown, and the graphs are not kept for other processes.
            lasting: names of small outputs that stay right while other graphs are launched; see `Outputs`.
        """
        return self.add(GraphFunction(self, name, body, inputs, writes, dynamic or {}, constants, lasting=lasting))

    def add(self, function: GraphFunction) -> GraphFunction:
        """Keep count of a function's graphs, and close them in the end."""
        if not self.eager:
            self.functions.append(function)
        return function

    @property
    def compiles(self) -> bool:
        """Whether anything is: functions, or layers."""
        return not self.eager or self.layers is not None

    def prepare(self, *models: nn.Module) -> None:
        """Have the models' layers compiled, where layers are what is."""
        for model in models if self.layers is not None else ():
            model.call_layer = self.layers  # type: ignore[assignment]

    def level(self, name: str) -> Level:
        """How a graph of this function runs that is made now. In mode `full_and_piecewise` shapes beyond the warmed-up
        ones are met in pieces."""
        if self.eager:
            return "eager"
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
            torch_trace.import_tracer()
        with self.timings.measured("trace"):
            if self.joint and isinstance(body, Differentiated):
                captured = capture_joint(name, body, inputs, statics=statics, writes=writes, dynamic=dynamic)
            else:
                captured = capture(name, body, inputs, statics=statics, writes=writes, dynamic=dynamic)
        return self._passed(captured)

    def _passed(self, captured: Captured) -> Captured:
        with self.timings.measured("passes"):
            captured = run_passes(captured, self.passes, self._verify)
        self.nodes[captured.title] = captured.log
        self._check_regions(captured)
        return captured

    def load(self, key: Key, title: str, device: torch.device) -> Captured | None:
        """A stored graph that is fit to be used, or None."""
        assert self.store is not None
        with self.timings.measured("load_graphs"):
            found = self.store.load(key, title, device)
            if found is not None:
                self._verify(found)
                self.loaded += 1
                self.nodes[found.title] = found.log
        return found

    def keep(self, key: Key, captured: Captured) -> None:
        """Store a graph for other processes."""
        assert self.store is not None
        with self.timings.measured("store_graphs"):
            self.store.save(key, captured)

    def made_once(self, title: str, described: Mapping[str, Any], device: torch.device, make: MakeGraph) -> Captured:
        """What `make` returns; of several processes the first calls it, and the others take what it made.

        Args:
            described: what the graph depends on, by name; it must be the same in every process.
        """
        if self.peers is None:
            return make()
        found = made_by_first(self.peers, title, described, device, make)
        if not self.peers.first:
            self._verify(found)
            self.loaded += 1
            self.nodes[found.title] = found.log
        return found

    def settings(self, constants: Constants, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What a graph depends on besides its function and the machine.

        Args:
            sizes: the values of its open sizes at the trace.
        """
        weighed = {"sizes": sizes} if self._weighs_sizes else {}
        machine = torch_inductor.settings() if self.compiled else {}
        return {**self._settings, **machine, **flattened({"constants": constants, **weighed})}

    def _check_regions(self, captured: Captured) -> None:
        """Refuse a model's forward pass in which other calls would be compiled than in the other graphs'."""
        if missing := lacking(captured, self.regions.shared):
            raise GraphError(
                f"{captured.title}: at these sizes the graph lacks compiled regions of the others "
                f"({', '.join(missing)}), so its log-probabilities could differ from theirs; set compile.inductor to "
                "backward"
            )

    @property
    def compiles_forward(self) -> bool:
        """Whether Inductor is to compile forward regions, in both roles alike."""
        return any(choice != BACKWARD_PASS for choice in self.compiled)

    def share_regions(self) -> bool:
        """Compile those forward regions that every trace of both roles has; whether there are any.

        Called when both have made their graphs. If there are any, all graphs are closed, and made with them when next
        needed.
        """
        if not self.compiles_forward:
            return False
        traces = [trace for function in self.functions for trace in function.traces]
        self.regions.shared = common_digests(traces, self.compiled)
        for function in self.functions if self.regions.shared else ():
            function.rewrite(self._passed)
        return bool(self.regions.shared)

    def lower(self, name: str) -> Level:
        """From now on every function of this name runs one level further down; returns that. Pieces are no level of
        sharded graphs, whose collectives may begin in one and end in another."""
        levels = [level for level in get_args(Level) if level != "piecewise" or not self._sharded]
        self._lowered[name] = levels[levels.index(self.level(name)) + 1]
        for function in self.functions:
            if function.name == name:
                function.close()
        return self._lowered[name]

    def retrace(self, name: str) -> bool:
        """Let go of the stored graphs of every function of this name, and capture anew from here on; whether there were
        any."""
        functions = [function for function in self.functions if function.name == name]
        had = any([function.retrace() for function in functions])
        if self.peers is not None:
            had = self.peers.gather(had)[0]  # the first has the store
        for function in functions if had else ():
            function.forget_made()
            function.close()
        return had

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

    def layer_made(self) -> None:
        """Count a new variant of a layer."""
        self.captures += 1
        self.recompiles += self._warm

    @contextmanager
    def rehearsal(self) -> Iterator[list[Any]]:
        """Within, functions make their graphs and launch none (what they return is zero), and by the end the kernels of
        those graphs are compiled, side by side; launches of any other Triton kernel are left out too. Yields what is
        then a list of these kernels, for `preload`."""
        from ..ops.precompile import compiling_only

        with self.timings.measured("compile"), compiling_only() as kernels:
            self.rehearsing = True
            try:
                yield kernels
            finally:
                self.rehearsing = False

    @contextmanager
    def making(self) -> Iterator[None]:
        """Within, functions make their graphs, and launch only those whose first launch leaves something behind: a
        recording, or compiled kernels. What others return is zero."""
        self.only_making = self.nothing_to_record
        try:
            yield
        finally:
            self.only_making = False

    def preload(self, kernels: Iterable[Any]) -> int:
        """Load kernels that a rehearsal listed in another process; how many there were."""
        if not kernels:
            return 0
        from ..ops.precompile import preload

        with self.timings.measured("compile"):
            return preload(kernels)

    def end_warm_up(self) -> None:
        """From here on a new graph counts as a recompile; what only a check needs is let go of."""
        self._warm = True
        self.peers = None  # what is made late is made where it is needed
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
