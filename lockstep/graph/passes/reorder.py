"""Overlaps communication with computation: moves the launches of collectives away from their waits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir.captured import Captured, has_side_effects
from .collectives import (
    STAGES,
    Collective,
    activation_collectives,
    by_layer,
    communicates,
    first_use,
    gradient_exchanges,
    sources,
    weight_gathers,
)
from .rewrite import move_after, reachable_nodes, rewritten


def reorder(captured: Captured) -> tuple[Captured, str]:
    """Gather a layer's weights while the previous layer computes, and wait for them at their first use. Exchange a
    layer's gradients as soon as they are computed, and wait for them when the next layer's exchange has begun. Apart
    from weights that later calls still use, at most two layers' gathered weights are thus in memory.

    Collectives of activations are launched before calls that they do not depend on, such as weight gradients, and
    awaited after these.
    """
    result = rewritten(captured)
    meanwhile = _launch_early(activation_collectives(result))
    gathers = _prefetch(list(by_layer(weight_gathers(result))))
    exchanges = sum(_exchange_early(list(by_layer(gradient_exchanges(result, i)))) for i in range(len(STAGES)))
    note = f"{gathers} gathers begin a layer early, {exchanges} exchanges end a layer late"
    return result, note + (f", {meanwhile} calls are made while activations travel" if meanwhile else "")


def _launch_early(starts: Sequence[fx.Node]) -> int:
    """Move calls that precede a collective's launch, and that it does not depend on, behind the launch. The search goes
    back to the previous collective or its wait, or to a call with side effects. Returns how many calls were moved."""
    moved, ends = 0, {*starts, *(user for started in starts for user in started.users)}
    for started in starts:
        before, node = list[fx.Node](), started.prev
        while node.op == "call_function" and not has_side_effects(node) and node not in ends:
            before.append(node)
            node = node.prev
        needed = reachable_nodes(started, lambda call: call.all_input_nodes, set(before).__contains__)
        later = [call for call in reversed(before) if call not in needed and not communicates(call)]
        move_after(started, later)
        moved += len(later)
    return moved


def _prefetch(runs: Sequence[Sequence[Collective]]) -> int:
    uses = [min(map(first_use, run)) for run in runs]
    for i, (run, use) in enumerate(zip(runs, uses, strict=True)):
        early = runs[:2] if i == 0 else runs[i + 1 : i + 2]
        starts = [node for other in early for gather in other for node in gather.start]
        finishes = [node for gather in run for node in gather.finish]
        for node in starts + finishes:
            use.prepend(node)  # every weight has a use; without one, `first_use` would be the gather
    return max(0, len(runs) - 1)


def _exchange_early(runs: Sequence[Sequence[Collective]]) -> int:
    ends: list[fx.Node] = []  # for each run, the last call of its start
    behind: dict[fx.Node, fx.Node] = {}  # by anchor, the last call that was moved behind it
    for run in runs:
        last = max(node for exchange in run for node in sources(exchange))
        behind[last] = move_after(behind.get(last, last), [node for exchange in run for node in exchange.start])
        ends.append(behind[last])
    for run, end in zip(runs, [*ends[1:], *ends[-1:]], strict=True):  # the next run's end, or the last one's own
        behind[end] = move_after(behind.get(end, end), [node for exchange in run for node in exchange.finish])
    return max(0, len(runs) - 1)
