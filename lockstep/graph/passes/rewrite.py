"""Helpers that passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import fx

from ..ir.captured import Captured, op_name
from ..torch_private import trace as torch_trace


def rewritten(captured: Captured) -> Captured:
    """A copy whose graph a pass may change; node names are kept."""
    graph = fx.Graph()
    output = graph.graph_copy(captured.graph, {})
    graph.output(output).meta.update(captured.graph.output_node().meta)
    return replace(captured, module=torch_trace.graph_module(captured.module, graph))


def match_call(value: object, name: str) -> fx.Node | None:
    """`value` if it is a node that calls this operator, else None."""
    return value if isinstance(value, fx.Node) and op_name(value) == name else None


def reachable_nodes(
    node: fx.Node, further: Callable[[fx.Node], Iterable[fx.Node]], wanted: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """All nodes reachable from a node by steps of `further`, through nodes that are `wanted`."""
    found: set[fx.Node] = set()
    stack = list(further(node))
    while stack:
        if (other := stack.pop()) not in found and wanted(other):
            found.add(other)
            stack += further(other)
    return found


def move_after(anchor: fx.Node, nodes: Iterable[fx.Node]) -> fx.Node:
    """Move nodes behind the anchor, in order. Returns the last one."""
    for node in nodes:
        anchor.append(node)
        anchor = node
    return anchor
