"""What CPU threads cost a step: as lockstep chooses them, and as many as cores, which spin while they wait.

The workload is that of `seed_workload`, in a process of its own each time; on an idle machine, and with busy loops
beside it that take some of its cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import seed_workload

if TYPE_CHECKING:
    from common import Report


def part(folder: str, steps: str) -> dict[str, Any]:
    """Seconds of each step, and how many threads there were."""
    figures = seed_workload.ours(Path(folder), time.time(), "strict", {}, int(steps))
    import torch

    return {"step_s": figures["step_s"], "total_s": figures["total_s"], "threads": torch.get_num_threads()}


@contextmanager
def loops(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first is left out (default: 6)")
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1], help="busy loops beside it (default: 0 1)")


def measure(args: argparse.Namespace, report: Report) -> None:
    from common import in_a_process, peer_environment

    cores = len(os.sched_getaffinity(0))
    plain = peer_environment()
    spinning = peer_environment(OMP_NUM_THREADS=str(cores), OMP_WAIT_POLICY="ACTIVE")
    kept = {k: v for k, v in plain.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    arch = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    report.figures |= {"arch": arch, "cores": cores, "cores_of_host": os.cpu_count(), "runs": []}
    rows = [["threads", "busy loops", "step ms", "slowest", "start to end s"]]
    report.tables.append(rows)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        seed_workload.prepare(folder, arch)
        for busy in [0, *args.loops]:  # the first run makes what later ones find
            for name, environment in (("lockstep's choice", kept), (f"{cores}, spinning", spinning)):
                with loops(busy):
                    found = in_a_process("threads", folder, args.steps, environment=environment)
                later = found["step_s"][1:]
                report.figures["runs"].append({"name": name, "busy_loops": busy, **found})
                milliseconds = [f"{statistics.median(later) * 1e3:.0f}", f"{max(later) * 1e3:.0f}"]
                rows.append([f"{name} ({found['threads']})", str(busy), *milliseconds, f"{found['total_s']:.1f}"])
                report.save()
