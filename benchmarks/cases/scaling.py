"""Weak scaling: the same work a GPU on one and on more, whole steps of reinforcement learning by `lockstep train`.

Each process has so many prompts a step, with samples of equal lengths, or of lengths that are drawn (lognormal). A
rate is that of one GPU: the seconds of the fewest processes over those of more. Tokens a second are a step's, a
prompt's once for each of its samples, by the time of a step and all GPUs. What more processes add to a training step
(`forward_backward`) is at least what their collectives take that is not hidden behind computing, so no other run
without collectives is needed for a bound. Beside it stands the share of the products' operations in what the GPUs can
do, 989 TFLOP/s each by the vendor's sheet: 6 for each weight and packed token but the input embedding's, the head's
for scored tokens alone; neither attention nor what is computed again. Nothing but the sizes is set, unless `--flags`
says so.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import seed_workload
from cases.fsdp import Size, run_dir, trained, training
from common import Report, in_a_process, require_gpus

from lockstep.models import num_parameters
from lockstep.models.init import architecture

LENGTHS = Path(__file__).parents[1] / "lengths.py"
PEAK = 989e12  # bf16 operations a second of an H100 or H200
PHASES = "generate", "forward_backward"


def operations(arch: str, size: Size, prompt: int, response: float) -> float:
    """Of the products of a training step: of prompts of so many tokens each once, and the head where a completion's are
    scored, so many each on average. Of a layer's experts those count that a token goes to."""
    config = architecture(arch)
    head = config.vocab_size * config.hidden_size
    body = num_parameters(config) - head * (1 if config.tie_word_embeddings else 2)
    if (moe := config.moe) is not None:
        idle = moe.num_experts - moe.num_experts_per_token
        body -= config.moe_layers * idle * 3 * config.hidden_size * moe.intermediate_size
    scored = size.prompts * size.samples * response
    return 6.0 * (body * (scored + size.prompts * prompt) + head * scored)


def measured(count: int, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """So many processes, each with its part of `count` times the work; with `--warm` a second start's figures, too."""
    size = Size(given.prompts * count, given.samples, given.tokens, given.steps)
    found: dict[str, Any] = {}
    for again in range(2 if given.warm else 1):
        run = run_dir(f"{count} processes{' warm' * again}", folder)
        drawn = ("--task.environment", f"{LENGTHS}:Lognormal", "--task.max-turns", "1") if given.mean else ()
        words = training(run, given.device, count, size, *drawn, *shlex.split(given.flags))
        way = trained(run, words, weights=False)
        summary = json.loads((run / "summary.json").read_text())
        way["startup"] = {k.removeprefix("startup/"): v for k, v in summary.items() if k.startswith("startup/")}
        functions = summary.get("compile", {}).get("functions", {})
        way["checks_s"] = {name: function.get("check_s") for name, function in functions.items()}
        way["memory"], way["parallel"] = summary.get("memory"), summary.get("parallel")
        shutil.rmtree(run / "model", ignore_errors=True)  # of many counts they would fill a disk
        found = found | {"warm": way} if again else way
    response = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["response_length/mean"]
    done = operations(given.arch, size, given.prompt, response)
    share, found["response"] = done / (found["forward_backward_s"] * count * PEAK), response
    return {"processes": count, "of_peak": share, **found}


def part(folder: str, arch: str, prompt: str, mean: str, sigma: str) -> dict[str, Any]:
    """The model and the prompts of all runs."""
    seed_workload.prepare(Path(folder), arch)
    texts = [(text * (1 + int(prompt) // len(text)))[-int(prompt) :] for text in seed_workload.prompts()]
    rows = [json.dumps({"prompt": text, "mean": float(mean), "sigma": float(sigma)}) for text in texts]
    (Path(folder) / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return {}


def add_rates(counts: list[dict[str, Any]]) -> None:
    """To those that were measured so far, in any order: the seconds of the fewest processes over theirs."""
    first = min(counts, key=lambda way: way["processes"])
    for way in counts:
        way["rate"] = {phase: first[f"{phase}_s"] / way[f"{phase}_s"] for phase in PHASES}


def row(way: dict[str, Any]) -> list[str]:
    """Of the table."""
    times = [f"{way[f'{phase}_s'] * 1e3:.1f}" for phase in PHASES]
    rates = [f"{way['rate'][phase]:.3f}" for phase in PHASES]
    about = [
        f"{way['tokens_per_s_per_gpu']:,.0f}",
        f"{way['of_peak']:.3f}",
        f"{way['step_s'] * 1e3:.0f}",
        f"{way['peak_gib']:.2f}",
    ]
    start = " ".join(f"{one['startup_s']:.1f}" for one in (way, way.get("warm")) if one)
    different = f"{way['tokens_different']} of {way['tokens_checked']:,}"
    return [str(way["processes"]), *times, *rates, *about, start, different]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arch", default="qwen3-0.6b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--prompts", type=int, default=16, help="of a process, a step")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=seed_workload.PROMPT_TOKENS, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample, or the most that it may have")
    parser.add_argument("--mean", type=float, default=0.0, help="of samples' tokens, lognormal (default: all alike)")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of --mean")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", action="store_true", help="start each a second time, for the seconds of a warm start")
    parser.add_argument("--flags", default="", help="more flags of `lockstep train`, in one word")


def measure(given: argparse.Namespace, report: Report) -> bool:
    require_gpus(given.device, max(given.processes))
    settings = {name: value for name, value in vars(given).items() if name != "json"}
    report.figures |= {**settings, "counts": []}
    heads = [f"{phase} ms" for phase in PHASES] + [f"{phase}, rate" for phase in PHASES]
    heads = ["processes", *heads, "tokens/s/GPU", "of 989", "step ms", "GiB", "start s", "different"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # By a process that leaves nothing on the GPU that the runs plan with.
        in_a_process("scaling", folder, given.arch, given.prompt, given.mean, given.sigma)
        for count in given.processes:
            report.figures["counts"].append(measured(count, folder, given))
            add_rates(report.figures["counts"])
            report.save()
    report.tables.append([heads, *map(row, report.figures["counts"])])
    return any(way["tokens_different"] or way["recompiles"] for way in report.figures["counts"])
