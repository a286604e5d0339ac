"""Piecewise CUDA graphs: recorded pieces with unrecorded calls in between, those of attention, whose shapes vary most.

Tensors that cross between pieces stay at the addresses of the first launch: results of a piece lie in the shared pool,
and results of a call in between are copied to where its first ones lay. Views and sizes cost nothing in a recording, so
each piece makes its own from the tensors that cross.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.captured import Captured, aliased_arguments, mutates, op_name
from ..torch_private import trace as torch_trace
from .cudagraph import CudaRecorder, Recording

ATTENTION = frozenset(
    f"lockstep.{name}"
    for name in (
        *("attention_packed", "attention_packed_backward", "attention_paged", "attention_decode"),
        *("attention_sinks_packed_backward", "rotated_attention_packed_backward", "push_attention_decode"),
        *("flex_packed", "flex_packed_backward", "flex_paged", "mla_packed", "mla_packed_backward", "mla_paged"),
    )
)


@dataclass(frozen=True)
class Part:
    """A part of a graph as a graph of its own.

    Attributes:
        module: maps tensors in the order of `reads` to a list of tensors in the order of `results`.
        reads, results: nodes of the whole graph: those that this part reads from others, and others from this part.
        recorded: whether it is a recorded piece, not a call between two.
    """

    module: fx.GraphModule
    reads: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    recorded: bool

    def run(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        return self.module.forward(*arguments)


def split(captured: Captured) -> list[Part]:
    """The graph as parts in order, split at calls of `captured.split_at`. The last part only collects the outputs."""
    stretches: list[list[fx.Node]] = [[]]
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        if op_name(node) in captured.split_at:
            stretches += [[node], []]
        elif mutates(node) or not (_is_recreated(captured, node) or _is_item(node)):
            stretches[-1].append(node)
    outputs: Any = captured.graph.output_node().args[0]
    parts = [_part(captured, [], list(outputs), recorded=False)]
    wanted = set(parts[0].reads)
    for nodes in reversed([nodes for nodes in stretches if nodes]):
        results = [result for node in nodes for result in _results(captured, node) if result in wanted]
        parts.append(_part(captured, nodes, results, recorded=op_name(nodes[0]) not in captured.split_at))
        wanted.update(parts[-1].reads)
    return parts[::-1]


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_recreated(captured: Captured, node: fx.Node) -> bool:
    """Whether each part makes this value itself: a view, the result of an in-place write, or a size."""
    if _is_item(node):
        return _is_recreated(captured, node.args[0])  # type: ignore[arg-type]
    value = captured.value(node)
    return isinstance(value, str) or bool(aliased_arguments(node))


def _results(captured: Captured, node: fx.Node) -> Iterator[fx.Node]:
    if isinstance(captured.value(node), tuple):
        yield from filter(_is_item, node.users)
    elif not _is_recreated(captured, node):
        yield node


def _part(captured: Captured, nodes: Sequence[fx.Node], results: Sequence[fx.Node], recorded: bool) -> Part:
    """The calls `nodes` as a graph that returns `results`."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    reads: list[fx.Node] = []

    def value(node: fx.Node) -> fx.Node:
        if node not in made:
            if node.op == "call_function" and _is_recreated(captured, node):
                made[node] = value(aliased_arguments(node)[0]) if mutates(node) else graph.node_copy(node, value)
            elif _is_item(node) and node.args[0] in made:
                made[node] = graph.node_copy(node, value)
            else:
                reads.append(node)
                made[node] = graph.placeholder(node.name)
        return made[node]

    for node in nodes:
        made[node] = graph.node_copy(node, value)
    graph.output([value(node) for node in results])
    torch_trace.move_placeholders_first(graph)
    return Part(fx.GraphModule(captured.module, graph), tuple(reads), tuple(results), recorded)


class Piecewise:
    """The recorded pieces of one graph and the calls between them, replayed like one recording."""

    def __init__(
        self, captured: Captured, recorder: CudaRecorder, arguments: Sequence[Tensor], lasting: Sequence[int] = ()
    ) -> None:
        """Run the parts in order, recording the pieces. `arguments`: the graph's inputs, at their final addresses."""
        *parts, last = split(captured)
        inputs = dict(zip(captured.graph.find_nodes(op="placeholder"), arguments, strict=True))
        final = {node: i for i, part in enumerate([*parts, last]) for node in part.reads}
        crossing: dict[fx.Node, Tensor] = {}
        self._recordings: list[Recording] = []
        self._steps: list[Callable[[], None]] = []
        for i, part in enumerate(parts):
            reads = [inputs[n] if n in inputs else crossing[n] for n in part.reads]
            results = self._record(part, recorder, reads, list(crossing.values()))
            crossing.update(zip(part.results, results, strict=True))
            crossing = {node: tensor for node, tensor in crossing.items() if final[node] > i}
            del reads, results  # the pool may use the memory again once nothing later reads it
        self.outputs = last.run([inputs[n] if n in inputs else crossing[n] for n in last.reads])
        if lasting:
            in_pool = [self.outputs[i] for i in lasting]
            copies = [tensor.clone() for tensor in in_pool]
            for i, copy in zip(lasting, copies, strict=True):
                self.outputs[i] = copy
            self._steps.append(lambda: torch_trace.copy_all(copies, in_pool))

    def _record(
        self, part: Part, recorder: CudaRecorder, reads: Sequence[Tensor], keep: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        if part.recorded:
            recording = recorder.record(part.run, reads, keep)
            results = recording.outputs
            recording.outputs = [recorder.weak_ref_tensor(result) for result in results]
            self._recordings.append(recording)
            self._steps.append(recording.replay)
            return results
        results = recorder.run(part.run, reads)
        targets = [recorder.weak_ref_tensor(result) for result in results]
        arguments = [recorder.weak_ref_tensor(tensor) for tensor in reads]

        def call() -> None:
            for target, result in zip(targets, part.run(arguments), strict=True):
                target.copy_(result)

        self._steps.append(call)
        return results

    def replay(self) -> None:
        """Run the parts again; does not wait for the device."""
        with torch.inference_mode(False), torch.no_grad():
            for step in self._steps:
                step()

    def close(self) -> None:
        for recording in self._recordings:
            recording.close()
        self._recordings, self._steps, self.outputs = [], [], []
