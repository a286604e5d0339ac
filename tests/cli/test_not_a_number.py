"""A model whose outputs are no numbers: every command that uses one says so and fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from model_edits import NORM, tensors

from lockstep.cli.main import main
from lockstep.errors import NonFiniteError
from lockstep.session.generate import LLM, require_finite_logprobs
from lockstep.types import SamplingParams, Segment, Trajectory


@pytest.fixture(scope="module")
def damaged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a last norm whose every weight is a number, and whose outputs are none."""
    folder = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(model, folder)
    tensors(lambda t: t | {NORM: torch.full_like(t[NORM], 3e38)})(folder)
    return folder


def test_parity_fails(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--model", str(damaged), "--tokens", "64", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] is False and report["tokens_different"] == report["tokens_checked"] >= 64
    assert (report["tokens_not_covered"], report["max_delta"]) == (0, "NaN")
    assert main(["parity", "--model", str(damaged), "--tokens", "64"]) == 1
    assert (
        capsys.readouterr()
        .out.rstrip()
        .endswith("FAIL: log-probs are no finite numbers: the model's outputs overflow in this dtype.")
    )


@pytest.mark.parametrize("flags", [["--json"], []])
def test_generate_fails(damaged: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["--n", "2", "--max-completion-length", "4"]
    assert main(["generate", "--model", str(damaged), "--prompt", "1 2", *sampled, *flags]) == 1
    message = "lockstep: failed: prompt 1, sample 1: token 1 has the log-probability nan, which is no finite number"
    assert message in capsys.readouterr().err


def test_eval_fails(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--task", "sum-digits", "--easy", "--prompts", "2", "--max-completion-length", "4", "--json"]
    assert main(["eval", "--model", str(damaged), *asked]) == 1
    found = capsys.readouterr()
    assert not found.out and "failed: prompt 1, sample 1: token 1 has the log-probability nan" in found.err


def test_the_log_probability_that_is_no_number_is_named() -> None:
    completion = Trajectory([Segment([1]), Segment([2, 3], True, [-1.0, float("nan")], [-1.0, -2.0])])
    with pytest.raises(NonFiniteError, match="token 2 has the log-probability nan, which is no finite number"):
        require_finite_logprobs(0, completion)


def test_the_prompt_is_named(damaged: Path) -> None:
    with pytest.raises(NonFiniteError, match="prompt 1, sample 1: token 1 "):
        LLM(damaged, device="cpu").generate(["a", "b"], SamplingParams(max_completion_length=2))
