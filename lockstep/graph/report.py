"""What the captured graphs of a run are and do, for its metrics and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .check.against_eager import Verdict
from .compiler import Compiler


def replay_metrics(compiler: Compiler) -> dict[str, int]:
    """`recompiles`, `graph_replays` and the replays of each function, since the start."""
    replays = compiler.replays
    by_function = {f"graph_replays/{name}": count for name, count in sorted(replays.items()) if count}
    return {"recompiles": compiler.recompiles, "graph_replays": replays.total(), **by_function}


def refusals(compiler: Compiler) -> list[str]:
    """Why stored graphs were refused, each reason once."""
    lookups = compiler.store.lookups if compiler.store else []
    return list(dict.fromkeys(reason for lookup in lookups for reason in lookup.reasons))


def compile_report(compiler: Compiler, verdicts: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Totals, each function's level, graphs and launches, what the check of it found, and each trace's passes; empty
    where nothing is compiled."""
    if not compiler.compiles:
        return {}
    launches, replays = compiler.launches, compiler.replays
    functions: dict[str, dict[str, Any]] = {}
    for function in compiler.functions:
        name = function.name
        about = functions.setdefault(name, {"level": function.level, "graphs": 0})
        about["graphs"] += len(function.graphs)
        about |= {"launches": launches[name], "replays": replays[name]}
    for verdict in verdicts:
        found = {"checked": verdict.cases, "known": verdict.known, "check_s": verdict.seconds, "faults": verdict.faults}
        functions.setdefault(verdict.function, {}).update(found)
    return {
        "traces": compiler.captures,
        "loaded": compiler.loaded,
        "refused": refusals(compiler),
        "graphs": sum(len(function.graphs) for function in compiler.functions),
        "recompiles": compiler.recompiles,
        "pool_gib": compiler.recorder.reserved_bytes() / 2**30 if compiler.recorder else 0.0,
        "functions": functions,
        "passes": {title: list(log) for title, log in compiler.nodes.items()},
    }
