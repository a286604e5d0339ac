"""Passes: named functions from a captured graph to another, applied in order, the verifier after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ..ir import Captured
from ..verify import verify
from .canonicalize import canonicalize
from .recompute import fit, recompute, saved_bytes
from .record import cudagraph


@dataclass(frozen=True)
class Pass:
    """A rewrite with its options bound.

    Attributes:
        preserves_numerics: no bit of any output or write changes.
        apply: leaves its argument as it is; returns the new graph and, in a few words, what it did.
    """

    name: str
    preserves_numerics: bool
    apply: Callable[[Captured], tuple[Captured, str]]


def pipeline(
    canonical: bool = True,
    recomputed: Sequence[str] = (),
    recorded: bool = False,
    split_at: Collection[str] = (),
    saved_gib: float = 0.0,
) -> list[Pass]:
    """The passes that a configuration asks for, in order.

    Args:
        recomputed, saved_gib: see `recompute` and `fit`; nothing and 0 for neither.
        recorded, split_at: see `cudagraph`.
    """
    passes = [
        (canonical, Pass("canonicalize", True, canonicalize)),
        (bool(recomputed), Pass("recompute", True, lambda captured: recompute(captured, tuple(recomputed)))),
        (saved_gib > 0, Pass("fit", True, lambda captured: fit(captured, int(saved_gib * 2**30)))),
        (recorded, Pass("cudagraph", True, lambda captured: cudagraph(captured, split_at))),
    ]
    return [p for wanted, p in passes if wanted]


def run_passes(captured: Captured, passes: Sequence[Pass], check: Callable[[Captured], Captured] = verify) -> Captured:
    """Apply `passes` in order and `check` the graph before the first and after each.

    Raises:
        GraphError: from the check, or from a pass that was asked for and finds nothing to do.
    """
    check(captured)
    for p in passes:
        before = captured
        captured, note = p.apply(before)
        line = f"{p.name}: {len(before.graph.nodes)} -> {len(captured.graph.nodes)} nodes; {note}"
        captured = check(replace(captured, log=(*captured.log, line), before=before))
    return captured


__all__ = ["Pass", "canonicalize", "cudagraph", "fit", "pipeline", "recompute", "run_passes", "saved_bytes"]
