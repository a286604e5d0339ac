"""The supervised warm-up: what ends it, and what is kept of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.config import RunConfig, TaskConfig, TrainerConfig, validate
from lockstep.errors import InputError
from lockstep.timings import Timings

REWARDS = Path(__file__).parents[1] / "data" / "rewards.py"


def warmed_up(folder: Path, *flags: str) -> tuple[dict, dict]:
    """The summary of a run's warm-up of at most 14 steps, and of its validations."""
    few = ("--steps", "0", "--trainer.warmup-steps", "14", "--trainer.warmup-batch-size", "4")
    few += ("--sampling.max-completion-length", "4", "--task.validation-prompts", "2")
    reward = ("--reward", f"{REWARDS}:spread")
    assert main(["train", "sum-digits", *few, *flags, *reward, "--run-dir", str(folder)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    return summary["warmup"], summary["validation"]


def test_the_held_out_reward_ends_it(tmp_path: Path) -> None:
    warmup, validation = warmed_up(
        tmp_path, "--trainer.warmup-reward", "1e-6", "--trainer.warmup-interval", "2", "--trainer.warmup-loss", "0"
    )
    assert warmup["steps"] == 2 and list(warmup["validation"]) == ["2"]
    assert warmup["validation"]["2"]["validation/reward/mean"] > 1e-6
    assert warmup["validation"]["2"].keys() == validation["0"].keys()


def test_what_ends_it_is_greedy_however_a_validation_samples(tmp_path: Path) -> None:
    flags = "--trainer.warmup-reward", "1e6", "--trainer.warmup-interval", "7"
    greedy, _ = warmed_up(tmp_path / "greedy", *flags)
    sampled, validation = warmed_up(tmp_path / "sampled", *flags, "--task.validation-samples", "3")
    assert sampled["validation"] == greedy["validation"]
    assert "validation/pass@3" in validation["0"]


def test_a_reward_that_is_not_reached_leaves_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Timings, "report_progress", lambda _, detail: told.append(detail))
    warmup, _ = warmed_up(tmp_path, "--trainer.warmup-reward", "1e6", "--trainer.warmup-interval", "6")
    assert warmup["steps"] == 14 and list(warmup["validation"]) == ["6", "12"]
    of_steps = [text for text in told if text.startswith("step ")]
    assert re.fullmatch(r"step 1 of at most 14, loss \d+\.\d{3}, at most 0:\d\d:\d\d to go", of_steps[0])
    assert len(of_steps) == 14 and of_steps[-1].endswith(", at most 0:00:00 to go")


def test_the_loss_is_held_against_ten_steps_and_looks_at_no_problem(tmp_path: Path) -> None:
    warmup, _ = warmed_up(tmp_path, "--trainer.warmup-loss", "100")
    assert warmup["steps"] == 10 and "validation" not in warmup
    assert warmup["loss_last"] < warmup["loss_first"]


def test_a_reward_needs_problems_to_look_at() -> None:
    config = RunConfig(task=TaskConfig(validation_prompts=0), trainer=TrainerConfig(warmup_reward=0.5))
    with pytest.raises(InputError, match=r"warmup_reward needs held-out problems; set task\.validation_prompts"):
        validate(config)
