"""The one way to compute on a device: makes programs, chooses the level that each runs at, and owns their graphs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ..cache.fingerprint import recheck_code
from ..config import RECORDINGS, CompileConfig, recordings, resolve_compile
from ..distributed import ONE_PROCESS, World
from ..timings import Timings
from .builder import GraphBuilder, GraphCache, load_hook
from .capture.step import GraphBody
from .ir.captured import Dynamic, Inputs, Level, Role
from .launch.cudagraph import CudaRecorder
from .program import Program, Toolchain
from .store.baked_constants import Constants
from .store.folder import Store
from .warm_up import WarmUp


@dataclass(eq=False, repr=False)
class Runtime:
    """What both roles compute with: one configuration, one list of passes, and one CUDA graph pool (or one per role).

    Attributes:
        recorder: records CUDA graphs; by default one is made for the device.
        kv_recorder: records those of programs with a KV cache, where the cache lies in the memory pool of `recorder`.
        store, mesh, peers: see `GraphBuilder`.
        timings: accumulates host seconds: those of `GraphBuilder`, `compile` (`WarmUp.rehearsal`), `record` (each
            graph's first launch) and `verify` (the comparison with eager, `check_against_eager`).
        eager: no program is captured; each is called as it is.
        layers: calls a model's layers where single layers are compiled, else None.
        programs: the programs with graphs, made by `program`.
    """

    config: CompileConfig
    device: torch.device
    recorder: CudaRecorder | None = None
    kv_recorder: CudaRecorder | None = None
    timings: Timings = field(default_factory=Timings)
    store: Store | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    peers: World = ONE_PROCESS

    def __post_init__(self) -> None:
        recheck_code()
        self.config = config = resolve_compile(self.config, self.device.type == "cuda")
        way, mode = config.plugins[0], config.cudagraph_mode
        assert mode is not None
        self.recorder = None if mode == "none" else self.recorder or CudaRecorder(self.device)
        self.builder = GraphBuilder(config, self.device, self.timings, self.store, self.mesh, self.peers)
        self.eager = not way.graphs
        possible = [name for name, recording in RECORDINGS.items() if recording.ranks or not self.builder.sharded]
        recorded = [name for name in possible if name != "none"]
        first, later = recordings("eager" if self.eager else mode if self.recorder else "captured")
        records = self.recorder is not None or self.device.type != "cpu"
        self.warm_up = WarmUp([*reversed(recorded), "captured", "eager"], first, later, self.timings, records)
        make_layers = load_hook(way.hook) if self.eager else None
        self.layers = make_layers and make_layers(self.builder.backend.compile_module, self._layer_made)
        self._tools = self._with_cache = Toolchain(self.builder, self.warm_up, self.recorder)
        if self.kv_recorder is not None:
            self._with_cache = replace(self._tools, recorder=self.kv_recorder)
        self.programs = self._tools.programs
        self.peers.close_on_leave(self)

    def program(
        self,
        name: str,
        body: GraphBody,
        inputs: Inputs,
        writes: Collection[Role] = (),
        dynamic: Dynamic | None = None,
        constants: Constants | None = None,
    ) -> Program:
        """`body` as a program bound to the static tensors of `inputs`; see `capture.step.capture` and `Program`."""
        tools = self._with_cache if inputs.kv else self._tools
        return Program(tools, name, body, inputs, writes, dynamic or {}, constants)

    @property
    def borrower(self) -> CudaRecorder | None:
        """The recorder whose pool holds the KV cache, if there is a `kv_recorder`; it lives as long as the runtime."""
        return self.recorder if self.kv_recorder is not None else None

    @property
    def compiles(self) -> bool:
        """Whether programs are captured or layers compiled."""
        return not self.eager or self.layers is not None

    def compile_layers_of(self, *models: nn.Module) -> None:
        """Let the models call their layers through the compiler, where single layers are compiled."""
        if self.layers is not None:
            for model in models:
                model.call_layer = self.layers

    def _layer_made(self) -> None:
        self.builder.captures += 1
        self.warm_up.graph_made()

    def share_regions(self) -> bool:
        """Once both roles have made their graphs, let the backend choose regions that all traces share. Returns whether
        there are any; if so, all graphs are closed, and made again with these regions when next needed."""
        caches = self._caches()
        if not self.builder.backend.share([trace for cache in caches for trace in cache.traces.values()]):
            return False
        for program in self.programs:
            program.close()
        for cache in caches:
            self.builder.rerun_passes(cache)
        return True

    def lower_level(self, name: str) -> Level:
        """From now on run every program of this name one level further down. Returns that level. Sharded graphs skip
        the piecewise level, as a collective may begin in one piece and end in another."""
        for program in self._programs_named(name):
            program.close()
        return self.warm_up.lower(name)

    def retrace(self, name: str) -> bool:
        """Drop the loaded graphs of every program of this name, and capture them from now on. Returns whether any had
        been loaded."""
        programs = self._programs_named(name)
        had_loaded = [cache.retrace() for cache in self._caches(programs)]
        if not self.peers.gather(any(had_loaded))[0]:  # rank 0 reads the store
            return False
        for program in programs:
            program.cache.ready.clear()
            program.close()
        return True

    def _programs_named(self, name: str) -> list[Program]:
        return [program for program in self.programs if program.name == name]

    def _caches(self, programs: Sequence[Program] | None = None) -> list[GraphCache]:
        """The graph caches of these programs, by default of all, each once; several programs may share one."""
        chosen = self.programs if programs is None else programs
        return list({id(program.cache): program.cache for program in chosen}.values())

    def begin_warm_up(self, peers: World) -> None:
        """From here on graphs are made together with `peers`, and do not count as recompiles."""
        self.peers = self.builder.peers = peers
        self.warm_up.ended = False

    def end_warm_up(self) -> None:
        """From here on a new graph counts as a recompile. Drops what only the check against eager needed."""
        self.warm_up.ended = True
        self.peers = self.builder.peers = ONE_PROCESS  # later graphs are made by each process that needs them
        self.builder.prebuilt.clear()
        for cache in self._caches():
            cache.forget_stages()
        for program in self.programs:
            program.forget_stages()
        torch.cuda.empty_cache()  # memory of the check

    @property
    def captures(self) -> int:
        """Traces made so far, or compiled variants of layers."""
        return self.builder.captures

    @property
    def loaded(self) -> int:
        return self.builder.loaded

    @property
    def recompiles(self) -> int:
        """Graphs that were made after `end_warm_up`."""
        return self.warm_up.recompiles

    @property
    def launches(self) -> Counter[str]:
        """Launches by program, including those of closed graphs."""
        return self._count("launches")

    @property
    def replays(self) -> Counter[str]:
        """Launches that replayed a CUDA graph, by program."""
        return self._count("replays")

    def metrics(self) -> dict[str, int]:
        """`recompiles`, `graph_replays` and the replays of each program, since the start."""
        replays = self._count("replays")
        by_function = {f"graph_replays/{name}": count for name, count in sorted(replays.items()) if count}
        return {"recompiles": self.warm_up.recompiles, "graph_replays": replays.total(), **by_function}

    def _count(self, what: str) -> Counter[str]:
        total: Counter[str] = getattr(self._tools, what).copy()
        for program in self.programs:
            for graph in program.graphs.values():
                total[program.name] += getattr(graph, what)
        return total

    def close(self) -> None:
        """Close every graph, then the pools. `World.close` calls this too, before it destroys the process group."""
        for program in self.programs:
            program.close()
        for recorder in (self.recorder, self.kv_recorder):
            if recorder is not None:
                recorder.close()

    def reserve(self, size: int) -> None:
        """Let the pool of `recorder` begin with one contiguous block of `size` bytes. Call it before any cache or graph
        is made."""
        if self.recorder is not None and size:
            self.recorder.reserve(size)

    def in_pool(self) -> contextlib.AbstractContextManager[None]:
        """Within, computations allocate from the CUDA graphs' pool, if there is one; not during their launches."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.in_pool()

    def pool_bytes(self) -> int:
        """Memory that the CUDA graph pools hold, including a KV cache that lies in one."""
        return sum(recorder.reserved_bytes() for recorder in (self.recorder, self.kv_recorder) if recorder is not None)


EAGER = Runtime(CompileConfig("none"), torch.device("cpu"))  # calls every program as it is, on any device
