"""Making and storing a run's graphs ahead of time."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ..config import RunConfig
from ..distributed import World
from ..errors import InputError, LockstepError
from ..graph import Store
from .build import TrainingSession, resolve, task_reader
from .degree import choose_generator_tp
from .processes import join_processes
from .warm_up import warm_up


def precompile(config: RunConfig) -> dict[str, Any]:
    """Do what `lockstep train` does before its first step, and report the outcome for each graph: load the model, make
    or load its graphs, record them and check them, which also compiles the kernels. Under `torchrun` every process
    calls this; the first stores the graphs, and all return its report. Raises `InputError` if the configuration has no
    graphs to store, and `LockstepError` if a graph differs from eager or the cache folder cannot be written."""
    with join_processes(config) as world:
        return _precompile(world.run_on_all(lambda: _require_storable(resolve(config, world.size))), world)


def _require_storable(config: RunConfig) -> RunConfig:
    if not config.compile.plugins[0].hook:
        raise InputError(
            "compile.capture is none, so there is nothing to compile; set --compile.capture step (left out, it is step "
            "on a GPU and none on a CPU)"
        )
    if not config.compile.plugins[0].graphs or set(config.compile.inductor) != {"backward"}:
        raise InputError(
            f"compile.capture is {config.compile.capture} and compile.inductor {list(config.compile.inductor)}: "
            "layers, and regions that both roles share, are compiled where they run and not kept; use step or joint, "
            "and backward"
        )
    user_passes = [name for name in config.compile.pass_names if ":" in name]
    if user_passes or not all(plugin.shipped for plugin in config.compile.plugins):
        what = (
            f"compile.passes has {user_passes[0]}" if user_passes else "compile.capture or compile.backend is your own"
        )
        raise InputError(f"{what}: such graphs are made at every start and not kept; remove it, or use train")
    if config.compile.dump:
        raise InputError("--compile.dump shows how graphs are made, and none is kept then; remove it, or use train")
    return config


def _precompile(config: RunConfig, world: World) -> dict[str, Any]:
    start = time.perf_counter()
    read = task_reader(config)
    config, world, _ = choose_generator_tp(config, world, read)
    run = TrainingSession(config, world, read=read)
    runtime, store = run.runtime, run.runtime.store
    assert store is not None
    try:
        with world.deadline("making and checking graphs", timeouts=10):
            warm_up(run)
        graphs = world.broadcast_from_first(lambda: _graph_outcomes(store))
        checks = {name: sum(getattr(verdict, name) for verdict in run.verdicts) for name in ("cases", "known")}
    finally:
        runtime.close()
    outcomes = [graph["outcome"] for graph in graphs]
    return {
        "folder": str(store.folder),
        "device": str(run.policy.model.embed.device),
        "processes": world.size,
        "made": outcomes.count("made"),
        "reused": outcomes.count("reused"),
        "refused": outcomes.count("refused"),
        "traces": runtime.captures,
        "graphs": graphs,
        "checks": checks,
        "bytes": sum(graph["bytes"] for graph in graphs),
        "folder_bytes": store.size(),
        "seconds": dict(run.timings.seconds),
        "total_s": time.perf_counter() - start,
    }


_MAX_REASONS = 8  # shown for one graph at most
_OUTCOMES = {"loaded": "reused", "refused": "refused", "absent": "made"}


def _graph_outcomes(store: Store) -> list[dict[str, Any]]:
    """Each graph that was looked up, its outcome and its stored size in bytes; `refused` ones were made anew. Raises
    `LockstepError` if one could not be written."""
    graphs = [
        asdict(lookup) | {"outcome": _OUTCOMES[lookup.outcome], "bytes": store.size(lookup.file)}
        for lookup in store.lookups
    ]
    if lost := len(store.unwritten):
        raise LockstepError(
            f"{store.folder} cannot be written: {lost} of {len(graphs)} graphs are not kept; set LOCKSTEP_CACHE"
        )
    return graphs


def render(result: dict[str, Any]) -> str:
    lines = [f"{result['folder']}, for {result['device']}"]
    for graph in result["graphs"]:
        lines.append(f"  {graph['outcome']:<8} {graph['bytes'] / 1024:>8.1f} KiB  {graph['title']}")
        lines += [f"           {reason}" for reason in graph["reasons"][:_MAX_REASONS]]
        if len(graph["reasons"]) > _MAX_REASONS:
            lines.append(f"           and {len(graph['reasons']) - _MAX_REASONS} more")
    checks, seconds, traces = result["checks"], result["seconds"], result["traces"]
    counts = f"{result['made']} made, {result['reused']} reused, {result['refused']} refused and made anew"
    sizes = f"{result['bytes'] / 2**20:.1f} MiB, {result['folder_bytes'] / 2**20:.1f} in the folder"
    lines.append(f"{counts}; {traces} trace{'s' * (traces != 1)}; {sizes}")
    lines.append(f"{checks['cases']} launches checked against eager, {checks['known']} of them before")
    spent = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
    lines.append(f"{result['total_s']:.1f} s: {spent}")
    return "\n".join(lines)
