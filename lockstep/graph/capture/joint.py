"""Captures a function with a backward pass through a partitioned joint graph, put together again as one flat graph.

torch's min-cut partitioner decides what is kept and what is recomputed in the backward pass. The graph is bitwise equal
to a plain trace (`capture`); in-place writes of the forward pass happen at its end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from ..ir.captured import (
    BACKWARD,
    BACKWARD_TAG,
    Captured,
    Dynamic,
    GraphError,
    Inputs,
    Role,
    Static,
    is_backward,
    op_name,
)
from ..passes.recompute import saved_bytes
from ..torch_private import joint as torch_joint
from ..torch_private import trace as torch_trace
from .step import Differentiated, GraphBody, capture, check_closure


def capture_joint(
    name: str,
    body: GraphBody,
    inputs: Inputs,
    *,
    statics: Mapping[str, Static] | None = None,
    writes: Collection[Role] = (),
    dynamic: Dynamic | None = None,
) -> Captured:
    """Like `capture.step.capture`, but a `Differentiated` body is captured through the partitioned joint graph."""
    if not isinstance(body, Differentiated):
        return capture(name, body, inputs, statics=statics, writes=writes, dynamic=dynamic)
    statics = dict(statics or {})
    check_closure(name, body.forward)
    indices = _JointInputs(body, inputs, writes)
    outputs: list[str] = []

    def forward(*tensors: Tensor) -> list[Tensor]:
        """The loss, the outputs, and the final values of the inputs that may be written."""
        own = [tensor.clone() if i in indices.written else tensor for i, tensor in enumerate(tensors)]
        loss, found = body.forward(inputs.with_tensors(own), **statics)
        outputs[:] = found  # it is called more than once
        return [loss, *found.values(), *(own[i] for i in indices.written)]

    specs = inputs.specs(dynamic or {})
    try:
        module, sizes = torch_trace.trace(forward, inputs.tensors(), [spec.sizes for spec in specs], indices.graph)
    except torch_trace.Untraceable as error:
        raise GraphError(f"{name}: cannot be captured: {error}") from error
    captured = Captured(name, module, specs, tuple(outputs), statics, frozenset(writes), sizes=sizes)
    return replace(captured, log=(_summary(captured),))


def _summary(captured: Captured) -> str:
    calls = [node for node in captured.graph.nodes if node.op == "call_function"]
    behind = sum(map(is_backward, calls))
    saved = f"{saved_bytes(captured) / 2**20:.1f} MiB kept for the backward pass"
    return f"capture: joint; {len(calls) - behind} calls forward, {behind} backward, {saved}"


class _JointInputs:
    """Indices of inputs: the leaves (with `names`), the totals that their gradients are added to, and the other inputs
    that the forward pass may write."""

    def __init__(self, body: Differentiated, inputs: Inputs, writes: Collection[Role]) -> None:
        number = {(role, name): i for i, (role, name, _) in enumerate(inputs.flat())}
        self.body, self.names = body, list(inputs.grad)
        self.leaves, self.totals = ([number[role, name] for name in inputs.grad] for role in ("param", "grad"))
        self.written = [i for (role, _), i in number.items() if role in writes and role != "grad"]

    def graph(self, fn: torch_trace.Flat, fakes: Sequence[Tensor]) -> fx.GraphModule:
        """The flat graph of `fn`, its gradients and their accumulation."""
        forward, backward, count = torch_joint.partition(fn, fakes, self.leaves)
        graph = fx.Graph()
        arguments = [torch_trace.set_fake_value(graph.placeholder(f"arg{i}_1"), x) for i, x in enumerate(fakes)]
        results, known = _append_calls(graph, forward, arguments)
        loss, *outputs = results[:count]
        for i, value in zip(self.written, outputs[len(outputs) - len(self.written) :], strict=True):
            if op_name(value) != "aten.clone" or value.args[0] is not arguments[i]:
                torch_trace.call(graph, torch.ops.aten.copy_.default, arguments[i], value)
        before = set(graph.nodes)
        seed = torch_trace.call(graph, torch.ops.aten.ones_like.default, loss)
        inputs = [known.get(node.name, seed) for node in backward.graph.find_nodes(op="placeholder")]
        gradients = _append_calls(graph, backward, inputs)[0][: len(self.leaves)]
        if unused := [name for name, gradient in zip(self.names, gradients, strict=True) if gradient is None]:
            raise torch_trace.Untraceable(f"no gradient reaches param {', '.join(map(repr, unused))}")
        for node in set(graph.nodes) - before:
            torch_trace.set_tag(node, BACKWARD_TAG, BACKWARD)
        operands = [*(arguments[i] for i in self.totals), *gradients]
        accumulation = torch_trace.flat_graph(self._accumulate, list(map(torch_trace.fake_value, operands)))
        _append_calls(graph, accumulation, operands)
        graph.output(outputs[: len(outputs) - len(self.written)])
        return torch_trace.graph_module(forward, graph)

    def _accumulate(self, *tensors: Tensor) -> list[Tensor]:
        self.body.accumulate(tensors[: len(self.totals)], tensors[len(self.totals) :])
        return []


def _append_calls(
    graph: fx.Graph, module: fx.GraphModule, inputs: Sequence[fx.Node]
) -> tuple[list[fx.Node], dict[str, fx.Node]]:
    """Append a module's calls to a graph. Returns the copied results, and every copy by its name in the module."""
    copies = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    results = graph.graph_copy(module.graph, copies)
    return list(results), {node.name: copy for node, copy in copies.items()}  # type: ignore[arg-type]
