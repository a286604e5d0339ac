"""Activation checkpointing: parts of the forward pass are recomputed in the backward pass instead of kept. Conversely,
`keep_logits` keeps what an operator would recompute.

The same operators run on the same inputs, so every bit is the same; memory is traded for time.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, fx

from ...config import ELEMENTWISE, FULL
from ...errors import InputError
from ..ir.captured import (
    BACKWARD,
    BACKWARD_TAG,
    Captured,
    GraphError,
    aliased_arguments,
    has_side_effects,
    is_backward,
    module_of,
    op_name,
    origins,
    written_memory,
)
from ..torch_private import trace as torch_trace
from .collectives import gathers_weights
from .rewrite import match_call, reachable_nodes, rewritten

_HEAD_BACKWARD = "lockstep.token_logprobs_backward"
_PASSES_OVER = frozenset(f"lockstep.{name}" for name in ("rms_norm", "qk_norm_rope", "silu_mul"))


class UnknownPattern(GraphError, InputError):
    """A pattern of `compile.recompute` or `compile.inductor` matches nothing."""


def recompute(captured: Captured, patterns: Sequence[str]) -> tuple[Captured, str]:
    """Recompute matching forward results just before the backward pass first needs them.

    A graph without a backward pass is left as it is.

    Args:
        patterns: `full` (everything inside modules, except results that leave them), `elementwise` (norms, rotations
            and gated activations inside modules, which cost a pass over memory and no matrix product), module paths
            such as `layers.*`, or operators such as `silu_mul` and `aten.mul`; shell-style wildcards.

    Raises:
        UnknownPattern: a pattern matches nothing that the backward pass needs.
    """
    if not any(map(is_backward, captured.graph.nodes)):
        return captured, "no backward pass"
    result = rewritten(captured)
    chosen = _chosen(result, patterns)
    again = recompute_in_backward(result.graph, chosen)
    for pattern in patterns:
        if not any(_names(pattern, node) for node in again):
            raise UnknownPattern(
                f"compile.recompute: {captured.title}: recompute pattern {pattern!r} matches nothing. "
                f"{_available_patterns(captured)}"
            )
    saved = f"{saved_bytes(captured) / 2**20:.1f} -> {saved_bytes(result) / 2**20:.1f} MiB kept for the backward pass"
    return result, f"{len(again)} calls made again, {saved}"


def fit(captured: Captured, budget: int) -> tuple[Captured, str]:
    """Recompute just enough that at most `budget` bytes are kept for the backward pass, at the traced sizes: nothing if
    they fit as is, else elementwise results, then also whole modules, as few as possible, in the order in which they
    run. `GraphError`: more is kept even if all modules are recomputed."""
    if not any(map(is_backward, captured.graph.nodes)):
        return captured, "no backward pass"
    inside = {node: module_of(node) for node in sorted(_chosen(captured, (FULL,)))}
    modules = list(dict.fromkeys(inside.values()))

    def computing(count: int) -> Captured:
        """The graph that recomputes nothing (0), or elementwise results and the first `count - 1` modules."""
        result = rewritten(captured)
        if count:
            names = {node.name for node, module in inside.items() if module in modules[: count - 1]}
            whole = {node for node in result.graph.nodes if node.name in names}
            recompute_in_backward(result.graph, whole | _chosen(result, (ELEMENTWISE,)))
        return result

    count = bisect_left(range(len(modules) + 1), -budget, key=lambda count: -saved_bytes(computing(count)))
    result = computing(count)
    before, after = saved_bytes(captured), saved_bytes(result)
    if after > budget:
        raise GraphError(
            f"{captured.title}: {after / 2**30:.3f} GiB are kept for the backward pass with everything that can be "
            f"computed again left out; {budget / 2**30:.3f} are allowed: raise "
            "compile.activation_memory_gib, or train on fewer tokens at once"
        )
    note = f"{before / 2**20:.1f} -> {after / 2**20:.1f} MiB kept for the backward pass, {budget / 2**20:.1f} allowed"
    again = f"what is elementwise and {count - 1} of {len(modules)} modules" if count else "nothing"
    return result, f"{again} computed again, {note}"


def keep_logits(captured: Captured) -> tuple[Captured, str]:
    """Keep the LM head's logits, 4 bytes per scored row and vocabulary entry, for its backward pass, whose operator
    would recompute them. This saves one of the head's four matrix products."""
    if not any(op_name(node) == _HEAD_BACKWARD for node in captured.graph.nodes):
        return captured, "no backward pass of a head"
    result = rewritten(captured)
    kept = sum(_keep_logits(node) for node in list(result.graph.nodes) if op_name(node) == _HEAD_BACKWARD)
    return result, f"logits kept of {kept} heads"


