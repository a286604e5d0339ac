"""What tests of whole runs share: small runs, their records and their checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from lockstep.distributed import ONE_PROCESS
from lockstep.run import checkpoint

DATA = Path(__file__).parents[1] / "data"
SMALL = [
    *("--steps", "8", "--seed", "3", "--trainer.warmup-steps", "2", "--trainer.prompts-per-step", "2"),
    *("--sampling.num-generations", "4", "--checkpoint.interval", "2", "--task.validation-prompts", "4"),
    *("--sampling.max-completion-length", "8"),
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


def saved(folder: Path, step: int, tensors: Any, state: dict[str, Any], keep_last: int = 2) -> Path:
    """Save a checkpoint of one process, and wait until it is there."""
    saver = checkpoint.Saver(folder, keep_last, ONE_PROCESS, shared=True)
    saver.save(step, tensors, state)
    saver.wait()
    return folder / f"step_{step}"


def tensors_of(loaded: checkpoint.LoadedCheckpoint, name: str) -> dict[str, Tensor]:
    files = [file for file in loaded.files if file.rpartition("-")[0] == name]
    return {key: tensor for file in files for key, tensor in load_file(loaded.path / file).items()}
