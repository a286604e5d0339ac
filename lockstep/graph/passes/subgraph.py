"""Outlining: a run of calls of a graph as a function of its own, and the graph that calls such functions instead."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from ..ir.captured import BACKWARD, BACKWARD_TAG, Captured, aliased_arguments, is_backward, mutates
from ..ir.sizes import Condition, rename_conditions
from ..ir.text import call_text
from ..torch_private import trace as torch_trace
from ..torch_private.inductor import Signature


class Stretch:
    """Consecutive calls (views and sizes in between do not count) whose results nothing overwrites.

    Readers outside recreate views of a result, so results never alias each other. Intermediates of a forward stretch
    that only the backward pass reads are recomputed there, so that both roles share the same function.

    Attributes:
        inner: the calls, and the views and sizes computed from their results, wherever these stand in the graph.
        reads: nodes outside that the calls read. results: inner nodes that are read outside.
        module: the calls as a function of `reads` that returns a list, one item per node of `results`.
        body: the module as text, by which equal stretches are recognized.
    """

    def __init__(self, captured: Captured, calls: Sequence[fx.Node]) -> None:
        self._captured, self.calls = captured, tuple(calls)
        self.inner = set(calls)
        node = calls[0]
        while (node := node.next).op == "call_function":
            if allocates_nothing(captured, node) and not self.inner.isdisjoint(node.all_input_nodes):
                self.inner.add(node)
        graph, copies, reads = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node]()

        def copy(node: fx.Node) -> fx.Node:
            if node not in copies:
                if node not in self.inner:
                    reads.append(node)
                copies[node] = graph.node_copy(node, copy) if node in self.inner else graph.placeholder(node.name)
            return copies[node]

        for call in calls:
            copy(call)
        self.results = self._read_outside()
        graph.output([copy(result) for result in self.results]).meta.clear()
        torch_trace.move_placeholders_first(graph)
        self.reads = tuple(reads)
        self.module = fx.GraphModule({}, graph)

    def _read_outside(self) -> tuple[fx.Node, ...]:
        """The results, in order, that are read outside, themselves or through views."""
        found: dict[fx.Node, None] = {}
        for node in self._captured.graph.nodes:
            outside = [
                user for user in node.users if user not in self.inner and (self.backward or not is_backward(user))
            ]
            if node in self.inner and outside:
                found[self._memory_of(node)] = None
        return tuple(found)

    def _memory_of(self, node: fx.Node) -> fx.Node:
        """The result that an inner node is, or is a view of: a call, or an element of a call's results."""
        source = node.args[0]
        if node in self.calls or (node.target is operator.getitem and source in self.calls):
            return node
        assert isinstance(source, fx.Node)
        return self._memory_of(source)

    @property
    def backward(self) -> bool:
        return is_backward(self.calls[0])

    @cached_property
    def signature(self) -> Signature:
        return Signature([torch_trace.fake_value(node) for node in self.reads])

    @cached_property
    def body(self) -> tuple[str, ...]:
        """Inputs, calls and results as text. Raises `Uncompilable` like `Signature.describe`."""
        names = {node: f"%{i}" for i, node in enumerate(self.module.graph.nodes)}
        inputs = self.signature.describe()
        lines = [f"%{i}: {text}" for i, text in enumerate(inputs)]
        for node in self.module.graph.nodes:
            if node.op != "placeholder":
                lines.append(f"{names[node]} = {call_text(node, names.__getitem__)}")
        return tuple(lines)

    def conditions(self, of_region: Sequence[Condition]) -> list[Condition]:
        return rename_conditions(of_region, self.signature.sizes, self._captured.sizes)


def allocates_nothing(captured: Captured, node: fx.Node) -> bool:
    """Whether a call allocates nothing: it is a view, picks an item of a result, or computes with sizes."""
    if mutates(node):
        return False
    return bool(aliased_arguments(node)) or isinstance(captured.value(node), str)


def outline(captured: Captured, regions: Mapping[Stretch, Callable[..., Any]]) -> fx.GraphModule:
    """The graph with each stretch replaced by one call of its function, at the place of its last call."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in made:  # inside a forward stretch, and read only by the backward pass
            made[node] = graph.node_copy(node, value)
            torch_trace.set_tag(made[node], BACKWARD_TAG, BACKWARD)
        return made[node]

    last = {stretch.calls[-1]: stretch for stretch in regions}
    waiting = {node for stretch in regions for node in stretch.inner}
    for node in captured.graph.nodes:
        if node in last:
            stretch = last[node]
            _call(graph, stretch, regions[stretch], made)
            waiting -= stretch.inner
            _views(graph, stretch, node, made)
        elif node not in waiting and node not in made:
            made[node] = graph.node_copy(node, value)
    return torch_trace.graph_module(captured.module, graph)


def _call(graph: fx.Graph, stretch: Stretch, region: Callable[..., Any], made: dict[fx.Node, fx.Node]) -> None:
    values = tuple(torch_trace.fake_value(result) for result in stretch.results)
    call = graph.call_function(region, tuple(made[node] for node in stretch.reads))
    torch_trace.set_fake_value(call, values)
    if stretch.backward:
        torch_trace.set_tag(call, BACKWARD_TAG, BACKWARD)
    for i, result in enumerate(stretch.results):
        made[result] = graph.call_function(operator.getitem, (call, i))
        made[result].meta = dict(result.meta)


def _views(graph: fx.Graph, stretch: Stretch, end: fx.Node, made: dict[fx.Node, fx.Node]) -> None:
    """Recreate the views and sizes that stood before the stretch's end and are read outside."""
    node = stretch.calls[0]
    while (node := node.next) is not end:
        known = all(source in made for source in node.all_input_nodes)
        if node in stretch.inner and node not in made and known and _reaches_outside(node, stretch):
            made[node] = graph.node_copy(node, made.__getitem__)


def _reaches_outside(node: fx.Node, stretch: Stretch) -> bool:
    """Whether something outside the stretch reads a node, itself or through views of it."""
    return any(user not in stretch.inner or _reaches_outside(user, stretch) for user in node.users)