def _keep_logits(backward: fx.Node) -> bool:
    """Keep the logits of one head, if its forward call is in the graph. Returns whether they are kept."""
    items = (node for node in backward.all_input_nodes if node.target is operator.getitem)
    forward = next(filter(None, (match_call(item.args[0], "lockstep.token_logprobs") for item in items)), None)
    if forward is None:
        return False
    multiply, score = (
        torch_trace.operator_named(f"lockstep.{name}.default") for name in ("linear_fp32", "score_logits")
    )
    with forward.graph.inserting_before(forward):
        logits = torch_trace.call(forward.graph, multiply, *forward.args[:2])
        scored = torch_trace.call(forward.graph, score, logits, *forward.args[2:])
    torch_trace.copy_tags(forward, [logits, scored])
    forward.replace_all_uses_with(scored)
    forward.graph.erase_node(forward)
    backward.args = (*backward.args, logits)
    return True


def saved_bytes(captured: Captured) -> int:
    """Bytes that the forward pass allocates and the backward pass reads; weights and other inputs do not count."""
    origins_of = origins(captured.graph)
    kept = {
        origin
        for node in captured.graph.nodes
        if is_backward(node)
        for source in node.all_input_nodes
        for origin in origins_of[source]
        if origin.op == "call_function" and not is_backward(origin) and not gathers_weights(origin)
    }
    return sum(_bytes(torch_trace.fake_value(node)) for node in kept)


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return math.prod(map(torch_trace.traced_size, value.shape)) * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _names(pattern: str, node: fx.Node) -> bool:
    return _names_module(pattern, node) or _names_operator(pattern, node) or _names_elementwise(pattern, node)


def _names_module(pattern: str, node: fx.Node) -> bool:
    path = module_of(node)
    return bool(path) and (pattern == FULL or fnmatchcase(path, pattern))


def _names_elementwise(pattern: str, node: fx.Node) -> bool:
    """Whether `elementwise` names a node: such a result, or a view of one, whose readers are all inside its module."""
    if pattern != ELEMENTWISE:
        return False
    while sources := aliased_arguments(node):
        node = sources[0]
    own = module_of(node)
    inside = all(path == own or path.startswith(f"{own}.") for path in map(module_of, _readers(node)))
    return op_name(node) in _PASSES_OVER and bool(own) and inside


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Forward calls that read a result, itself or through views."""
    for user in node.users:
        if not is_backward(user):
            yield user
            if node in aliased_arguments(user):
                yield from _readers(user)


def _names_operator(pattern: str, node: fx.Node) -> bool:
    name = op_name(node)
    return pattern != FULL and any(fnmatchcase(n, pattern) for n in (name, name.partition(".")[2]))


def _chosen(captured: Captured, patterns: Sequence[str]) -> set[fx.Node]:
    """Forward calls that match and can be recomputed: pure, deterministic, reading nothing that the graph writes. A
    result that leaves its module is kept unless its operator is named; otherwise each layer would be recomputed from
    the first one on."""
    origins_of = origins(captured.graph)
    overwritten = {o for node in captured.graph.nodes for o in written_memory(node, origins_of)}
    chosen = set()
    for node in captured.graph.nodes:
        if node.op != "call_function" or is_backward(node) or has_side_effects(node):
            continue
        if any(map(gathers_weights, origins_of[node])):
            continue  # gathered weights are left to `reshard`
        if isinstance(torch_trace.fake_value(node), (int, torch.SymInt)):
            continue  # a size takes no memory, and recomputing it would keep its tensor alive
        leaves = any(module_of(user) != module_of(node) for user in node.users if not is_backward(user))
        by_module = not leaves and any(_names_module(p, node) for p in patterns)
        if not by_module and not any(_names_operator(p, node) or _names_elementwise(p, node) for p in patterns):
            continue
        if not any(o in overwritten for a in [node, *node.all_input_nodes] for o in origins_of[a]):
            chosen.add(node)
    return chosen


def recompute_in_backward(graph: fx.Graph, chosen: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Copy chosen calls to just before the backward call that first needs them, and let the backward pass use the
    copies. Returns each copy by its original."""
    again: dict[fx.Node, fx.Node] = {}
    for node in filter(is_backward, list(graph.nodes)):
        needed = reachable_nodes(node, lambda call: call.all_input_nodes, chosen.__contains__)
        for source in sorted(needed - again.keys()):
            with graph.inserting_before(node):
                again[source] = graph.node_copy(source, lambda n: again.get(n, n))
            torch_trace.set_tag(again[source], BACKWARD_TAG, BACKWARD)
        for source in node.all_input_nodes:
            if source in again:
                node.replace_input_with(source, again[source])
    return again


def _available_patterns(captured: Captured) -> str:
    forward = [n for n in captured.graph.nodes if n.op == "call_function" and not is_backward(n)]
    modules = sorted({module_of(n) for n in forward} - {""})
    operators = sorted({op_name(n) for n in forward if torch_trace.is_operator(n.target)})
    return f"Modules: {', '.join(modules) or 'none'}. Operators: {', '.join(operators)}"
