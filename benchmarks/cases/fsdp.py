"""Steps of reinforcement learning on several processes, beside one process that trains on the same micro-batches.

One model, one seed, several ways to arrange the collectives; all must write the same rollouts and weights in every bit,
those that share products the same as each other, and in the first step the rollouts of all.
Each way is `lockstep train` in processes of its own (`torchrun`), with captured graphs, on CUDA graphs where there are
GPUs. Times are medians over the steps but the first, of the slowest process; memory is that of the fullest GPU. Where
ranks share GPUs, times and memory mean nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import seed_workload
from common import Report, ended, torchrun

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from sharing import AS_RANK, KV_CACHE_TOKENS, WHERE, on_shared_gpus

LIMIT_S = 600.0  # of a way
TIMES = ("step", "generate", "forward_backward", "optim_step", "sync")
PUSHED = "products shared, words pushed"  # by GPUs alone
WAYS: dict[str, tuple[bool, tuple[str, ...]]] = {  # whether on several processes, and flags
    "one process": (False, ()),
    "sharded": (True, ()),
    "unbucketed": (True, ("--compile.no-bucket-collectives",)),
    "in the order of the trace": (True, ("--compile.no-bucket-collectives", "--compile.no-reorder-collectives")),
    "weights gathered": (True, ("--parallel.zero-stage", "3")),
    "gathered weights kept": (True, ("--parallel.zero-stage", "3", "--compile.no-reshard-after-forward")),
    "products shared": (True, ("--parallel.tp", "2")),
    "products shared in both roles": (
        True,
        ("--parallel.tp", "2", "--parallel.generator-tp", "2", "--parallel.no-symmetric-memory"),
    ),
    PUSHED: (True, ("--parallel.tp", "2", "--parallel.generator-tp", "2")),
}
SHARED = "products shared"  # their sums in gradients have another order: weights are each other's


def command(name: str, folder: Path, given: argparse.Namespace) -> list[str]:
    """Of a way, on the model and the prompts in `folder`, which its run folder is made in."""
    (several, own), on_gpu = WAYS[name], given.device == "cuda"
    prompts, samples, tokens = (16, 8, 256) if on_gpu else (4, 4, 12)
    prompts = -(-prompts // given.processes) * given.processes  # as many for each
    if given.ranks_share_gpu:
        tokens, own = 32, (*own, "--generator.kv-cache-tokens", str(KV_CACHE_TOKENS))
    size = Size(prompts, samples, tokens, given.steps)
    own += ("--parallel.batch-shards", str(given.processes), "--optimizer.learning-rate", "1e-5")
    words = training(run_dir(name, folder), given.device, given.processes if several else 1, size, *own)
    launcher = len(torchrun(given.processes))
    return [*words[:launcher], *AS_RANK, *words[launcher:]] if several and given.ranks_share_gpu else words


class Size(NamedTuple):
    """Of a run: prompts a step, samples of each, tokens of a sample, steps."""

    prompts: int
    samples: int
    tokens: int
    steps: int


def training(run: Path, device: str, processes: int, size: Size, *own: str) -> list[str]:
    """`lockstep train` in so many processes, on the model and the prompts beside its run folder; samples are as long
    as they may be."""
    start = torchrun(processes) if processes > 1 else [sys.executable]
    return [
        *(*start, "-m", "lockstep", "train", "dataset", "--run-dir", str(run)),
        *("--model", str(run.parent / "model"), "--data", str(run.parent / "prompts.jsonl"), "--device", device),
        *("--reward", f"{seed_workload.__file__}:coin", "--steps", str(size.steps), "--compile.capture", "step"),
        *("--trainer.prompts-per-step", str(size.prompts), "--sampling.num-generations", str(size.samples)),
        *("--sampling.max-completion-length", str(size.tokens), "--sampling.ignore-eos"),
        *("--task.validation-prompts", "0", "--metrics.no-progress", *own),
        *(("--parallel.timeout", "120") if processes > 1 else ()),
    ]


def run_dir(name: str, folder: Path) -> Path:
    return folder / name.replace(" ", "-")


def run_way(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """One way, from its run folder."""
    gpus = torch.cuda.device_count()
    shared = on_shared_gpus(given.processes, gpus) if given.ranks_share_gpu and WAYS[name][0] else {}
    return trained(run_dir(name, folder), command(name, folder, given), **shared)


def trained(run: Path, words: list[str], weights: bool = True, **environment: str) -> dict[str, Any]:
    """What a run comes to that this command makes, its weights' digest included or not."""
    try:
        ended(words, LIMIT_S, **environment)
    except SystemExit as error:
        raise SystemExit(f"{run.name}: {error}") from error
    return outcome(run, weights)


