"""An agentic run that is killed in the middle of its turns ends in the bits of one that was not."""

from __future__ import annotations

import json
import signal
import string
from pathlib import Path

import pytest
from processes import DEADLINE, running_lockstep

from lockstep.cli.main import main

pytestmark = pytest.mark.usefixtures("shallow_models")
AGENT = Path(__file__).parents[1] / "data" / "agents.py"
FLAGS = [
    *("train", "sum-digits", "--steps", "4", "--seed", "3", "--device", "cpu", "--trainer.warmup-steps", "0"),
    *("--trainer.prompts-per-step", "2", "--sampling.num-generations", "3", "--sampling.max-completion-length", "32"),
    *("--task.environment", f"{AGENT}:Agent", "--task.max-turns", "4", "--task.max-response-length", "200"),
    *("--sampling.stop", *string.ascii_letters[:40]),
    *("--task.validation-prompts", "0", "--checkpoint.interval", "2"),
]


def test_a_run_killed_within_a_step_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """In the third step, one of whose trajectories had its second turn; the tool is called again and answers the same.
    No prompt is lost, and none is there twice."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with running_lockstep([*FLAGS, "--run-dir", str(killed)], shallow=True, KILL_AFTER="42 0") as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == -signal.SIGKILL, errors
    done = (killed / "rollouts.jsonl").read_text().splitlines()
    turns = sum(len(sample["segments"]) // 2 for line in done for sample in json.loads(line)["samples"])
    assert len(done) == 4 and turns + 6 < 42, "two steps of two prompts, and six turns at least in the third"
    assert main(["train", "--resume", str(killed)]) == 0
    assert main([*FLAGS, "--run-dir", str(whole)]) == 0

    for name in ("rollouts.jsonl", "parity.json", "model/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    rollouts = [json.loads(line) for line in (killed / "rollouts.jsonl").read_text().splitlines()]
    assert [(r["step"], r["group"]) for r in rollouts] == [(step, group) for step in range(4) for group in range(2)]
    assert len({r["prompt"] for r in rollouts}) == 8
    samples = [sample for r in rollouts for sample in r["samples"]]
    assert len(samples) == 24 and max(len(sample["segments"]) for sample in samples) == 6
    assert json.loads((killed / "parity.json").read_text())["tokens_checked"] == sum(s["tokens"] for s in samples)
