"""From functions to graphs: capture, passes and verifier once a key, then launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..config import CompileConfig
from .bound import BoundGraph
from .capture import GraphBody, capture
from .cudagraph import CudaRecorder, Recorder
from .ir import Captured, Inputs, Role, Static
from .passes import pipeline, run_passes
from .verify import NOT_GRAPH_SAFE, verify


class Compiler:
    """What both roles compile with: one configuration, one list of passes, one pool of CUDA graphs.

    Args:
        recorder: what makes CUDA graphs; by default the device's own.
        not_graph_safe: see `verify`.

    Attributes:
        captures: graphs traced so far.
        recompiles: those traced after `end_warm_up`.
        functions: what was made by `function`.
    """

    def __init__(
        self,
        config: CompileConfig,
        device: torch.device,
        *,
        recorder: Recorder | None = None,
        not_graph_safe: Mapping[str, str] = NOT_GRAPH_SAFE,
    ) -> None:
        recorded = config.cudagraph_mode != "none"
        self.recorder = (recorder or CudaRecorder(device)) if recorded else None
        self.passes = pipeline(config.canonicalize, config.recompute, recorded)
        self.captures = self.recompiles = 0
        self._not_graph_safe = not_graph_safe
        self._warm = False
        self.functions: list[GraphFunction] = []

    def function(self, name: str, body: GraphBody, inputs: Inputs, writes: Collection[Role] = ()) -> GraphFunction:
        """`body` as graphs bound to the static tensors of `inputs`; see `capture.capture` and `GraphFunction`."""
        assert not inputs.user, "user inputs come with each call"
        self.functions.append(GraphFunction(self, name, body, inputs, writes))
        return self.functions[-1]

    def capture(
        self, name: str, body: GraphBody, inputs: Inputs, statics: Mapping[str, Static], writes: Collection[Role]
    ) -> Captured:
        """Trace, rewrite and verify."""
        self.captures += 1
        self.recompiles += self._warm
        captured = capture(name, body, inputs, statics=statics, writes=writes)
        return run_passes(captured, self.passes, lambda c: verify(c, self._not_graph_safe))

    def end_warm_up(self) -> None:
        """From here on a capture counts as a recompile."""
        self._warm = True

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

    Attributes:
        graphs: those made so far, by key.
    """

    def __init__(
        self, compiler: Compiler, name: str, body: GraphBody, inputs: Inputs, writes: Collection[Role]
    ) -> None:
        self.name = name
        self.graphs: dict[tuple, BoundGraph] = {}
        self._compiler, self._body, self._inputs, self._writes = compiler, body, inputs, writes

    def __call__(
        self, user: Mapping[str, Tensor] | None = None, *, times: int = 1, **statics: Static
    ) -> dict[str, Tensor]:
        """Launch `times` times, capturing first if the key is new. About the outputs' lifetime see `BoundGraph`."""
        user = user or {}
        key = (*statics.items(), *((name, tensor.shape) for name, tensor in user.items()))
        if key not in self.graphs:
            inputs = replace(self._inputs, user=user)
            captured = self._compiler.capture(self.name, self._body, inputs, statics, self._writes)
            self.graphs[key] = BoundGraph(captured, inputs, self._compiler.recorder)
        return self.graphs[key](user, times)

    def close(self) -> None:
        """Close the graphs; a later call captures anew."""
        for graph in self.graphs.values():
            graph.close()
        self.graphs.clear()
