"""Overlaps communication with computation: moves the launches of collectives away from their waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from ..ir.captured import Captured, acts
from .collectives import (
    STAGES,
    Collective,
    by_layer,
    communicates,
    first_use,
    gradient_exchanges,
    sources,
    step_collectives,
    weight_gathers,
)
from .rewrite import appended, reached, rewritten


def reorder(captured: Captured) -> tuple[Captured, str]:
    """Gather a layer's weights while the previous layer computes, and wait for them at their first use. Exchange a
    layer's gradients as soon as they are computed, and wait for them when the next layer's exchange has begun. Apart
    from weights that later calls still use, at most two layers' gathered weights are thus in memory.

    Collectives of activations are launched before calls that they do not depend on, such as weight gradients, and
    awaited after these.
    """
    result = rewritten(captured)
    meanwhile = _begin_first(step_collectives(result))
    gathers = _prefetch(list(by_layer(weight_gathers(result))))
    exchanges = sum(_exchange_early(list(by_layer(gradient_exchanges(result, i)))) for i in range(len(STAGES)))
    note = f"{gathers} gathers begin a layer early, {exchanges} exchanges end a layer late"
    return result, note + (f", {meanwhile} calls are made while activations travel" if meanwhile else "")


def _begin_first(starts: Sequence[fx.Node]) -> int:
    """Move calls that precede a collective's launch, and that it does not depend on, behind the launch. The search goes
    back to the previous collective or its wait, or to a call with side effects. Returns how many calls were moved."""
    moved, ends = 0, {*starts, *(user for started in starts for user in started.users)}
    for started in starts:
        before, node = list[fx.Node](), started.prev
        while node.op == "call_function" and not acts(node) and node not in ends:
            before.append(node)
            node = node.prev
        needed = reached(started, lambda call: call.all_input_nodes, set(before).__contains__)
        later = [call for call in reversed(before) if call not in needed and not communicates(call)]
        appended(started, later)
        moved += len(later)
    return moved


def _prefetch(runs: Sequence[Sequence[Collective]]) -> int:
    uses = [min(map(first_use, run)) for run in runs]
    for i, (run, use) in enumerate(zip(runs, uses, strict=True)):
        early = runs[0 if i == 0 else i + 1 : i + 2]
        for node in [n for r in early for gather in r for n in gather.start] + [n for g in run for n in g.finish]:
            use.prepend(node)  # every weight has a use; without one, `first_use` would be the gather
    return max(0, len(runs) - 1)


def _exchange_early(runs: Sequence[Sequence[Collective]]) -> int:
    ends: list[fx.Node] = []  # for each run, the last call of its start
    behind: dict[fx.Node, fx.Node] = {}  # by anchor, the last call that was moved behind it
    for run in runs:
        last = max(node for exchange in run for node in sources(exchange))
        behind[last] = appended(behind.get(last, last), [node for exchange in run for node in exchange.start])
        ends.append(behind[last])
    for (_, end), run in zip(pairwise([*ends, *ends[-1:]]), runs, strict=False):
        behind[end] = appended(behind.get(end, end), [node for exchange in run for node in exchange.finish])
    return max(0, len(runs) - 1)
