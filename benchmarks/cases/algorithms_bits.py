"""Every algorithm, two updates a rollout: graphs on two processes, ended halfway and resumed, have eager's bits.

Eager is one process that is never ended. Each run is `lockstep train` with parity strict, on prompts cut for the seed
workload; several at once on a CPU. Compared are the final weights and what each step found; of the tokens none may
differ. On one GPU both runs are of one process. With `--more` what the file of `--json` holds as done is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from cases import seed_workload
from cases.learning import content
from cases.settings import TAIL, finished, outcome
from common import Report, made_by

from lockstep.algorithms import ALGORITHMS, SUPERVISED

STEPS, HALF = 4, 2
TEACHER = "tiny-llama"
COMPARED = ("loss", "grad_norm", "clip_ratio", "entropy", "reward/mean", "updates")


def settings(name: str, folder: Path, device: str) -> dict[str, object]:
    """Of both runs of an algorithm; in a rollout's second update ratios are not 1."""
    prompts, samples, tokens = (4, 4, 8) if device == "cpu" else (8, 8, 64)
    teacher = {"--loss.teacher": folder / "teacher" / "model"} if ALGORITHMS[name].has_teacher else {}
    return {
        "--model": folder / "model",
        "--data": folder / "prompts.jsonl",
        "--reward": "cases.algorithms:even_share",
        "--device": device,
        "--loss.loss-type": name,
        **teacher,
        "--trainer.prompts-per-step": prompts,
        "--trainer.num-iterations": 2,
        "--sampling.num-generations": samples,
        "--sampling.max-completion-length": tokens,
        "--task.validation-prompts": 0,
        "--optimizer.learning-rate": 1e-3,
        "--parallel.batch-shards": 2,
        "--checkpoint.interval": 1,
    }


def trained(words: list[list[str]], run: Path, limit: float) -> dict[str, Any]:
    """What a run leaves after these commands in turn; `failed` and what was printed where one does not end well."""
    began = time.monotonic()
    for command in words:
        code, printed = finished(command, limit, OMP_NUM_THREADS="1")
        if code != 0:
            return {"failed": f"exit code {code}", "tail": printed[-TAIL:]}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [{key: step.get(key) for key in COMPARED} for step in steps]
    return outcome(run) | {"found": found, "seconds": time.monotonic() - began}


def both(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The two runs of an algorithm, and what does not hold."""
    fixed = [str(word) for pair in settings(name, folder, args.device).items() for word in pair]
    runs = {way: folder / f"{name}-{way}" for way in ("eager", "resumed")}
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    alone = [sys.executable, "-m", "lockstep", "train"]
    together = [sys.executable, *(ranks if args.ranks > 1 else []), "-m", "lockstep", "train"]
    new = ["dataset", *fixed, "--metrics.no-progress", "--run-dir"]
    graphs = ["--compile.capture", "step", "--steps", str(HALF)]
    commands = {
        "eager": [[*alone, *new, str(runs["eager"]), "--compile.capture", "none", "--steps", str(STEPS)]],
        "resumed": [
            [*together, *new, str(runs["resumed"]), *graphs],
            [*together, "--resume", str(runs["resumed"]), "--steps", str(STEPS)],
        ],
    }
    found = {way: trained(commands[way], runs[way], args.limit) for way in runs}
    return {**found, "wrong": wrong(*found.values()), **{key: made_by()[key] for key in ("commit", "torch", "device")}}


def wrong(eager: dict[str, Any], resumed: dict[str, Any]) -> list[str]:
    """What does not hold of them."""
    failed = [f"{way}: {run['failed']}" for way, run in (("eager", eager), ("resumed", resumed)) if "failed" in run]
    if failed:
        return failed
    odd = [f"{run['tokens_different']} tokens different" for run in (eager, resumed) if not run["identical"]]
    if resumed["weights_sha256"] != eager["weights_sha256"]:
        odd.append("other weights")
    steps = [i + 1 for i, (a, b) in enumerate(zip(eager["found"], resumed["found"], strict=True)) if a != b]
    if steps or len(eager["found"]) != STEPS:
        odd.append(f"step {steps[0] if steps else len(eager['found'])} is another")
    if any(step["updates"] != 2 for step in eager["found"]):
        odd.append("steps without two updates")
    return odd


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-100m on a GPU")
    parser.add_argument("--only", nargs="*", help="algorithms; default: all")
    parser.add_argument("--ranks", type=int, help="default: 2, or 1 where there is one GPU")
    parser.add_argument(
        "--processes", type=int, help="algorithms at once; default: half as many as cores, one on a GPU"
    )
    parser.add_argument("--more", action="store_true", help="only what --json does not hold yet")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of a command; default: 300")


def measure(args: argparse.Namespace, report: Report) -> bool:
    on_cpu, began = args.device == "cpu", time.monotonic()
    args.ranks = args.ranks or (2 if on_cpu else min(2, torch.cuda.device_count()))
    processes = args.processes or (max(1, (os.cpu_count() or 1) // 2) if on_cpu else 1)
    names = [n for n in ALGORITHMS if n != SUPERVISED and (not args.only or n in args.only)]
    before = content(args.json) if args.more and args.json else None
    held: dict[str, dict[str, Any]] = before["algorithms"] if before else {}
    found = report.figures["algorithms"] = {name: made for name, made in held.items() if not made["wrong"]}
    report.figures |= {"ranks": args.ranks, "steps": STEPS, "arch": args.arch or ("tiny" if on_cpu else "qwen3-100m")}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(processes) as pool:
        folder = Path(scratch)
        (folder / "teacher").mkdir()
        seed_workload.prepare(folder, report.figures["arch"])
        seed_workload.prepare(folder / "teacher", TEACHER)

        def run(name: str) -> None:
            found[name] = both(name, folder, args)
            how = "; ".join(found[name]["wrong"]) or "holds"
            print(f"{name}: {how}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            report.save()

        list(pool.map(run, [name for name in names if name not in found]))
    report.complete = found.keys() >= ALGORITHMS.keys() - {SUPERVISED}
    rows = [["algorithm", "tokens checked", "different", "same bits"]]
    for name in names:
        runs = [found[name][way] for way in ("eager", "resumed")]
        counts = [str(sum(run.get(key, 0) for run in runs)) for key in ("tokens_checked", "tokens_different")]
        rows.append([name, *counts, "; ".join(found[name]["wrong"]) or "yes"])
    report.tables.append(rows)
    return any(f["wrong"] for f in found.values())
