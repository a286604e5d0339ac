"""Resharding: frees gathered weights after the forward pass, and gathers them again for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..ir.captured import Captured, is_backward
from .collectives import Collective, users, weight_gathers
from .recompute import recompute_in_backward
from .rewrite import rewritten


def reshard(captured: Captured) -> tuple[Captured, str]:
    """Gather weights again where the backward pass uses them, except those of the layer that it begins with.

    The same bits arrive again. A graph without a backward pass is left as it is.
    """
    if not any(map(is_backward, captured.graph.nodes)):
        return captured, "no backward pass"
    result = rewritten(captured)
    uses = {g: users(g) for g in weight_gathers(result) if not is_backward(g.collective)}
    chosen = {node for gather in uses if _lies_idle(gather, uses) for node in (*gather.start, *gather.finish)}
    again = recompute_in_backward(result.graph, chosen)
    count = sum(gather.collective in again for gather in uses)
    return result, f"{count} of {len(uses)} gathered again"


def _lies_idle(gather: Collective, uses: Mapping[Collective, Sequence[fx.Node]]) -> bool:
    """Whether another layer's weight is used between its last forward use and its first backward one."""
    forward, backward = ([u for u in uses[gather] if is_backward(u) == behind] for behind in (False, True))
    if not forward or not backward:
        return False
    end, begin = max(forward), min(backward)
    return any(end < at < begin for other, own in uses.items() if other.layer != gather.layer for at in own)
