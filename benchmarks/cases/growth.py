"""How speed and memory grow with the model and with the length of its sequences, on one GPU.

Training: the RL step's own work (a prompt of eight completions once, then clip and AdamW) at several sizes of 9,800
tokens, and at several lengths of about 16,384 tokens. Generation: 40 sequences as 5 prompts of 8. Each figure stands
beside its floor: matrix products in training, bytes that decoding must read in generation. `--plot` draws them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases.generate import Case, Ours, byte_floor_s, random_prompts
from cases.train_step import Ours as TrainStep
from cases.train_step import floor, groups
from common import Report, random_model, seconds

GIB = 2**30
TRAIN_SIZES, TRAIN_LENGTHS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"), (1024, 4096, 16384)
GENERATE_SIZES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
GENERATE_CASE = Case(5, 8, 145, 100)
LENGTH_TOKENS = 16384  # a batch of the length sweep


def train(arch: str, sequences: int, length: int, shared: int, prompt: int, device: str, repeats: int) -> dict:
    """The step's median time, its floor and the peak memory."""
    tokens = torch.randint(0, 256, (sequences, length), generator=torch.Generator().manual_seed(1))
    if shared > 1:
        tokens[:, :prompt] = tokens[::shared, :prompt].repeat_interleave(shared, 0)[:sequences]
    made = groups(tokens, shared, prompt)
    packed = sum(len(g.prompt_ids) + sum(len(s.token_ids) - 1 for s in g.rollouts) for g in made)
    logit_rows = sum(len(s.token_ids) for g in made for s in g.rollouts)
    model = random_model(arch, device)
    found = measured(TrainStep(model, made), repeats, device)
    found["floor_s"] = min(seconds(floor(model, packed, logit_rows), device) for _ in range(3))
    return {"arch": arch, "sequences": sequences, "length": length, "tokens": sequences * length, **found}


def generate(arch: str, case: Case, device: str, repeats: int) -> dict:
    """The round's median time, its floor and the peak memory."""
    model = random_model(arch, device)
    found = measured(Ours(model, case, random_prompts(case.prompts, lambda: case.prompt)), repeats, device)
    found["floor_s"] = byte_floor_s(model, case) if device == "cuda" else None
    return {"arch": arch, **vars(case), "tokens": case.sequences * case.new, **found}


def measured(run: Callable[[], object], repeats: int, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run()
    times = [seconds(run, device) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None
    return {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times), "peak_gib": peak}


def attempt(name: str, run: Callable[[], dict]) -> dict:
    """`run()`, or why not; memory is given back in between."""
    try:
        return {"name": name, **run()}
    except torch.cuda.OutOfMemoryError as error:
        return {"name": name, "failed": str(error).splitlines()[0]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def plot(figures: dict[str, list[dict]], path: Path) -> None:
    """Tokens a second and peak memory of every row, floors in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = {"training by size": "train_sizes", "training by length": "train_lengths", "generation": "generate"}
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for axis, (title, key) in zip(axes, parts.items(), strict=True):
        rows = [r for r in figures[key] if "failed" not in r]
        names = [r["name"] for r in rows]
        axis.bar(names, [r["tokens"] / (r["floor_s"] or r["median_s"]) for r in rows], color="0.88", label="floor")
        axis.bar(names, [r["tokens"] / r["median_s"] for r in rows], color="#3b6ea5", width=0.5, label="lockstep")
        for i, r in enumerate(rows):
            memory = f"{r['peak_gib']:.0f} GiB" if r["peak_gib"] else ""
            axis.annotate(memory, (i, r["tokens"] / r["median_s"]), ha="center", va="bottom")
        axis.set_title(title)
        axis.set_ylabel("tokens a second")
    axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the figures here")
    parser.add_argument("--read", type=Path, metavar="JSON", help="measure nothing and draw what is in this file")
    parser.add_argument("--tiny", action="store_true", help="the tiny model only, to try the script")


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.read:
        if not args.plot:
            raise SystemExit("--read draws a file's figures: say where to with --plot")
        plot(json.loads(args.read.read_text(encoding="utf-8")), args.plot)
        raise SystemExit
    sizes, more = (("tiny",), ("tiny",)) if args.tiny else (TRAIN_SIZES, GENERATE_SIZES)
    lengths, total = ((64, 128), 512) if args.tiny else (TRAIN_LENGTHS, LENGTH_TOKENS)
    d, n = args.device, args.repeats
    work: dict[str, list[tuple[str, Callable[[], dict]]]] = {
        "train_sizes": [(a, lambda a=a: train(a, 40, 245, 8, 145, d, n)) for a in sizes],
        "train_lengths": [(f"{x}", lambda x=x: train(sizes[0], total // x, x, 1, 1, d, n)) for x in lengths],
        "generate": [(a, lambda a=a: generate(a, GENERATE_CASE, d, n)) for a in more],
    }
    figures = report.figures
    figures |= {part: [] for part in work}
    for part, runs in work.items():
        for name, run in runs:
            figures[part].append(attempt(name, run))
            report.save()
    rows = [["part", "case", "tok/s", "median ms", "min", "max", "floor ms", "peak GiB"]]
    for part, found in figures.items():
        for r in found:
            if "failed" in r:
                rows.append([part, r["name"], r["failed"][:60], *[""] * 5])
                continue
            shown = [r[k] and f"{r[k] * 1e3:.1f}" for k in ("median_s", "min_s", "max_s", "floor_s")]
            peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.1f}"
            rows.append([part, r["name"], f"{r['tokens'] / r['median_s']:,.0f}", *(s or "-" for s in shown), peak])
    report.tables.append(rows)
    if args.plot:
        plot(figures, args.plot)
