"""What passes share."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from ..ir.captured import Captured


def rewritten(captured: Captured) -> Captured:
    """A copy whose graph a pass may change; names of nodes are kept."""
    graph = fx.Graph()
    output = graph.graph_copy(captured.graph, {})
    graph.output(output).meta.update(captured.graph.output_node().meta)
    return replace(captured, module=fx.GraphModule(captured.module, graph))
