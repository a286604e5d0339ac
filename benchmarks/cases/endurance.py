"""Hundreds of steps whose lengths change all the time: no graph is made after the warm-up, and memory stays flat.

A model of Qwen3-0.6B's layers with a vocabulary of 512, so that a random one ends its completions at random: by its
end-of-sequence token on the device, and by stop strings on the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from common import Report, random_weights

from lockstep.config import OptimizerConfig, RunConfig, SamplingConfig, TaskConfig
from lockstep.models import save_model
from lockstep.models.init import architecture
from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer
from lockstep.run.train import train

VOCABULARY = 512
STOPS = ("a", "b", "c", "d")


def prepare(folder: Path, arch: str, device: str) -> None:
    tokenizer = byte_tokenizer()
    config = replace(architecture(arch), vocab_size=VOCABULARY, eos_token_ids=(tokenizer.eos_token_id,))
    save_model(random_weights(config, device), folder)
    save_tokenizer(tokenizer, folder)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--steps", type=int, default=200)


def measure(args: argparse.Namespace, report: Report) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder / "model", args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b"), args.device)
        config = RunConfig(
            model=str(folder / "model"),
            steps=args.steps,
            device=args.device,
            task=TaskConfig(validation_prompts=0),
            sampling=SamplingConfig(stop=STOPS),
            optimizer=OptimizerConfig(learning_rate=0.0),  # keeps the lengths' distribution as it is
        )
        config = replace(config, trainer=replace(config.trainer, skip_zero_variance=False))
        summary = train(config, folder / "run", resume=False)
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    settled = steps[len(steps) // 10 :]
    report.figures |= {
        "steps": len(steps),
        "mean_lengths": [s["response_length/mean"] for s in steps],
        "recompiles": steps[-1]["recompiles"],
        "replays": {k: v for k, v in steps[-1].items() if k.startswith("graph_replays/")},
        "tokens_checked": sum(s["parity/tokens_checked"] for s in steps),
        "tokens_different": sum(s["parity/tokens_different"] for s in steps),
        "memory_gib": [s["memory/peak_gib"] for s in steps],
        "step_s": statistics.median(s["time/step"] for s in settled),
        "startup": {k: v for k, v in summary.items() if k.startswith("startup/")},
    }
    figures = report.figures
    grown = settled[-1]["memory/peak_gib"] - settled[0]["memory/peak_gib"]
    rows = [
        ["steps", "mean length", "recompiles", "tokens checked", "different", "peak GiB", "grown by", "step ms"],
        [
            str(len(steps)),
            f"{min(figures['mean_lengths']):.0f}-{max(figures['mean_lengths']):.0f}",
            str(figures["recompiles"]),
            f"{figures['tokens_checked']:,.0f}",
            str(figures["tokens_different"]),
            f"{settled[-1]['memory/peak_gib']:.2f}",
            f"{grown:.3f}",
            f"{figures['step_s'] * 1e3:.0f}",
        ],
    ]
    report.tables.append(rows)
    return figures["recompiles"] > 0 or figures["tokens_different"] > 0
