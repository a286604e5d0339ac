"""Passes: named functions from a captured graph to another, applied in order, the verifier after each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...timings import Timings
from ..ir.captured import Captured, GraphError, inexact_results
from ..ir.verify import verify
from .bucket import bucket
from .canonicalize import canonicalize
from .compiled_subgraph import Regions
from .fuse import fuse
from .inductor import BACKWARD_PASS, common_digests, inductor, lacking
from .recompute import fit, recompute, saved_bytes
from .record import cudagraph
from .reorder import reorder
from .reshard import reshard


@dataclass(frozen=True)
class Pass:
    """A rewrite with its options bound.

    Attributes:
        preserves_numerics: no bit of any output or write changes. If some may, the pass says which by the calls that it
            puts in: `captured.is_exact` is false of them, and the check against eager (`trust`) bounds what depends on
            them.
        options: what it was made with, by name: two passes of one name and options do the same to a graph.
        apply: leaves its argument as it is; returns the new graph and, in a few words, what it did.
    """

    name: str
    preserves_numerics: bool
    apply: Callable[[Captured], tuple[Captured, str]]
    options: Mapping[str, Any] = field(default_factory=dict)


def pipeline(
    canonical: bool = True,
    recomputed: Sequence[str] = (),
    recorded: bool = False,
    split_at: Collection[str] = (),
    saved_gib: float = 0.0,
    resharded: bool = False,
    bucketed: bool = False,
    reordered: bool = False,
    compiled: Sequence[str] = (),
    regions: Regions | None = None,
    fused: bool = False,
) -> list[Pass]:
    """The passes that a configuration asks for, in order.

    Args:
        recomputed, saved_gib: see `recompute` and `fit`; nothing and 0 for neither.
        recorded, split_at: see `cudagraph`.
        resharded, bucketed, reordered: see `reshard`, `bucket` and `reorder`.
        compiled, regions: see `inductor`; nothing for none, and regions of their own.
        fused: see `fuse`; for graphs on a GPU.
    """
    budget = int(saved_gib * 2**30)
    passes = [
        (canonical, _bound("canonicalize", canonicalize)),
        (bool(recomputed), _bound("recompute", recompute, patterns=tuple(recomputed))),
        (saved_gib > 0, _bound("fit", fit, budget=budget)),
        (resharded, _bound("reshard", reshard)),
        (bucketed, _bound("bucket", bucket)),
        (reordered, _bound("reorder", reorder)),
        (fused, _bound("fuse", fuse)),
        (bool(compiled), _by_inductor(tuple(compiled), regions)),
        (recorded, _bound("cudagraph", cudagraph, split_at=tuple(sorted(split_at)))),
    ]
    return [p for wanted, p in passes if wanted]


def _bound(name: str, rewrite: Callable[..., tuple[Captured, str]], **options: Any) -> Pass:
    return Pass(name, True, partial(rewrite, **options), options)


def _by_inductor(choices: tuple[str, ...], regions: Regions | None) -> Pass:
    regions = Regions(Timings()) if regions is None else regions
    return Pass("inductor", False, partial(inductor, choices=choices, regions=regions), {"choices": choices})


def run_passes(captured: Captured, passes: Sequence[Pass], check: Callable[[Captured], Captured] = verify) -> Captured:
    """Apply `passes` in order and `check` the graph before the first and after each.

    Raises:
        GraphError: from the check, from a pass that puts in what it does not announce, or from one that was asked for
            and finds nothing to do.
    """
    check(captured)
    for p in passes:
        before = captured
        captured, note = p.apply(before)
        if p.preserves_numerics and (new := inexact_results(captured) - inexact_results(before)):
            raise GraphError(f"{captured.title}: {p.name} says that it changes no bits, and may change {min(new)}")
        line = f"{p.name}: {len(before.graph.nodes)} -> {len(captured.graph.nodes)} nodes; {note}"
        captured = check(replace(captured, log=(*captured.log, line), before=before))
    return captured


__all__ = [
    "BACKWARD_PASS",
    "Pass",
    "bucket",
    "canonicalize",
    "common_digests",
    "cudagraph",
    "fit",
    "fuse",
    "inductor",
    "lacking",
    "pipeline",
    "recompute",
    "reorder",
    "reshard",
    "run_passes",
    "saved_bytes",
]
