"""A run of calls in a graph as a function of its own, and a graph with calls of such functions in place of the runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import fx

from ..ir.captured import BACKWARD, BACKWARD_TAG, Captured, is_backward, mutates, viewed
from ..ir.sizes import Condition, in_names
from ..ir.text import call_text
from ..torch_private import trace as torch_trace
from ..torch_private.inductor import Signature


class Stretch:
    """Calls that follow one another, but for views and sizes, and whose results nothing overwrites.

    Views of a result are made again by whoever reads them, so that every result is memory of its own. What only the
    backward pass reads of a forward stretch is computed again there, so that both roles have the same function.

    Attributes:
        inner: the calls, and the views and sizes that are made of their results, wherever those stand.
        reads, results: nodes of the graph that the calls read from outside, and whose values are read there.
        module: the calls as a function of `reads` that returns a list, one an item of `results`.
        body: that as text, by which equal stretches are known.
    """

    def __init__(self, captured: Captured, calls: Sequence[fx.Node]) -> None:
        self._captured, self.calls = captured, tuple(calls)
        self.inner = set(calls)
        node = calls[0]
        while (node := node.next).op == "call_function":
            if makes_no_memory(captured, node) and not self.inner.isdisjoint(node.all_input_nodes):
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
        last = graph.output([copy(result) for result in self.results])
        first = next(n for n in graph.nodes if n.op != "placeholder")
        for placeholder in graph.find_nodes(op="placeholder"):
            first.prepend(placeholder)
        last.meta.clear()
        self.reads = tuple(reads)
        self.module = fx.GraphModule({}, graph)

    def _read_outside(self) -> tuple[fx.Node, ...]:
        """Results, in order, that are read outside themselves or through views."""
        found: dict[fx.Node, None] = {}
        for node in self._captured.graph.nodes:
            outside = [
                user for user in node.users if user not in self.inner and (self.backward or not is_backward(user))
            ]
            if node in self.inner and outside:
                found[self._memory_of(node)] = None
        return tuple(found)

    def _memory_of(self, node: fx.Node) -> fx.Node:
        """The result that an inner node looks at: a call's, or an element of it."""
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
        """Inputs, calls and results; raises `Uncompilable` as `Signature.described`."""
        names = {node: f"%{i}" for i, node in enumerate(self.module.graph.nodes)}
        inputs = self.signature.described()
        lines = [f"%{i}: {text}" for i, text in enumerate(inputs)]
        for node in self.module.graph.nodes:
            if node.op != "placeholder":
                lines.append(f"{names[node]} = {call_text(node, names.__getitem__)}")
        return tuple(lines)

    def conditions(self, of_region: Sequence[Condition]) -> list[Condition]:
        return in_names(of_region, self.signature.sizes, self._captured.sizes)


def makes_no_memory(captured: Captured, node: fx.Node) -> bool:
    """Whether a call only looks at memory, picks a result, or computes with sizes."""
    if mutates(node):
        return False
    return bool(viewed(node)) or isinstance(captured.value(node), str)


def outlined(captured: Captured, regions: Mapping[Stretch, Callable[..., Any]]) -> fx.GraphModule:
    """The graph with each stretch as one call of its function, where its last call was."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in made:  # within a forward stretch, and read by the backward pass alone
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
    """Make again the views and sizes that stood before the stretch's end and are read outside."""
    node = stretch.calls[0]
    while (node := node.next) is not end:
        known = all(source in made for source in node.all_input_nodes)
        if node in stretch.inner and node not in made and known and _reaches_outside(node, stretch):
            made[node] = graph.node_copy(node, made.__getitem__)


def _reaches_outside(node: fx.Node, stretch: Stretch) -> bool:
    """Whether something outside reads a view, itself or through others."""
    return any(user not in stretch.inner or _reaches_outside(user, stretch) for user in node.users)
