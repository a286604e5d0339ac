"""What passes share."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..ir.captured import Captured


def rewritten(captured: Captured) -> Captured:
    """A copy whose graph a pass may change; names of nodes are kept."""
    graph = fx.Graph()
    output = graph.graph_copy(captured.graph, {})
    graph.output(output)
    _output(graph).meta.update(_output(captured.graph).meta)
    return replace(captured, module=fx.GraphModule(captured.module, graph))


def _output(graph: fx.Graph) -> fx.Node:
    return next(n for n in reversed(graph.nodes) if n.op == "output")
