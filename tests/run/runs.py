"""What tests of whole runs share: small runs, and their records."""

from __future__ import annotations

import json
import sys
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"
SMALL = [
    *("--steps", "8", "--seed", "3", "--trainer.warmup-steps", "6", "--trainer.prompts-per-step", "2"),
    *("--sampling.num-generations", "4", "--checkpoint.interval", "2", "--task.validation-prompts", "4"),
    *("--trainer.warmup-batch-size", "8", "--sampling.top-p", "0.95", "--trainer.num-iterations", "2"),
    *("--sampling.temperature", "0.9", "--reward", f"{DATA / 'rewards.py'}:spread"),
]
COMMAND = [sys.executable, "-m", "lockstep", "train", "sum-digits", *SMALL]
TIMED = ("time/", "perf/", "memory/")


def records(path: Path) -> list[dict]:
    """Lines of a metrics or rollouts file without what depends on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


QUICK = [
    *("--steps", "2", "--trainer.prompts-per-step", "1", "--sampling.num-generations", "2", "--device", "cpu"),
    *("--sampling.max-completion-length", "4", "--task.validation-prompts", "0"),
]
SUM = ["sum-digits", *QUICK, "--trainer.warmup-steps", "0"]