def outcome(run_dir: Path, weights: bool = True) -> dict[str, Any]:
    """Figures of a run that came to its end, its weights' digest included or not."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_dir / "summary.json").read_text())
    certificate = json.loads((run_dir / "parity.json").read_text())
    later = steps[1:] or steps
    model = sorted((run_dir / "model").glob("*.safetensors")) if weights else []
    rollouts = (run_dir / "rollouts.jsonl").read_bytes().splitlines()  # of a text, other characters end lines too
    return {
        "steps": len(steps),
        "startup_s": summary["startup_s"],
        **{f"{part}_s": statistics.median(step.get(f"time/{part}", 0.0) for step in later) for part in TIMES},
        "tokens_per_s_per_gpu": statistics.median(step["perf/tokens_per_s_per_gpu"] for step in later),
        "peak_gib": max(step["memory/peak_gib"] for step in steps),
        "recompiles": steps[-1]["recompiles"],
        "replays": steps[-1]["graph_replays"],
        "passes": summary["compile"]["passes"],
        "tokens_checked": certificate["tokens_checked"],
        "tokens_different": certificate["tokens_different"],
        "rollouts_sha256": _digest(rollouts),
        "first_rollouts_sha256": _digest([line for line in rollouts if json.loads(line)["step"] == 0]),
        **({"weights_sha256": hashlib.sha256(b"".join(map(Path.read_bytes, model))).hexdigest()} if weights else {}),
    }


def _digest(lines: list[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2, help="GPUs, or processes of a CPU (default: 2)")
    parser.add_argument("--arch", help="default: qwen3-0.6b on GPUs, tiny on a CPU")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ranks-share-gpu", action="store_true", help="a few on each: for their words alone")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS))


def measure(given: argparse.Namespace, report: Report) -> None:
    on_gpu = given.device == "cuda"
    needed, there = 1 if given.ranks_share_gpu else given.processes, torch.cuda.device_count()
    if on_gpu and there < needed:
        raise SystemExit(f"--processes is {given.processes}, and there are {there} GPUs; --ranks-share-gpu needs one")
    arch = given.arch or ("qwen3-0.6b" if on_gpu else "tiny")
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    figures = report.figures
    figures |= {"arch": arch, "processes": given.processes, "allocator": allocator, "ways": {}}
    if given.ranks_share_gpu:
        figures["where"] = WHERE
        report.notes.append(f"{WHERE}: times and memory mean nothing")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        seed_workload.prepare(folder, arch)
        for name in given.only:
            if not on_gpu and name == PUSHED:
                continue
            figures["ways"][name] = way = run_way(name, folder, given)
            alike = [found for other, found in figures["ways"].items() if (SHARED in other) == (SHARED in name)]
            first = next(iter(figures["ways"].values()))
            for what in ("rollouts", "weights"):
                way[f"same_{what}"] = way[f"{what}_sha256"] == alike[0][f"{what}_sha256"]
            way["same_first_rollouts"] = way["first_rollouts_sha256"] == first["first_rollouts_sha256"]
            report.save()
    same = ("rollouts", "weights", "first_rollouts")
    heads = ["way", *(f"{part} ms" for part in TIMES), "GiB", "different", *(f"same {what}" for what in same)]
    rows = [heads]
    for name, way in figures["ways"].items():
        times = [f"{way[f'{part}_s'] * 1e3:.1f}" for part in TIMES]
        counts = f"{way['tokens_different']} of {way['tokens_checked']:,}"
        told = [str(way[f"same_{what}"]) for what in same]
        rows.append([name, *times, f"{way['peak_gib']:.2f}", counts, *told])
    report.tables.append(rows)
