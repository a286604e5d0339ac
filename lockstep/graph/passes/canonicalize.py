"""Dead code elimination, removal of the aliases that autograd leaves, and forwarding of a rank's own columns, which
would be copied back out of the result that all ranks' columns were pushed to."""

from __future__ import annotations

from typing import Any, cast

from torch import fx

from ..ir.captured import Captured, has_side_effects, op_name, origins, written_memory
from ..ir.cross_rank_sums import PUSH
from ..torch_private import trace as torch_trace
from .rewrite import match_call, rewritten

PLACE = "spread.index"  # the graph input that holds a rank's index among the tensor-parallel ranks
SAME_TENSOR = ("aten.detach", "aten.alias")  # without autograd, as graphs run, these return their argument


def canonicalize(captured: Captured) -> tuple[Captured, str]:
    """Drop dead calls and aliases, and read a rank's own columns from the tensor that was pushed. Calls with side
    effects stay (`has_side_effects`), and so does the order."""
    result = rewritten(captured)
    aliases = own = dead = 0
    for node in list(result.graph.nodes):
        if op_name(node) in SAME_TENSOR:
            node.replace_all_uses_with(node.args[0])
            result.graph.erase_node(node)
            aliases += 1
    for node, source in _own_columns(result):
        node.replace_all_uses_with(source)
        own += 1
    for node in reversed(list(result.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not has_side_effects(node):
            result.graph.erase_node(node)
            dead += 1
    taken = f", {own} own columns not copied" if own else ""
    return result, f"{dead} dead, {aliases} aliases removed{taken}"


def _own_columns(captured: Captured) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of a copy of the rank's own columns out of all ranks', and the tensor that the rank pushed, which can
    replace it: same values and layout, memory of its own, and neither is written in place."""
    places = {node for node, spec in captured.placeholders() if spec.name.endswith(PLACE) and spec.shape == (1,)}
    found = [(n, source) for n in captured.graph.nodes if (source := _pushed(n, places))]
    if not found:
        return []
    origins_of = origins(captured.graph)
    changed = frozenset(o for node in captured.graph.nodes for o in written_memory(node, origins_of))

    def is_alike(a: fx.Node, b: fx.Node) -> bool:
        strides = [torch_trace.fake_value(node).stride() for node in (a, b)]
        return captured.value(a) == captured.value(b) and strides[0] == strides[1]

    fresh = [(n, source) for n, source in found if source.op == "call_function" and origins_of[source] == {source}]
    return [(n, x) for n, x in fresh if is_alike(n, x) and changed.isdisjoint(origins_of[n] | {x})]


def _pushed(node: fx.Node, places: set[fx.Node]) -> fx.Node | None:
    """The pushed tensor, if `node` is the rank's own columns of the push's result (`collectives.local_columns`)."""
    chosen = match_call(node.args[0], "aten.index_select") if op_name(node) == "aten.squeeze" else None
    parted = match_call(chosen.args[0], "aten.view") if chosen and node.args[1:] == (1,) else None
    pushed = match_call(parted.args[0], PUSH) if parted else None
    if not (chosen and parted and pushed):
        return None
    source, ranks, _, to_owners = pushed.args
    shape: Any = parted.args[1]
    by_rank = not to_owners and len(shape) == 3 and shape[1] == ranks
    return cast(fx.Node, source) if by_rank and chosen.args[1] == 1 and chosen.args[2] in places else None
