"""The summary of a run's captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .check.against_eager import Verdict
from .runtime import Runtime


def compile_report(runtime: Runtime, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Totals, each function's level, graphs, launches and verdict, and each graph's passes; empty if nothing is
    compiled."""
    if not runtime.compiles:
        return {}
    launches, replays, lookups = runtime.launches, runtime.replays, runtime.store.lookups if runtime.store else ()
    functions: dict[str, dict[str, Any]] = {}
    for function in runtime.programs:
        name = function.name
        about = functions.setdefault(name, {"level": function.level, "graphs": 0})
        about["graphs"] += len(function.graphs)
        about |= {"launches": launches[name], "replays": replays[name]}
    for verdict in verdicts:
        found = {"checked": verdict.cases, "known": verdict.known, "check_s": verdict.seconds, "faults": verdict.faults}
        functions.setdefault(verdict.function, {}).update(found)
    return {
        "traces": runtime.captures,
        "loaded": runtime.loaded,
        "refused": list(dict.fromkeys(reason for lookup in lookups for reason in lookup.reasons)),
        "graphs": sum(len(function.graphs) for function in runtime.programs),
        "recompiles": runtime.recompiles,
        "pool_gib": runtime.pool_bytes() / 2**30,
        "functions": functions,
        "passes": {title: list(log) for title, log in runtime.builder.logs.items()},
    }
