"""A real run, from random weights to held-out problems solved: the curve, samples and the certificate in one file.

`lockstep train` in a process of its own, with the flags that follow `--`. Kept are the mean reward of every step, each
validation, the parity certificate, what the run took, the resolved configuration and some rollouts of the first and of
the last step; the file is brought up to date every few seconds, so a run that is cut short still shows its curve.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from common import Report

POLL_S, GRACE_S = 5.0, 15.0
RUN, OUTPUT = "run", "output"
GROUPS, SAMPLES = 4, 3  # kept of the first and of the last step
KEPT = ("reward/mean", "reward/std", "frac_reward_zero_std", "response_length/mean", "entropy", "grad_norm", "lr",
        "parity/tokens_checked", "parity/tokens_different", "recompiles", "time/step", "time/generate",
        "memory/peak_gib")  # fmt: skip
COMMAND = "import sys; from lockstep.cli.main import main; sys.exit(main())"


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that another process may be writing."""
    with suppress(OSError):
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return []


def content(path: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    return None


def samples(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of a step's groups, and the texts and rewards of some of their samples."""
    return [
        {"prompt": g["prompt"], "samples": [{k: s[k] for k in ("text", "reward")} for s in g["samples"][:SAMPLES]]}
        for g in groups[:GROUPS]
    ]


def gathered(run: Path, output: Path) -> dict[str, Any]:
    """What the run folder holds by now."""
    metrics = lines(run / "metrics.jsonl")
    figures: dict[str, Any] = {"steps_done": len(metrics), "certificate": content(run / "parity.json")}
    figures["curve"] = {name: [m.get(name) for m in metrics] for name in KEPT}
    figures["validation"] = {
        m["step"] + 1: {k: v for k, v in m.items() if k.startswith("validation/")}
        for m in metrics
        if any(k.startswith("validation/") for k in m)
    }
    if summary := content(run / "summary.json"):
        figures["summary"], figures["validation"] = summary, summary["validation"]
    with suppress(OSError):
        figures["output"] = [x for x in output.read_text(encoding="utf-8").splitlines() if not x.startswith("step ")]
        figures["config"] = (run / "config.yaml").read_text(encoding="utf-8")
    if rollouts := lines(run / "rollouts.jsonl"):
        steps = {"first": rollouts[0]["step"], "last": rollouts[-1]["step"]}
        figures["rollouts"] = {n: samples([r for r in rollouts if r["step"] == step]) for n, step in steps.items()}
    return figures


def train(flags: list[str], folder: Path, limit: float, save_what: Callable[[], None]) -> bool:
    """Run it, calling `save_what` now and then; whether it came to its end, its own or that of its time."""
    command = [sys.executable, "-c", COMMAND, "train", *flags, "--run-dir", str(folder / RUN)]
    began = time.monotonic()
    with (folder / OUTPUT).open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.monotonic() - began < limit:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            save_what()
        in_time = process.poll() is not None
    finally:
        process.terminate()  # the run then writes its summary
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.returncode == 0 or not in_time


def shown(figures: dict[str, Any]) -> list[str]:
    found = [*figures.get("output", [])]
    for step, values in figures["validation"].items():
        measures = ", ".join(f"{k.split('/', 1)[1]} {v:.3f}" for k, v in values.items())
        found.append(f"after {step} steps: {measures}")
    if rewards := figures["curve"]["reward/mean"]:
        ends = mean(rewards[:10]), mean(rewards[-10:])
        of_all = f"{len(rewards)} steps, mean reward {ends[0]:.3f} to {ends[1]:.3f}"
        found.append(f"{of_all}, {figures['seconds']:.0f} s")
    return found


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="end the run then (default: 600)")
    parser.add_argument("flags", nargs="+", metavar="-- FLAGS", help="of `lockstep train`, a recipe first")


def measure(args: argparse.Namespace, report: Report) -> bool:
    began = time.monotonic()
    report.figures |= {"flags": args.flags, "limit_s": args.limit}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)

        def save() -> None:
            report.figures["seconds"] = time.monotonic() - began
            report.figures |= gathered(folder / RUN, folder / OUTPUT)
            report.save()

        ended = train(args.flags, folder, args.limit, save)
        save()
    report.notes += shown(report.figures)
    return not ended or not report.figures["steps_done"]
