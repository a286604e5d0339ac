"""Bad input ends with exit code 2 and a message that names what is wrong and where: flags, files, folders, rewards."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from model_edits import NORM, edited, tensors

from lockstep.cli.main import main

REWARDS = """
import os, sys

def spread(completions, **_): return [float(sum(map(ord, text)) % 3) for text in completions]
def nan(completions, **_): return [float("nan")] * len(completions)
def short(completions, **_): return [1.0]
def text(completions, **_): return ["x"] * len(completions)
def boom(completions, **_): raise ValueError("of course")
def leave(completions, **_): sys.exit(0)
def die(completions, **_): os._exit(9)
def solves(completions, solution): return [1.0] * len(completions)
"""
SMALL = [
    *("--steps", "1", "--trainer.prompts-per-step", "2", "--sampling.num-generations", "2", "--parity", "strict"),
    *("--sampling.max-completion-length", "8", "--task.validation-prompts", "2"),
]
SUM = ["train", "sum-digits", "--trainer.warmup-steps", "0", *SMALL]
DATA = ["train", "dataset", *SMALL, "--model", "tiny", "--data", "good.jsonl"]


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model `tiny`, data `good.jsonl` and rewards `r.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(model)
    (tmp_path / "good.jsonl").write_text('{"prompt": "hello"}\n' * 8)
    (tmp_path / "r.py").write_text(REWARDS)
    return tmp_path


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """What `lockstep ARGUMENTS` says when it ends with this code; a run folder that holds nothing is gone."""
    assert main(arguments) == code
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    return printed.err


# Flags and their combinations.


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sampling.temperature -1", "sampling.temperature is -1.0; it must be between 0 and 10000"),
        ("--sampling.temperature nan", "sampling.temperature is nan"),
        ("--sampling.top-p 2", "sampling.top_p is 2.0; it must be between 1e-06 and 1"),
        ("--seed -5", "seed is -5; it must be between 0 and 9223372036854775807"),
        ("--optimizer.learning-rate inf", "optimizer.learning_rate is inf; it must be at least 0"),
        ("--device tpu", "invalid choice 'tpu'"),
        ("--arch giant", "arch 'giant' is unknown; choose from tiny"),
        ("--arch tiny-lama", "arch 'tiny-lama' is unknown (did you mean tiny-llama?); choose from tiny"),
        ("--arch qwen3-235b-a22b", "arch qwen3-235b-a22b: 235"),
        ("--model ", "model '': there is no such folder"),
        ("--model nowhere", "model 'nowhere': there is no such folder"),
        ("--model ~nobody_of_this_name/x", "model '~nobody_of_this_name/x': there is no such folder"),
        (f"--model ./{'a' * 300}", "aaa': there is no such folder"),
        ("--model good.jsonl", "model 'good.jsonl': there is no such folder"),
        ("--generator.page-size 0", "generator.page_size is 0; it must be between 1 and 4096"),
        ("--generator.kv-cache-tokens 8", "generator.kv_cache_tokens of 8 (whole pages of 16), 0 tokens, must"),
        ("--generator.kv-cache-tokens 1000000000000", "1000000000000 tokens take 1,907,349 GiB, and cpu has"),
        (
            "--trainer.max-tokens-per-micro-batch 7",
            "trainer.max_tokens_per_micro_batch of 7, and the last token, which is not packed, must",
        ),
        (
            "--trainer.max-tokens-per-micro-batch 9",
            "a prompt has 6 tokens; at most 2 are allowed (trainer.max_",
        ),
        ("--trainer.prompts-per-step 1000000000", "trainer.prompts_per_step is 1000000000; it must be between 1 and"),
        ("--sampling.num-generations 1", "sampling.num_generations is 1: every group's advantage would be zero"),
        ("--compile.recompute silu_mul", "set compile.capture to step"),
        ("--compile.capture step --compile.recompute ", "compile.recompute holds an empty pattern"),
        ("--task.data x", "task.data has no effect on sum-digits; remove it, or name a recipe: gsm8k or dataset"),
        ("--task.no-shuffle", "task.shuffle has no effect on sum-digits"),
        (
            "--task.reward nope",
            "reward 'nope' must be module:function, path.py:function or a ready one (math, gsm8k, reasoning_gym)",
        ),
        ("--task.reward r.py:solves", "reward solves requires the column 'solution'; the data has answer"),
        ("--task.reward-weights 1 2", "task.reward_weights has 2 values for 0 reward functions"),
        ("--task.reward-timeout 3", "task.reward_timeout needs task.reward_workers of at least 1"),
        ("--run-dir good.jsonl", "cannot make the run folder: [Errno 17] File exists: 'good.jsonl'"),
        ("--run-dir good.jsonl/sub", "cannot make the run folder: [Errno 20] Not a directory"),
        ("--run-dir /proc/nothing", "cannot make the run folder: [Errno 2]"),
        ("--run-dir tiny", "--run-dir tiny is not empty; name a new folder: it holds no run to go on with"),
    ],
)
def test_a_flag(place: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    given = flags.split(" ")
    names = {flag for flag in given if flag.startswith("--")}
    kept = [word for i in range(0, len(SMALL), 2) if SMALL[i] not in names for word in SMALL[i : i + 2]]
    assert message in refused(["train", "sum-digits", "--trainer.warmup-steps", "0", *kept, *given], capsys)
    assert not list(place.glob("runs/*"))  # nothing was written, so no folder is left behind


def test_a_recompute_pattern_that_matches_nothing(model: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, place / "one")
    edited(num_hidden_layers=1)(place / "one")
    tensors(lambda t: {k: v for k, v in t.items() if ".layers." not in k or ".layers.0." in k})(place / "one")
    flags = ["--compile.capture", "step", "--compile.recompute", "layer.*", "--task.reward", "r.py:spread"]
    message = refused([*SUM, *flags, "--model", "one"], capsys)
    assert "compile.recompute: " in message and "'layer.*' matches nothing. Modules: layers.0. " in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("steps: [", "not valid YAML"),
        ("steps: " + "[" * 5000, "my.yaml: nested too deeply"),
        ("steps: x", "my.yaml: steps is 'x'; it must be a whole number"),
        ("- 1", "my.yaml: the file holds [1]; it must be a mapping of keys to values"),
        (
            "task: {name: dataset, data: d, reward: [math], chat_template_kwargs: [a=False]}",
            "the value of 'a=False' is not JSON",
        ),
        (
            "task: {name: dataset, data: d, reward: [math], chat_template_kwargs: [messages=1]}",
            "task.chat_template_kwargs sets messages, which is set for every prompt; remove it",
        ),
        ("stepz: 1", "my.yaml: unknown key stepz; did you mean steps?"),
        ("task: {reward: math}", "my.yaml: task.reward is 'math'; it must be a list, each item a string"),
        ("{task: {name: dataset, data: d, reward: [math], chat_template_kwargs: [a]}}", "holds 'a'; each must be NAME"),
        ("? [1]\n: 2", "found unhashable key"),
        (b"\xff", "my.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_yaml_file(place: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, message: str) -> None:
    (place / "my.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(["train", "--config", "my.yaml"], capsys)


PIPES = "train --config pipe", "generate --model tiny --prompts pipe.txt", "generate --model tiny --prompts=~/pipe.txt"


@pytest.mark.parametrize("arguments", PIPES)
def test_a_pipe_is_refused_at_once(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    monkeypatch.setenv("HOME", str(place))
    for name in ("pipe", "pipe.txt"):
        os.mkfifo(place / name)
    assert "is not a regular file" in refused(arguments.split(), capsys)


# Data and rewards, on the way through a run.


@pytest.mark.parametrize(
    ("data", "content", "message"),
    [
        ("d.jsonl", "", "task.data d.jsonl has no rows"),
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n', "d.jsonl line 2: prompt is of type int"),
        ("d.jsonl", '{"prompt": "a"}\n' * 2, "has 2 rows and task.validation_prompts holds out 2"),
        (
            "d.jsonl",
            '{"prompt": "%s"}\n{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n' % ("x" * 5000),
            "1 of 2 training prompts of task.data d.jsonl have more than 2040 tokens (the model's context of 2048 less "
            "sampling.max_completion_length of 8): d.jsonl line 1 (5000 tokens)",
        ),
        ("nothing.jsonl", None, "task.data nothing.jsonl cannot be read: No such file or directory"),
        ("tiny/tokenizer_config.json", None, "tokenizer_config.json line 1 is not JSON"),
        ("r.py", None, "task.data r.py must end in .jsonl"),
        ("empty", None, "task.data empty is a folder without data files"),
        ("org/missing", None, "no such path here; as a hub id"),
    ],
)
def test_data(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    data: str,
    content: str | None,
    message: str,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (place / "empty").mkdir()
    if content is not None:
        (place / data).write_text(content)
    arguments = [*DATA[:-1], data, "--reward", "r.py:spread"]
    assert message in refused(arguments, capsys)


def test_the_current_folder_as_data(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "empty").mkdir()
    monkeypatch.chdir(place / "empty")
    arguments = ["train", "dataset", *SMALL, "--model", "../tiny", "--data", ".", "--reward", "../r.py:spread"]
    assert "task.data . is a folder without data files; name a .jsonl or .parquet file" in refused(arguments, capsys)


def test_prompts_that_are_too_long_with_the_tools_beside_them(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f'"""{"Ask. " * 120}\n\n    Args:\n        word: What.\n    """'
    (place / "tools.py").write_text(f"def ask(word: str) -> str:\n    {text}\n    return word\n")
    tools = ["--reward", "r.py:spread", "--task.tools", "tools.py:ask", "--task.max-prompt-length", "600"]
    message = refused([*DATA, *tools, "--task.filter-overlong-prompts"], capsys)
    assert "training prompts of task.data good.jsonl have more than 600 tokens" in message and "none is left" in message


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "nan",
            "reward nan returned nan; it must be a finite number (at most 1e+38) or None (for completion 0",
        ),
        ("short", "reward short returned 1 values for 2 completions"),
        ("text", "reward text returned 'x'; it must be a finite number (at most 1e+38) or None"),
        ("boom", "reward boom raised ValueError: of course in r.py line 8"),
        ("leave", "reward leave raised SystemExit: 0 in r.py line 9"),
        ("solves", "reward solves requires the column 'solution'; the data has none"),
        ("missing", "reward 'r.py:missing': r.py has no function 'missing'"),
    ],
)
def test_a_reward(place: Path, capsys: pytest.CaptureFixture[str], reward: str, message: str) -> None:
    message_printed = refused([*DATA, "--reward", f"r.py:{reward}"], capsys)
    assert message in message_printed and "step 1" not in message_printed  # it is a validation's completions


def test_a_reward_that_dies_does_not_end_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["--reward", "r.py:spread", "r.py:die", "--task.reward-workers", "1"]
    message = refused([*DATA, *rewards], capsys)
    assert "reward die ended its process (exit code 9) (for the 1 completion of validation" in message
    assert "good.jsonl line 7)" in message
    assert main([*DATA, *rewards, "--task.reward-on-error", "zero", "--run-dir", "run"]) == 0
    (step,) = map(json.loads, (place / "run" / "metrics.jsonl").read_text().splitlines())
    assert step["reward_errors/die"] == 4 and step["groups_without_reward"] == 0 and step["reward/mean"] > 0


# The other commands.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", ""], "the prompt has no tokens"),
        (["generate", "--prompt", "x" * 3000], "prompt of 3000 tokens plus 128 new ones exceeds the model's context"),
        (["generate", "--prompt", "a\udcff"], "the prompt is not valid Unicode: surrogates not allowed at character 1"),
        (["generate", "--prompts", "none.jsonl"], "--prompts none.jsonl cannot be read: No such file"),
        (["generate", "--prompts", "good.jsonl", "--prompt-column", "q"], "line 1 has prompt; it needs q"),
        (["generate", "--prompt", "a", "--prompt-column", "q"], "--prompt-column has no effect without rows"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "sampling.temperature is -1.0"),
        (["generate", "--prompt", "a", "--stop", ""], "sampling.stop holds an empty string"),
        (["eval", "--task", "nope"], "unknown task 'nope'; allowed: sum-digits, word-arithmetic, gsm8k, dataset"),
        (["eval", "--task", "gsm8k"], "task.data is missing: gsm8k needs --data FILE.jsonl"),
        (["parity", "--tokens", "0"], "tokens is 0; it must be a whole number between 1 and 10000000"),
    ],
)
def test_generate_eval_and_parity(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused([*arguments, "--model", "tiny"], capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nope", "--out", "o"], "arch 'nope' is unknown"),
        (["tiny", "--out", "good.jsonl"], "--out good.jsonl: a file; name a new folder"),
        (["tiny", "--out", "tiny"], "--out tiny: not empty; name a new folder"),
        (["tiny", "--out", "o", "--seed", "-1"], "--seed is -1; it must be between 0 and"),
        (["tiny", "--out", "o", "--vocab-size", "0"], "vocab_size is 0; it must be at least 1"),
        (["tiny", "--out", "o", "--vocab-size", "3"], "arch tiny needs a vocabulary of 259, but the model's has 3"),
        (["tiny", "--out", "o", "--vocab-size", "1000000000000"], "GiB; use a smaller model"),
        (["tiny", "--out", "o", "--tokenizer", "nope"], "tokenizer folder nope does not exist"),
    ],
)
def test_init(place: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in refused(["init", *flags], capsys)


# Runs that fail, and runs that cannot go on.


def test_values_that_are_not_finite_stop_the_run_and_leave_evidence(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ["--optimizer.learning-rate", "1e30", "--optimizer.max-grad-norm", "0", "--task.reward", "r.py:spread"]
    message = refused([*SUM[:4], *SUM[6:], *weights, "--steps", "5", "--run-dir", "run"], capsys, code=1)
    assert f"the weights were not changed; its values and rollouts are in {place / 'run' / 'failure.json'}" in message
    failure = json.loads((place / "run" / "failure.json").read_text())
    assert failure["error"].startswith("step 2: loss is") and not failure["result"]["applied"]
    assert failure["weights_version"] == 1 and len(failure["groups"]) == 2
    rollout = failure["groups"][0]["rollouts"][0]
    assert rollout["identity"]["step"] == 1
    assert [segment["sampled"] for segment in rollout["segments"]] == [False, True]
    assert all(segment["token_ids"] for segment in rollout["segments"])
    assert {failure["result"]["loss"], failure["result"]["grad_norm"]} & {"NaN", "Infinity", "-Infinity"}
    assert failure["groups"][0]["prompt"] and int(failure["groups"][0]["columns"]["answer"]) > 0


def test_logits_that_are_not_numbers_stop_the_run_even_when_nothing_is_trained(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, place / "nan")
    tensors(lambda t: t | {NORM: torch.full_like(t[NORM], 3e38)})(place / "nan")
    assert "step 1: loss is 0.0, gradient norm 0.0, entropy nan" in refused([*SUM, "--model", "nan"], capsys, code=1)


def test_a_checkpoint_of_another_model_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "m").symlink_to(place / "tiny")
    start = [*DATA[:-4], "--model", "m", "--data", "good.jsonl", "--reward", "r.py:spread"]
    assert main([*start, "--checkpoint.interval", "1", "--run-dir", "run"]) == 0
    capsys.readouterr()
    assert main(["init", "tiny", "--out", "other", "--vocab-size", "600"]) == 0
    (place / "m").unlink()
    (place / "m").symlink_to(place / "other")
    capsys.readouterr()
    message = refused(["train", "--resume", "run", "--steps", "2"], capsys)
    assert "run: model m" in message and "when step_1 was saved" in message and "put it back" in message


@pytest.mark.parametrize("folder", ["nothing", "tiny", "good.jsonl"])
def test_a_folder_that_is_no_run_cannot_be_resumed(
    place: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    assert f"--resume {folder}: not a run folder" in refused(["train", "--resume", folder], capsys)
