"""Makes graphs: loads stored ones, or captures, rewrites and verifies them; once for several processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from ..cache.fingerprint import is_modified, origin, recheck_code
from ..config import PASSES, RECORDINGS, CompileConfig, recordings
from ..distributed import World
from ..errors import InputError
from ..timings import Timings
from .capture.request import Request
from .ir.captured import Captured, Level
from .ir.text import write_stages
from .ir.verify import verify
from .passes import cudagraph_pass, pipeline, run_passes
from .passes.backend import Backend
from .store.artifact import dumps, loads
from .store.baked_constants import Constants, flatten
from .store.folder import Key, Store
from .store.key import body_name, key_of
from .torch_private import trace as torch_trace


def load_hook(hook: Any) -> Any:
    """Import a hook that a `config.Plugin` names as "module:name" (empty: None); anything else is the hook itself."""
    if not isinstance(hook, str):
        return hook
    return resolve_name(hook) if hook else None


def require_plugins(config: CompileConfig, device: torch.device) -> None:
    """Raise `InputError` when this machine lacks what the chosen backend needs, or a pass cannot be found."""
    backend: type[Backend] = load_hook(config.plugins[1].hook) or Backend
    if missing := backend.lacks(device):
        raise InputError(f"compile.backend is {config.backend}, which needs {missing} on this machine; use eager")
    pipeline(config)


# By (title, body, inputs and constants, level): graphs, each with whether it was loaded from the store.
PrebuiltGraphs = dict[tuple[str, str, Level], tuple[Captured, bool]]


@dataclass
class GraphCache:
    """The graphs of one function, whatever tensors it is bound to, by `Request.key`.

    Attributes:
        traces: traced by this process, after the passes that all levels share.
        ready: traced or loaded, and ready to launch, by (key, level).
        loaded: how many of `ready` were loaded from the store. retracing: do not load any more.
    """

    traces: dict[tuple, Captured] = field(default_factory=dict)
    ready: dict[tuple[tuple, Level], Captured] = field(default_factory=dict)
    loaded: int = 0
    retracing: bool = False

    def retrace(self) -> bool:
        """Load no more stored graphs. Returns whether any had been loaded."""
        had, self.loaded, self.retracing = self.loaded > 0, 0, True
        return had

    def forget_stages(self) -> None:
        """Drop the graphs from before each pass: many small objects, which slow every garbage collection."""
        for graphs in (self.traces, self.ready):
            for key, captured in graphs.items():
                graphs[key] = replace(captured, before=None)


@dataclass
class GraphBuilder:
    """Makes the graphs of both roles.

    Args:
        timings: accumulates host seconds of `load_graphs`, `import_tracer`, `trace`, `passes` and `store_graphs`.
        store: keeps graphs between processes; None: they are not kept.
        mesh: the sizes of the mesh axes with several ranks, which graphs depend on.
        peers: the processes that capture the same graphs, until the warm-up ends.

    Attributes:
        captures: traces made so far, each valid for every value of its open sizes; or compiled variants of layers.
        loaded: graphs that were loaded from the store instead of traced.
        logs: each graph's log of passes, by title.
        own_part: collects graphs while this process makes its own part (`parallel_build`), else None.
        prebuilt: graphs from all processes' parts that were not asked for yet.
    """

    config: CompileConfig
    device: torch.device
    timings: Timings
    store: Store | None
    mesh: Mapping[str, int]
    peers: World
    captures: int = 0
    loaded: int = 0
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    own_part: PrebuiltGraphs | None = None
    prebuilt: PrebuiltGraphs = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, (way, run) = self.config, self.config.plugins
        self._capture = load_hook(way.hook)
        self.backend: Backend = (load_hook(run.hook) or Backend)(config, self.device, self.timings)
        self.sharded = bool(self.mesh)
        self.passes = pipeline(config, self.sharded, self.device.type == "cuda") + self.backend.passes
        # No store: for a dump, which shows every pass; where regions are shared, as both roles' graphs must be made
        # together; and with plugins or passes from outside the package, as no hash covers their code.
        modes = [RECORDINGS[name] for name in recordings(config.cudagraph_mode or "none")]
        shipped = all(p.shipped for p in (way, run, *modes)) and set(config.pass_names) <= set(PASSES)
        if config.dump or self.backend.shared or not shipped:
            self.store = None
        self._by_sizes = way.by_sizes or run.by_sizes or config.activation_memory_gib > 0  # bytes at the traced sizes

    def graph(self, request: Request, level: Level, cache: GraphCache) -> Captured:
        """The graph at a level: made before, loaded from the store, or made now."""
        key = request.key
        if (key, level) in cache.ready:
            return cache.ready[key, level]
        stored = None
        if request.constants is not None:  # constants that no key can hold are refused even without a store
            settings = self.settings(request.constants, request.sizes)
            stored = key_of(request, level, settings, self.passes) if self.store is not None else None
        found = self._make_once(request, level, stored, cache)
        self.logs[found.title] = found.log
        if self.own_part is None:
            cache.ready[key, level] = found
        return found

    def _make_once(self, request: Request, level: Level, stored: Key | None, cache: GraphCache) -> Captured:
        """Rank 0 loads or makes the graph, and the others receive it, each on its own device: a graph holds no state of
        a process, and names process groups, which each process resolves to its own. `InputError`: the processes do not
        ask for the same graph."""

        constants = {f"constant {name}": value for name, value in flatten(request.constants or {}).items()}

        def about() -> dict[str, Any]:
            return {"level": level, "origin": origin(), **request.everywhere, **constants}

        self.peers.require_same(f"the graph {request.title}", about)
        if any(self.peers.gather(is_modified())):  # then stored graphs may differ from what some process runs
            stored = None
            self.prebuilt.clear()
        place = request.title, str((body_name(request.body), request.everywhere, constants)), level
        if self.own_part is not None and place in self.own_part:
            return self.own_part[place][0]
        if place in self.prebuilt:
            found, kept = self.prebuilt.pop(place)
            cache.loaded += kept
            return found
        before = cache.loaded
        with torch_trace.pause_garbage_collection():
            found = self.peers.broadcast_serialized(
                lambda: self._load(request, stored, cache) or self._make(request, level, stored, cache),
                dumps,
                lambda data: self.accept(loads(data, request.device)),
            )
        if self.own_part is not None:
            self.own_part[place], cache.loaded = (found, cache.loaded > before), before
        return found

    def accept(self, found: Captured, stored: bool = True) -> Captured:
        """Verify and count a graph that was loaded, or that another process made."""
        verify(found)
        self.loaded, self.captures = self.loaded + stored, self.captures + (not stored)
        return found

    def _load(self, request: Request, stored: Key | None, cache: GraphCache) -> Captured | None:
        if stored is None or self.store is None or request.key in cache.traces or cache.retracing:
            return None
        with self.timings.measure("load_graphs"):
            found = self.store.load(stored, request.title, request.device)
            if found is not None:
                cache.loaded += 1
                self.accept(found)
        return found

    def _make(self, request: Request, level: Level, stored: Key | None, cache: GraphCache) -> Captured:
        key = request.key
        if key not in cache.traces:
            cache.traces[key] = self.run_common_passes(self._trace(request))
        ready = self._at_level(level, cache.traces[key])
        if stored is not None and self.store is not None:
            with self.timings.measure("store_graphs"):
                recheck_code()  # code may have been replaced since
                if not is_modified():
                    self.store.save(stored, ready)
        if self.config.dump:
            write_stages(ready, Path(os.path.expanduser(self.config.dump)))
        return ready

    def _trace(self, request: Request) -> Captured:
        self.captures += 1
        with self.timings.measure("import_tracer"):
            torch_trace.import_tracer()
        with self.timings.measure("trace"):
            return self._capture(
                request.name,
                request.body,
                request.inputs,
                statics=request.statics,
                writes=request.writes,
                dynamic=request.dynamic,
            )

    def run_common_passes(self, captured: Captured) -> Captured:
        """A trace, rewritten by the passes that all levels share."""
        with self.timings.measure("passes"):
            captured = run_passes(captured, self.passes)
        self.backend.check(captured)
        return captured

    def rerun_passes(self, cache: GraphCache) -> None:
        """Run the passes again on every trace, from the graph as captured."""
        cache.ready.clear()
        for key, captured in cache.traces.items():
            (_, as_captured), *_ = captured.stages()
            cache.traces[key] = self.run_common_passes(as_captured)

    def _at_level(self, level: Level, captured: Captured) -> Captured:
        if level not in RECORDINGS:
            return captured
        with self.timings.measure("passes"):
            to_record = cudagraph_pass(load_hook(RECORDINGS[level].hook) or ())
            return run_passes(captured, [to_record], lambda c: verify(c) if c.recorded else c)

    def settings(self, constants: Constants, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What a graph depends on besides its function and the machine. `sizes`: values of open sizes at the trace."""
        c, by_sizes = self.config, {"sizes": sizes} if self._by_sizes else {}
        ways = {"capture": c.capture, "backend": c.backend_name, "mesh": dict(self.mesh)}
        return {**ways, **self.backend.settings(), **flatten({"constants": constants, **by_sizes})}
