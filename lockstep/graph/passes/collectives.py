"""Finds the collectives of sharded training in a graph: all-gathers of weights and all-to-all exchanges of gradients.

They run along the mesh's `fsdp` axis. Collectives along other axes move activations; passes do not merge them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from ...distributed.mesh import ONE_RANK
from ..ir.captured import Captured, aliased_arguments, is_backward, module_of, mutates, op_name
from ..torch_private.collectives import EXCHANGE, GATHER, GATHER_MANY, WAIT
from .rewrite import reachable_nodes

GATHERS = (GATHER, GATHER_MANY)
_GROUP = ONE_RANK.fsdp.group
_WITHIN, _BETWEEN = (axis.group for axis in ONE_RANK.cells)
STAGES = (_GROUP, _WITHIN), (_BETWEEN,)  # groups along which gradients are exchanged, in the first and second stage
_ROUND = "aten._to_copy"
_PREPARES = (
    *("aten.view", "aten.reshape", "aten._unsafe_view", "aten.constant_pad_nd", "aten.cat"),
    *("aten.transpose", "aten.permute", "aten.clone"),
)


@dataclass(frozen=True)
class Collective:
    """The calls around one collective of weights or gradients.

    Attributes:
        layer: such as `layers.3`; empty outside any layer.
        start: the calls that prepare and launch it, in order; nothing else uses their results.
        finish: the wait and what follows from it: views of gathered weights, or additions to the gradients.
    """

    layer: str
    start: tuple[fx.Node, ...]
    finish: tuple[fx.Node, ...]

    @property
    def collective(self) -> fx.Node:
        return next(node for node in self.start if op_name(node) in (*GATHERS, EXCHANGE))


def layer_of(node: fx.Node) -> str:
    """The layer of a call: its module's path up to the first number; empty without one."""
    parts = module_of(node).split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def gathers_weights(node: fx.Node) -> bool:
    """Whether a call launches an all-gather along the axis that weights are sharded on."""
    return op_name(node) in GATHERS and node.args[-1] == _GROUP


def communicates(node: fx.Node) -> bool:
    """Whether a call launches a collective, or waits for one."""
    return op_name(node) in (*GATHERS, EXCHANGE, WAIT)


def activation_collectives(captured: Captured) -> list[fx.Node]:
    """The calls that launch collectives of activations, in order: those along axes that weights are not sharded on."""
    sharded = {group for groups in STAGES for group in groups}
    calls = [node for node in captured.graph.nodes if communicates(node) and op_name(node) != WAIT]
    return [node for node in calls if node.args[-1] not in sharded]


def weight_gathers(captured: Captured) -> list[Collective]:
    """The all-gathers of weights, in the order of their results' first uses."""
    weights = {node for node, spec in captured.placeholders() if spec.role == "param"}
    found = []
    for node in captured.graph.nodes:
        shards = node.all_input_nodes if gathers_weights(node) else []
        rounded = [shard for shard in shards if op_name(shard) == _ROUND and len(shard.users) == 1]
        of_them = [shard.all_input_nodes[0] if shard in rounded else shard for shard in shards]
        if of_them and weights.issuperset(of_them):
            elements = [user for user in node.users if op_name(node) == GATHER_MANY]
            waits = [user for started in elements or [node] for user in started.users if op_name(user) == WAIT]
            layer = layer_of(waits[0]) if waits else ""
            found.append(Collective(layer, (*rounded, node, *elements), tuple(_views(waits))))
    return sorted(found, key=first_use)


def first_use(gather: Collective) -> fx.Node:
    """The first call that uses what was gathered, or the start of the gather if none does."""
    return min(users(gather), default=gather.start[0])


def users(gather: Collective) -> list[fx.Node]:
    """The calls that use what was gathered."""
    return [user for node in gather.finish for user in node.users if user not in gather.finish]


def gradient_exchanges(captured: Captured, stage: int = 0) -> list[Collective]:
    """The gradient exchanges of a stage, in the order in which the gradients are computed."""
    found = []
    for node in captured.graph.nodes:
        if op_name(node) == EXCHANGE and node.args[-1] in STAGES[stage]:
            finish = sorted(reachable_nodes(node, lambda call: call.users, lambda user: user.op != "output"))
            found.append(Collective(layer_of(finish[-1]), (*_preparing(node), node), tuple(finish)))
    found.sort(key=lambda exchange: max(sources(exchange)))
    if stage == 0:
        return found
    earlier = gradient_exchanges(captured, stage - 1)
    number = {node: i for i, exchange in enumerate(earlier) for node in exchange.finish}
    return sorted(found, key=lambda exchange: number[exchange.collective])  # stable


def sources(collective: Collective) -> list[fx.Node]:
    """The nodes that a collective's start reads, each once."""
    read = [node for call in collective.start for node in call.all_input_nodes if node not in collective.start]
    return list(dict.fromkeys(read))


def by_layer(collectives: Sequence[Collective]) -> Iterator[list[Collective]]:
    for _, run in groupby(collectives, key=lambda c: (c.layer, any(map(is_backward, c.finish[-1:])))):
        yield list(run)


def _views(waits: Sequence[fx.Node]) -> list[fx.Node]:
    """Waits, and the views of their results."""
    found = list(waits)
    for node in found:  # which grows
        views = [user for user in node.users if aliased_arguments(user) == [node] and not mutates(user)]
        found += [view for view in views if view not in found]
    return sorted(found)


def _preparing(node: fx.Node) -> list[fx.Node]:
    """The calls that only bring a collective's input into its layout."""

    def prepares(call: fx.Node) -> bool:
        return op_name(call) in _PREPARES and len(call.users) == 1

    return sorted(reachable_nodes(node, lambda call: call.all_input_nodes, prepares))
