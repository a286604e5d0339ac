"""What every benchmark shares: repeats, medians, a table, and a JSON file that says where it was measured."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import INITIALIZER_RANGE, architecture

GRACE_S = 60.0  # that what is asked to end has for it


def arguments(description: str, prog: str | None = None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog, description=description)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs after one warm-up (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    return parser


def random_model(arch: str, device: str) -> Decoder:
    """The architecture with random weights; no token ends a completion."""
    return random_weights(first_layers(arch), device)


def first_layers(arch: str, count: int | None = None) -> ModelConfig:
    """The architecture with so many of its layers, or all; no token ends a completion."""
    found = architecture(arch)
    count = min(count or found.num_layers, found.num_layers)
    return replace(found.first_layers(count), eos_token_ids=())


def random_weights(config: ModelConfig, device: str) -> Decoder:
    """Drawn on the device, which is many times faster than `initialize`."""
    model = Decoder(config, torch.float32 if device == "cpu" else torch.bfloat16, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if fill := model.init_constants.get(name):  # biases, and weights of norms around 0, are random instead
                parameter.fill_(fill)
            else:
                parameter.normal_(0, INITIALIZER_RANGE)
        for buffer in model.buffers():  # biases of routers
            buffer.normal_(0, INITIALIZER_RANGE)
    return model


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth(device: str) -> float:
    """Bytes a second that summing 8 GiB reads here, or 256 MiB on a CPU: the best of five."""
    block = torch.ones(2**32 if device == "cuda" else 2**27, dtype=torch.bfloat16, device=device)
    return block.nbytes / min(seconds(block.sum, device) for _ in range(5))


def product_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a large square product here: the best of five."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    a @ b
    return 2 * size**3 / min(seconds(lambda: a @ b, device) for _ in range(5))


def graph_us(run: Callable[[], object], replays: int = 10, samples: int = 7) -> float:
    """Microseconds of a CUDA graph of what one call launches: the median of `samples` means over `replays`. On a CPU,
    whose times mean nothing here, of one call."""
    if not torch.cuda.is_available():
        return 1e6 * seconds(run, "cpu")
    graph = cuda_graph([run])
    graph.replay()
    return statistics.median(1e6 * replay_s(graph, replays) for _ in range(samples))


def streak_us(run: Callable[[], object], replays: int = 3, samples: int = 5) -> float:
    """`graph_us` of a graph that waits for those of other processes, which call this too: replays follow one another
    without a pause, and the first, in which the processes come together, are not timed."""
    if not torch.cuda.is_available():
        return 1e6 * seconds(run, "cpu")
    graph = cuda_graph([run])
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 1)]
    for mark in marks:
        for _ in range(replays):
            graph.replay()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(1e3 * a.elapsed_time(b) / replays for a, b in itertools.pairwise(marks))


def cuda_graph(runs: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of these calls in turn; the first is called once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        runs[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may ask for NCCL's events
        for run in runs:
            run()
    return graph


def replay_s(graph: torch.cuda.CUDAGraph, replays: int = 1) -> float:
    """Seconds of one of so many replays, by the device's clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / replays


def alternate(runs: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, list[float]]:
    """Times of each, taken in turn so that a drift of the machine meets all alike; one warm-up each first."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run, device))
    return times


def summary(times: list[float]) -> dict[str, float]:
    """Median, minimum and maximum in seconds."""
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}


def finish(name: str, figures: dict[str, Any], rows: list[list[str]], path: Path | None) -> None:
    """Write the JSON file, marked as complete, and print the table."""
    save(name, {**figures, "complete": True}, path)
    show(rows)


def show(rows: list[list[str]]) -> None:
    """Print a table, its heads first."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass
class Report:
    """What a case of `run.py` has found so far.

    Attributes:
        figures: of the JSON file.
        tables: printed at the end, each with its heads first.
        notes: lines below them.
        complete: nothing that was to be measured is missing.
    """

    name: str
    path: Path | None
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[list[list[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    complete: bool = True

    def save(self) -> None:
        """After every part, so that what ends a long benchmark early costs only the rest."""
        save(self.name, self.figures, self.path)

    def finish(self) -> None:
        """Write the JSON file, marked as complete if it is, and print what there is to say."""
        if self.figures:
            save(self.name, {**self.figures, "complete": self.complete}, self.path)
        for table in self.tables:
            show(table)
        print("\n".join(self.notes), end="\n" * bool(self.notes))


def save(name: str, figures: dict[str, Any], path: Path | None) -> None:
    """Write the JSON file."""
    if path is not None:
        write_json({"benchmark": name, **made_by(), **figures}, path)


def in_a_process(case: str, *given: object, environment: dict[str, str] | None = None) -> Any:
    """What `part` of this case returns in a process of its own, whose first words are `given`.

    Raises `subprocess.CalledProcessError` when it fails.
    """
    command = [sys.executable, str(Path(__file__).with_name("run.py")), case, "--part", *map(str, given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def torchrun(processes: int) -> list[str]:
    """The words that start so many processes of a script, whose words follow."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def ended(command: Sequence[str], limit_s: float, **environment: str) -> str:
    """What a command prints that ends well. `SystemExit` with the end of that where it does not, or not in time: it is
    asked to end first, and with a launcher its processes, which would go on beside what comes next."""
    to_here: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, **to_here) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                said, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
            raise SystemExit(f"not done after {limit_s:.0f} s\n{said[-4000:]}") from None
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise SystemExit(f"ended with {process.returncode}\n{said[-4000:]}")
    return said


def require_gpus(device: str, processes: int) -> None:
    """`SystemExit` where there are not as many GPUs."""
    if device == "cuda" and (there := torch.cuda.device_count()) < processes:
        raise SystemExit(f"--processes is {processes}, and there are {there} GPUs")


def peer_environment(**more: str) -> dict[str, str]:
    """Variables for a peer's process: how threads wait, which importing lockstep chose for this one, is left to it."""
    chosen = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
    return {name: value for name, value in os.environ.items() if name not in chosen} | more


def vllm_times(model: Path, cases: Mapping[str, Any], repeats: int, *more: str, **environment: str) -> dict[str, Any]:
    """What `peer_vllm.py` finds in a process of its own: `version`, `start_s`, and the times of the `cases` that it
    came to; where it failed, `failed` is the end of what it printed.

    Args:
        model: its folder, beside which the figures are written.
        more: further flags.
    """
    path = model.with_suffix(".json")
    path.unlink(missing_ok=True)
    peer = str(Path(__file__).with_name("peer_vllm.py"))
    command = [sys.executable, peer, "--model", str(model), "--json", str(path)]
    command += ["--repeats", str(repeats), "--cases", json.dumps(cases), *more]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=peer_environment(**environment)
    )
    found = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    return found | ({"failed": done.stdout[-3000:]} if done.returncode else {})


def write_json(content: Any, path: Path) -> None:
    """In one piece: whoever ends this process leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def command(words: Sequence[str]) -> str:
    """How figures are made again: this process's words, but for the file that figures go to; of what lies elsewhere
    the name alone."""
    script, *given = words
    if "--json" in given:
        at = given.index("--json")
        given = given[:at] + given[at + 2 :]
    return shlex.join(
        ["python", f"benchmarks/{Path(script).name}", *(word if word[:1] != "/" else Path(word).name for word in given)]
    )


@functools.cache
def made_by() -> dict[str, Any]:
    """When, where and from which commit figures are."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    given = os.environ.get("LOCKSTEP_COMMIT")  # a copy of the tree has no repository, or an older one
    commit = given or subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "command": command(sys.argv),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "device": device,
        "cpu_threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
