"""Letting go of gathered weights after the forward pass, and gathering them again for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..ir.captured import Captured, is_backward
from .collectives import Collective, weight_gathers
from .recompute import make_again
from .rewrite import rewritten


def reshard(captured: Captured) -> tuple[Captured, str]:
    """Gather weights again where the backward pass uses them, but those that it uses before it does any others'.

    The same words arrive again; a graph without a backward pass is left as it is.
    """
    if not any(map(is_backward, captured.graph.nodes)):
        return captured, "no backward pass"
    result = rewritten(captured)
    uses = [_Uses.of(gather) for gather in weight_gathers(result) if not is_backward(gather.collective)]
    chosen = {node for own in uses if own.spread_over(uses) for node in (*own.gather.start, *own.gather.finish)}
    again = make_again(result.graph, chosen)
    count = sum(own.gather.collective in again for own in uses)
    return result, f"{count} of {len(uses)} gathered again"


@dataclass(frozen=True)
class _Uses:
    """Where in the graph a gathered weight is used, forward and backward."""

    gather: Collective
    forward: list[fx.Node]
    backward: list[fx.Node]

    @staticmethod
    def of(gather: Collective) -> _Uses:
        users = [user for node in gather.finish for user in node.users if user not in gather.finish]
        return _Uses(gather, [u for u in users if not is_backward(u)], [u for u in users if is_backward(u)])

    def spread_over(self, uses: list[_Uses]) -> bool:
        """Whether another layer's weight is used between the last forward use and the first backward one."""
        if not self.forward or not self.backward:
            return False
        end, begin = max(self.forward), min(self.backward)
        others = [other for other in uses if other.gather.layer != self.gather.layer]
        return any(end < at < begin for other in others for at in (*other.forward, *other.backward))
