"""How long a run takes to its first step: with nothing kept from earlier, and with what the run before it kept.

The workload is that of `seed_workload`. Every run is a process of its own, over one cache folder for graphs and one
for Triton's kernels, both empty at first; start-up is all that comes before the first step, imports included. Then what
sharing saves: the graphs of the trainer alone, of the generator alone, and of both in one process, nothing kept. Beside
seconds on the wall stand the process's seconds of CPU, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import seed_workload

if TYPE_CHECKING:
    from common import Report

PARTS = ("trainer", "generator", "both")
PHASES = ("import", "load", "load_graphs", "import_tracer", "trace", "passes", "store_graphs", "compile", "record")
LATER = ("gate", "verify", "other")


def run(folder: Path, steps: int, kept: dict[str, str]) -> dict[str, Any]:
    """The workload in a new process with these cache folders; its figures."""
    return _process(kept, "train", folder, steps, repr(time.time()))


def compiled(folder: Path, part: str, kept: dict[str, str]) -> dict[str, float]:
    """Seconds of a new process that makes the graphs of one role or of both, and of that the making alone."""
    began = time.time()
    figures = _process(kept, part, folder)
    return {"process_s": time.time() - began, **figures}


def _process(kept: dict[str, str], *given: object) -> dict[str, Any]:
    from common import in_a_process

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = in_a_process("startup", *given, environment=os.environ | kept)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, **figures}


def part(name: str, folder: str, steps: str = "", began: str = "") -> dict[str, Any]:
    """The workload, for `train`; otherwise the graphs of a role or of both."""
    if name == "train":
        return seed_workload.ours(Path(folder), float(began), "strict", {"capture": "step"}, int(steps))
    return make_graphs(Path(folder), name)


def make_graphs(folder: Path, part: str) -> dict[str, float]:
    """Load the model and make the graphs that the steps of one role, or of both, need."""
    from lockstep.session.build import build

    run = build(seed_workload.configuration(folder, "strict", {"capture": "step"}, 1))
    began = time.perf_counter()
    if part != "generator":
        run.trainer.warm_up(run.shapes, run.sampling, check_parity=True)
    if part != "trainer":
        sequences = seed_workload.PROMPTS * seed_workload.SAMPLES
        run.engine.warm_up(sequences, run.shapes[0].max_len, run.sampling)
    seconds = time.perf_counter() - began
    traces = run.runtime.captures
    run.runtime.close()
    return {"making_s": seconds, "traces": traces}


def caches(folder: Path, name: str) -> dict[str, str]:
    """Empty cache folders, as environment variables."""
    return {"LOCKSTEP_CACHE": str(folder / name / "lockstep"), "TRITON_CACHE_DIR": str(folder / name / "triton")}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(repeats=3)
    parser.add_argument("--arch", help="named architecture (default: qwen3-0.6b on a GPU, tiny on a CPU)")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run (default: 10)")


def measure(args: argparse.Namespace, report: Report) -> None:
    arch = args.arch or ("qwen3-0.6b" if args.device == "cuda" else "tiny")
    figures = report.figures
    figures |= {"arch": arch, "steps": args.steps, "runs": {}, "sharing": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seed_workload.prepare(folder, arch)
        kept = caches(folder, "kept")
        for name in ("cold", *(f"warm {i + 1}" for i in range(args.repeats))):
            figures["runs"][name] = run(folder, args.steps, kept)
            (folder / "run").rename(folder / name.replace(" ", ""))
            report.save()
        figures["kept_bytes"] = {name: _size(Path(path)) for name, path in kept.items()}
        for part in PARTS:
            figures["sharing"][part] = compiled(folder, part, caches(folder, part))
    report.tables.append(rows(figures["runs"]))
    report.notes.append(sharing(figures["sharing"]))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rows(runs: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table: seconds by phase, of start-up, of the steps, and of everything."""
    shown = [name for name in (*PHASES, *LATER) if any(f["startup"].get(name, 0) >= 0.05 for f in runs.values())]
    table = [["run", *shown, "start-up s", "steps s", "total s", "CPU s", "traces", "loaded", "recompiles"]]
    for name, f in runs.items():
        cells = [f["startup"].get(phase, 0.0) for phase in shown] + [f["startup_s"], f["steps_s"], f["total_s"]]
        cells.append(f["cpu_s"])
        counts = [f["compile"]["traces"], f["compile"]["loaded"], f["recompiles"][-1]]
        table.append([name, *(f"{cell:.2f}" for cell in cells), *map(str, counts)])
    return table


def sharing(parts: dict[str, dict[str, float]]) -> str:
    """What one process for both roles saves."""
    each = ", ".join(f"{name} {parts[name]['process_s']:.2f} ({parts[name]['cpu_s']:.2f} of CPU)" for name in PARTS)
    saved = {}
    for kind in ("process_s", "cpu_s"):
        saved[kind] = (parts["trainer"][kind] + parts["generator"][kind]) / parts["both"][kind]
    factors = f"{saved['process_s']:.2f} times the seconds, {saved['cpu_s']:.2f} times the CPU of both in one"
    return f"graphs from nothing, s a process: {each}; apart they take {factors}"
