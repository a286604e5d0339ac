"""Finds where two ways to run one function diverge: the first stage that differs, and the first node that shows it.
Eager, the graph at each stage, and its replay are compared by hashes, operator by operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.captured import Captured, describe, is_exact, mutates, op_name, written_arguments
from ..launch.cudagraph import CudaRecorder
from ..passes.canonicalize import SAME_TENSOR
from ..torch_private import trace as torch_trace
from .fingerprints import fingerprint, first_difference
from .tolerance import bound, relative_error

# Calls its argument with gradients off, from the trial's state, which is restored afterwards.
Around = Callable[[Callable[[], Any]], Any]
_NO_NEW_VALUES = {*SAME_TENSOR, "aten.lift_fresh", "aten.lift_fresh_copy", "aten._unsafe_view"}


@dataclass(frozen=True)
class Fault:
    """The first step whose result differs bitwise from the step before.

    Attributes:
        step: `capture`, the name of a pass, `repetition` (the same graph, run again), `replay`, or `storage` for a
            loaded graph.
        node: the first node of the graph after that step that differs, or None if no single node does.
        what: an output or written input that differs.
    """

    step: str
    node: str | None
    what: str

    def __str__(self) -> str:
        against = "eager" if self.step in ("capture", "storage") else "the step before"
        if self.step == "repetition":
            return f"two runs of the graph differ in {self.what}"
        where = f"first at {self.node}" if self.node else "at no node when run one by one"
        return f"{self.step} differs from {against} in {self.what}, {where}"


def find_faulty_step(
    captured: Captured,
    eager: Callable[[], Any],
    arguments: Sequence[Tensor],
    differs: Callable[[Captured], str | None],
    around: Around,
) -> Fault:
    """The fault of a graph whose results differ from those of `eager`, which runs the function itself. `differs` names
    a result of a graph that differs."""
    kept = captured.stages()
    parting = ((i, what) for i, (_, graph) in enumerate(kept) if (what := differs(graph)))
    i, what = next(parting, (-1, "results that differ from run to run"))
    step, after = kept[i]
    if i < 0:
        return Fault(step, None, what)
    seen = around(partial(_node_fingerprints, after, arguments))
    if i == 0:
        return Fault(step, _first_node_unlike_eager(after, seen, around(partial(_eager_fingerprints, eager))), what)
    if region := around(partial(_worst_region, after, arguments)):
        return Fault(step, region, what)
    before = kept[i - 1][1]
    if node := first_difference(around(partial(_node_fingerprints, before, arguments)), seen):
        return Fault(step, _describe(after, node), what)
    kept_names = {n.name for n in after.graph.nodes}
    lost = next((n.name for n in before.graph.nodes if mutates(n) and n.name not in kept_names), None)
    return Fault(step, _describe(before, lost) if lost else None, what)


def find_faulty_replay(
    captured: Captured,
    recorder: CudaRecorder,
    arguments: Sequence[Tensor],
    load: Callable[[], None],
    around: Around,
    what: str,
) -> Fault:
    """The fault of a recording whose replay differs from its graph: the graph is recorded again with the hash of every
    node as its result. `load` fills the user inputs among `arguments`, which are buffers of the recording."""

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(list(_node_fingerprints(captured, tensors).values()))]

    def replay() -> Tensor:
        load()
        recording.replay()
        return recording.outputs[0].clone()

    def interpret() -> dict[str, Tensor]:
        load()
        return _node_fingerprints(captured, arguments)

    recording = around(lambda: recorder.record(run, arguments))
    expected = around(interpret)
    found = dict(zip(expected, around(replay), strict=True))
    recording.close()
    node = first_difference(expected, found)
    return Fault("replay", _describe(captured, node) if node else None, what)


class _ObservedInterpreter(fx.Interpreter):
    """Runs a graph node by node and calls `seen(interpreter, node, result)` after each."""

    def __init__(self, module: fx.GraphModule, seen: Callable[[fx.Interpreter, fx.Node, Any], None]) -> None:
        super().__init__(module)
        self._seen = seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self._seen(self, n, result)
        return result


def _worst_region(captured: Captured, arguments: Sequence[Tensor]) -> str | None:
    """The compiled region that differs most from its own operators; None if all are within the bound."""
    errors: dict[str, float] = {}

    def seen(at: fx.Interpreter, node: fx.Node, result: Any) -> None:
        if not is_exact(node):
            args, _ = at.fetch_args_kwargs_from_env(node)
            own = node.target.module.forward(*args)  # type: ignore[union-attr]
            errors[node.name] = max(map(relative_error, result, own), default=0.0)

    if all(map(is_exact, captured.graph.nodes)):
        return None
    _ObservedInterpreter(captured.module, seen).run(*arguments)
    name = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    if errors[name] <= bound(captured):
        return None
    return f"{_describe(captured, name)}, which is {errors[name]:.2g} from its operators"


def _node_fingerprints(captured: Captured, arguments: Sequence[Tensor]) -> dict[str, Tensor]:
    """By node, a hash of what its call returned and wrote."""
    prints: dict[str, Tensor] = {}

    def seen(at: fx.Interpreter, node: fx.Node, result: Any) -> None:
        computes = node.op == "call_function" and node.target is not operator.getitem
        if computes and (tensors := list(_tensors([result, [at.env[a] for a in written_arguments(node)]]))):
            prints[node.name] = _combine(tensors)

    _ObservedInterpreter(captured.module, seen).run(*arguments)
    return prints


def _eager_fingerprints(eager: Callable[[], Any]) -> list[tuple[str, Tensor]]:
    """(operator, hash) of every call that computes or writes tensors, in order."""
    calls: list[tuple[str, Tensor]] = []

    def seen(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        passed = {a.name: kwargs.get(a.name) for a in torch_trace.arguments(op)}
        passed.update(zip(passed, args, strict=False))
        writes = [passed[a.name] for a in torch_trace.arguments(op) if a.is_write]
        tensors = list(_tensors([result, writes]))
        if tensors and _computes(op):
            calls.append((torch_trace.operator_name(op), _combine(tensors)))

    torch_trace.run_observed(eager, seen)
    return calls


def _first_node_unlike_eager(
    captured: Captured, seen: Mapping[str, Tensor], calls: Sequence[tuple[str, Tensor]]
) -> str | None:
    """The first node whose result differs from eager's call of the same operator, or else whose operator differs.

    Calls are aligned by operator, since a trace with open sizes has slices that eager skips as no-ops.
    """
    nodes = [n for n in captured.graph.nodes if n.name in seen and _computes(n.target)]
    matcher = SequenceMatcher(None, [op_name(n) for n in nodes], [name for name, _ in calls], autojunk=False)
    eager = {nodes[m.a + i].name: calls[m.b + i][1] for m in matcher.get_matching_blocks() for i in range(m.size)}
    if different := first_difference(eager, seen):
        return _describe(captured, different)
    for tag, i, end, j, stop in matcher.get_opcodes():
        if tag != "equal":
            found = f"where eager calls {calls[j][0] if j < stop else 'nothing'}"
            return f"{_describe(captured, nodes[i].name) if i < end else 'no node'}, {found}"
    return None


def _computes(op: Any) -> bool:
    """Whether a call computes new values. Views do not, and they are not the same in eager and in a trace."""
    if not torch_trace.is_operator(op) or torch_trace.operator_name(op) in _NO_NEW_VALUES:
        return False
    return any(a.is_write for a in torch_trace.arguments(op)) or not any(r.aliases for r in torch_trace.results(op))


def _describe(captured: Captured, name: str) -> str:
    return describe(next(n for n in captured.graph.nodes if n.name == name))


def _combine(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([fingerprint(t) * (2 * i + 1) for i, t in enumerate(tensors)]).sum()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
