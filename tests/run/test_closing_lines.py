"""What a run's last lines say."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli.flags import Eval, Generate
from lockstep.cli.resolve import parse
from lockstep.config import EVALUATION_FIELDS, RunConfig, SamplingConfig, TaskConfig
from lockstep.config.recipes import RECIPES
from lockstep.run import closing_lines

CONFIG = RECIPES["sum-digits"](None)


def measures(correct: float) -> dict[str, float]:
    return {"validation/reward/mean": correct + 0.3, "validation/rewards/correct/mean": correct}


def test_what_was_learned() -> None:
    after = "after 120 steps of reinforcement learning"
    validations = {"0": measures(0.775), "60": measures(0.9), "120": measures(0.98)}
    assert closing_lines.describe_learning(CONFIG, validations, [1.0], 1) == f"held-out correct 77.5 % -> 98 %, {after}"
    own = replace(CONFIG, task=TaskConfig(name="dataset", reward=("tidy.py:tidy",)))
    validations = {"0": {"validation/reward/mean": -0.75}, "120": {"validation/reward/mean": 4.5}}
    assert closing_lines.describe_learning(own, validations, [], 0) == f"held-out reward -0.75 -> 4.5, {after}"
    assert closing_lines.describe_learning(CONFIG, {"0": measures(0.5)}, [], 0).startswith(
        "held-out correct 50 %, after 0 steps"
    )
    assert closing_lines.describe_learning(CONFIG, {}, [], 0) == "nothing: no step was done"
    of_examples = closing_lines.describe_learning(CONFIG, {}, [], 0, warmed_up=True)
    assert of_examples == "only from worked examples: no step was done"
    assert (
        closing_lines.describe_learning(CONFIG, {}, [0.0] * 10 + [1.0] * 10, 20)
        == "reward 0 -> 1, the first and last 10 steps"
    )
    assert closing_lines.describe_learning(CONFIG, {}, [0.5, 1.0], 2) == "reward 0.5 -> 1, the first and last step"
    assert (
        closing_lines.describe_learning(CONFIG, {}, [0.0, 9.0, 1.0, 2.0, 4.0], 1)
        == "reward 4.5 -> 3, the first and last 2 steps"
    )
    assert closing_lines.describe_learning(CONFIG, {}, [0.5], 1) == "reward 0.5, of one step"
    assert closing_lines.describe_learning(CONFIG, validations, [0.0, 0.0], 0).startswith(
        "nothing: no update was made in any"
    )
    masks = replace(CONFIG, loss=replace(CONFIG.loss, mask_truncated_completions=True))
    assert "equal or its completions are cut off and masked there" in closing_lines.describe_learning(
        masks, validations, [0.5, 1.0], 0
    )


def test_what_was_compared() -> None:
    found = {"identical": False, "tokens_checked": 1000, "tokens_different": 2, "tokens_not_covered": 3}
    assert closing_lines.describe_parity(found) == (
        "NO: 1,000 tokens compared between generator and trainer, 2 different, 3 not covered"
    )
    assert closing_lines.describe_parity({"identical": None}) == closing_lines.describe_parity({}) == "not checked"


def test_the_next_command_tries_the_model() -> None:
    folder = Path("my runs/first")
    assert closing_lines.next_command(CONFIG, folder, "12 34=") == (
        "lockstep generate --model 'my runs/first/model' --prompt '12 34=' --max-completion-length 24"
    )
    stops = replace(CONFIG, sampling=replace(CONFIG.sampling, stop=("\n", "a b")))
    assert closing_lines.next_command(stops, folder, "12 34=").endswith(" --max-completion-length 24 --stop '\n' 'a b'")
    words = shlex.split(closing_lines.next_command(stops, folder, None))[2:]
    flags = parse(["eval", *words])
    assert isinstance(flags, Eval) and flags.stop == stops.sampling.stop
    like_flags = replace(CONFIG, sampling=replace(CONFIG.sampling, stop=("---",)))
    flags = parse(shlex.split(closing_lines.next_command(like_flags, folder, "--12 34="))[1:])
    assert isinstance(flags, Generate) and (flags.prompt, flags.stop) == ("--12 34=", ("---",))
    rows = TaskConfig(name="dataset", data="rows.jsonl", reward=("a.py:f", "a.py:g"))
    data = RunConfig(task=rows, sampling=SamplingConfig(max_completion_length=256))
    for prompt in (None, [{"role": "user", "content": "hi"}], "two\nlines", "x" * 61):
        assert closing_lines.next_command(data, Path("r"), prompt) == (
            "lockstep eval --model r/model --task dataset --data rows.jsonl --reward a.py:f a.py:g --held-out"
        )
    for other in (replace(rows, reward=()), replace(rows, filter_overlong_prompts=True)):
        assert closing_lines.next_command(RunConfig(task=other), Path("r"), None) == "lockstep chat --model r/model"
    taught = RunConfig(task=replace(rows, reward=(), environment="imitate.py:Imitate"), steps=0)
    assert closing_lines.next_command(taught, Path("r"), None) == "lockstep chat --model r/model"
    told = replace(rows, reward=(), system_prompt="Be brief.", chat_template_kwargs=("enable_thinking=false",))
    assert closing_lines.next_command(RunConfig(task=told), Path("r"), None) == (
        "lockstep chat --model r/model --system-prompt 'Be brief.' --chat-template-kwargs enable_thinking=false"
    )
    masked = RunConfig(task=rows, attention="flex", attention_mask="my masks.py:near")
    for prompt, kind in (("12 34=", Generate), (None, Eval)):
        flags = parse(shlex.split(closing_lines.next_command(masked, Path("r"), prompt))[1:])
        assert isinstance(flags, kind) and (flags.attention, flags.attention_mask) == ("flex", "my masks.py:near")
    full = replace(CONFIG, task=TaskConfig(), sampling=SamplingConfig())
    assert closing_lines.next_command(full, Path("r"), "x" * 61) == (
        "lockstep eval --model r/model --task sum-digits --no-easy"
    )


def test_the_next_command_evaluates_what_the_run_was_validated_on() -> None:
    task = TaskConfig(
        name="dataset",
        data="rows.jsonl",
        validation_data="held out.jsonl",
        prompt_column="context",
        system_prompt="Be brief.",
        chat_template_kwargs=("enable_thinking=false",),
        reward=("a.py:f", "a.py:g"),
        reward_weights=(1.0, 0.5),
        tools=("python",),
        allow_unsandboxed=True,
        max_turns=3,
    )
    config = RunConfig(task=task, sampling=SamplingConfig(max_completion_length=24))
    flags = parse(shlex.split(closing_lines.next_command(config, Path("r"), "12 34="))[1:])
    assert isinstance(flags, Eval) and (flags.data, flags.max_completion_length) == ("held out.jsonl", 24)
    rest = [name for name in EVALUATION_FIELDS if name != "data"]
    assert [getattr(flags, name) for name in rest] == [getattr(task, name) for name in rest]


def test_what_an_environment_rewards_is_learned() -> None:
    own = replace(CONFIG, task=TaskConfig(name="dataset", data="rows.jsonl", environment="games.py:Game"))
    assert closing_lines.describe_learning(own, {}, [0.5, 1.0], 2) == "reward 0.5 -> 1, the first and last step"
    validations = {step: {"validation/rewards/found/mean": value} for step, value in (("0", -0.5), ("9", 2.0))}
    assert closing_lines.describe_learning(own, validations, [], 0).startswith(
        "held-out found -0.5 -> 2, after 9 steps"
    )
    assert closing_lines.next_command(own, Path("r"), "12 34=").partition("--data ")[2] == (
        "rows.jsonl --environment games.py:Game --held-out --max-completion-length 24"
    )


def test_an_environment_begins_in_the_next_command_as_it_did_in_the_run() -> None:
    own = replace(CONFIG, seed=7, task=TaskConfig(name="dataset", data="rows.jsonl", environment="games.py:Game"))
    flags = parse(shlex.split(closing_lines.next_command(own, Path("r"), "12 34="))[1:])
    assert isinstance(flags, Eval) and flags.seed == 7


def test_a_folder_is_called_as_it_is_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert closing_lines.relative_to_cwd(tmp_path / "here" / "runs" / "a") == Path("runs/a")
    assert closing_lines.relative_to_cwd(tmp_path / "b") == tmp_path / "b"


def test_where_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    start = f"lockstep train --resume {tmp_path}"
    said = closing_lines.describe_interrupted_run(tmp_path, 1)
    assert said == f"folder  {tmp_path}\ngo on   {start}\nfrom    the start: no step was saved yet\n"
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "report.html").touch()
    said = closing_lines.describe_interrupted_run(tmp_path, 1)
    assert f"report  {tmp_path}/report.html\nagain   lockstep train --config {tmp_path}/config.yaml\n" in said
    assert "add --checkpoint.interval N" in said
    for step in (5, 25, "25 of yesterday"):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert closing_lines.describe_interrupted_run(tmp_path, 2).endswith(
        f"go on   torchrun --nproc-per-node 2 -m {start}\nfrom    step 25\n"
    )
