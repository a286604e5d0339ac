"""Training from Python: the same run as the command line's, and reward functions that config.yaml can name."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
from processes import finished, on_ranks
from small_run import SMALL

import lockstep
import lockstep.config
from lockstep.cli.main import main
from lockstep.environments import End, Environment
from lockstep.environments.data import rows
from lockstep.errors import InputError
from lockstep.models import Decoder


def spread(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


kept: list[Any] = []  # a reference to a model, and what it refers to in each step


def forgets(completion_ids, **_):
    kept.append(kept[0]())
    return spread(completion_ids)


class Spells(Environment):
    """A turn that is one word."""

    def step(self, turn):
        return End(float(turn.text == "xyz"))

    @classmethod
    def worked_turns(cls, row, worked_example):
        return [] if row["answer"] is None else ["xyz"]


def rewards_of(run_dir: Path) -> list[float]:
    return [json.loads(line)["reward/mean"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_train_is_the_command(tmp_path: Path) -> None:
    summary = lockstep.train(SMALL, tmp_path / "code", rewards=[spread])
    assert summary["run_dir"] == str(tmp_path / "code") and summary["steps_done"] == 2
    config = tmp_path / "code" / "config.yaml"
    assert f"- {__name__}:spread" in config.read_text()
    assert main(["train", "--config", str(config), "--run-dir", str(tmp_path / "command")]) == 0
    assert rewards_of(tmp_path / "command") == rewards_of(tmp_path / "code")


tracked: list[tuple[int, float]] = []


def track(step, metrics):
    tracked.append((step, metrics["reward/mean"]))


def test_a_function_given_from_python_gets_each_steps_metrics(tmp_path: Path) -> None:
    tracked.clear()
    lockstep.train(SMALL, tmp_path / "run", rewards=spread, trackers=track)
    assert tracked == list(enumerate(rewards_of(tmp_path / "run"))) and len(tracked) == 2
    assert f"- {__name__}:track" in (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(InputError, match=r"trackers: 'wandb' is no function.*config's metrics.trackers"):
        lockstep.train(SMALL, tmp_path / "other", trackers=["wandb"])


def test_rows_in_memory_are_evaluated_all(tmp_path: Path) -> None:
    model = lockstep.train(SMALL, tmp_path / "run")["run_dir"] + "/model"
    (file := tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = replace(OF_ROWS, model=model, task=replace(OF_ROWS.task, validation_prompts=1))
    found = lockstep.evaluate(config, data=iter(ROWS), rewards=right, n=2)
    assert found["prompts"] == len(ROWS) > 1 and len(found["per_problem"]) == len(ROWS)
    whole = replace(config, task=replace(config.task, validation_prompts=len(ROWS)))
    assert lockstep.evaluate(whole, data=file, rewards=[right], n=2) == found
    assert lockstep.evaluate(config, data=file, rewards=[right], n=2)["prompts"] == 1
    with pytest.raises(InputError, match="^data has no rows"):
        lockstep.evaluate(config, data=[], rewards=right)
    with pytest.raises(InputError, match="^data row 1 is a str"):
        lockstep.evaluate(config, data=[ROWS[0], "text"], rewards=right)  # type: ignore[list-item]
    with pytest.raises(InputError, match="^data row 1: prompt is of type int"):  # not a line of a file that is gone
        lockstep.evaluate(config, data=[ROWS[0], {"prompt": 3}], rewards=right)
    DataFrame = type("DataFrame", (list,), {})
    with pytest.raises(InputError, match=r"^data is a DataFrame; .* data\.to_dict\('records'\)"):
        lockstep.evaluate(config, data=DataFrame(["prompt", "answer"]), rewards=right)


def test_resuming(tmp_path: Path) -> None:
    lockstep.train(replace(SMALL, recipe="sum-digits"), tmp_path / "run")  # which was the name without one
    lockstep.train(replace(SMALL, steps=3), tmp_path / "run", resume=True)
    assert len(rewards_of(tmp_path / "run")) == 3
    with pytest.raises(InputError, match="seed is 0 there and 1 here"):
        lockstep.train(replace(SMALL, seed=1, steps=3), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="run_dir is missing"):
        lockstep.train(SMALL, resume=True)


ROWS = [{"prompt": f"{a} + {b} =", "answer": str(a + b), "grid": [a, b]} for a in range(4) for b in range(4)]
OF_ROWS = replace(SMALL, steps=1, recipe="dataset", task=lockstep.TaskConfig("dataset", validation_prompts=2))


def look_up(words: str, most: int = 3) -> str:
    """Look words up.

    Args:
        words: What to look for.
        most: How many findings at most.
    """
    return words[:most]


def test_the_cache_has_room_for_tools_beside_texts(tmp_path: Path) -> None:
    config = replace(OF_ROWS, task=replace(OF_ROWS.task, max_turns=1, validation_prompts=0))
    assert config.generator.kv_cache_tokens == 0
    summary = lockstep.train(config, tmp_path / "run", data=ROWS, rewards=spread, tools=look_up)
    first = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    shown = bytes(token for token in first["prompt_token_ids"] if token < 256).decode()
    assert summary["steps_done"] == 1 and "Look words up" in shown


def right(completions, answer, grid, **_):
    return [
        float(len(text) % 3 + len(right) + sum(numbers))
        for text, right, numbers in zip(completions, answer, grid, strict=True)
    ]


def test_rows_in_memory_are_those_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Dataset`, dicts of arrays and a path train the same; the folder keeps rows, and goes on with no others."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arrays = [row | {"grid": np.array(row["grid"])} for row in ROWS]
    sources = {"dataset": datasets.Dataset.from_list(ROWS), "file": file, "arrays": iter(arrays)}
    for name, source in sources.items():
        lockstep.train(OF_ROWS, Path(name), data=source, rewards=[right])
    assert len({tuple(rewards_of(tmp_path / name)) for name in sources}) == 1 and min(rewards_of(tmp_path / "file")) > 1
    kept = tmp_path / "dataset" / "data.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == ROWS
    assert f"data: {kept}" in (tmp_path / "dataset" / "config.yaml").read_text()

    longer = replace(OF_ROWS, steps=2)
    with pytest.raises(InputError, match="data: these are not the rows that the run began with"):
        lockstep.train(longer, "dataset", data=ROWS[1:], rewards=[right], resume=True)
    assert len(rewards_of(tmp_path / "dataset")) == 1 and kept.exists()
    lockstep.train(longer, "dataset", data=ROWS, rewards=[right], resume=True)
    assert main(["train", "--resume", "dataset", "--steps", "3"]) == 0
    assert len(rewards_of(tmp_path / "dataset")) == 3 and not list((tmp_path / "dataset").glob("*.new"))

    (tmp_path / "dataset").rename("moved")
    assert main(["replay", "moved", "--trajectory", "2/0/0"]) == 0
    lockstep.train(replace(OF_ROWS, steps=4), "moved", data=ROWS, rewards=[right], resume=True)
    shutil.copytree("moved", "copied")
    lockstep.train(replace(OF_ROWS, steps=5), "copied", data=ROWS, rewards=[right], resume=True)
    (tmp_path / "copied" / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[1:]))
    assert main(["train", "--resume", "copied", "--steps", "6"]) == 2


def trained(folder: Path) -> tuple[dict[str, Any], int]:
    """What a process is returned, and how often it reads the data; only the first one takes its rows."""
    given = iter(ROWS) if os.environ["RANK"] == "0" else iter(())
    with mock.patch.object(rows, "open_source", wraps=rows.open_source) as opened:
        return lockstep.train(replace(OF_ROWS, steps=2), folder, data=given, rewards=[right]), opened.call_count


def test_every_process_gives_its_rows_and_gets_the_summary(tmp_path: Path) -> None:
    (first, read), (second, read_by_second) = on_ranks(2, trained, tmp_path / "run")
    assert read == read_by_second == 1, "the choice of `parallel.generator_tp` and the run read the same rows"
    assert first == second and first["steps_done"] == 2 and first["run_dir"] == str(tmp_path / "run")
    assert len((tmp_path / "run" / "data.jsonl").read_text().splitlines()) == len(ROWS)


def test_worked_turns_of_rows_are_learned_before_the_first_step(tmp_path: Path) -> None:
    rows = [{"prompt": "spell: ", "answer": "x"}] * 4
    task = replace(lockstep.recipes.dataset(None).task, validation_prompts=0)
    trainer = replace(SMALL.trainer, warmup_steps=60, warmup_batch_size=8, warmup_learning_rate=2e-3)
    config = replace(SMALL, task=task, trainer=trainer)
    lockstep.train(config, tmp_path / "run", data=rows, environment=Spells)
    assert min(rewards_of(tmp_path / "run")) > 0.5
    with pytest.raises(InputError, match="its worked_turns are none"):
        lockstep.train(config, tmp_path / "none", data=[{"prompt": "a", "answer": None}], environment=Spells)
    with pytest.raises(
        InputError, match="trainer.warmup_steps needs worked examples, which task dataset does not have"
    ):
        lockstep.train(config, tmp_path / "alone", data=rows, rewards=[right])
    rewarded = replace(config, trainer=replace(trainer, warmup_reward=0.5))
    with pytest.raises(InputError, match="trainer.warmup_reward needs problems that task dataset does not draw"):
        lockstep.train(rewarded, tmp_path / "alone", data=rows, environment=Spells)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([*ROWS, "prompt"], "data row 16 is a str; a row is a dict of its columns"),
        (
            [{"prompt": "a", "when": datetime.date(2026, 1, 2)}],
            "data row 0: when cannot be written as JSON: it holds a date",
        ),
        ([{"prompt": "a", "x": float("nan")}], "data row 0: x cannot be written as JSON"),
        ([{"prompt": "a", "x": "\ud800"}], "data row 0: x cannot be written as JSON: 'utf-8' codec"),
        ([], "task.data"),
        (datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)), "data is a DatasetDict of train; give rows"),
        ({"prompt": ["a"], "answer": ["b"]}, "data is a dict of prompt, answer; give rows"),
        (5, "data is 5; give rows, the path of"),
    ],
)
def test_rows_that_cannot_be_used_leave_no_folder(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lockstep.train(OF_ROWS, tmp_path / "run", data=rows, validation_data=ROWS, rewards=[right])
    assert not (tmp_path / "run").exists()


SCRIPT = """
import pathlib, lockstep, small_run
pathlib.Path("imported").open("a").write(__name__ + " ")
def brief(completion_ids, **_):
    return [1.0 / len(ids) for ids in completion_ids]
if __name__ == "__main__":
    lockstep.train(small_run.SMALL, "run", rewards=[brief])
"""


def test_functions_of_a_script_are_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By another process, and without running the script a second time in its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SCRIPT)
    runpy.run_path("mine.py", run_name="__main__")
    assert "- mine.py:brief" in Path("run/config.yaml").read_text() and Path("imported").read_text() == "__main__ "
    assert main(["train", "--resume", "run", "--steps", "3"]) == 0
    assert len(rewards_of(tmp_path / "run")) == 3 and Path("imported").read_text().startswith("__main__ _user_mine")
    assert main(["train", "--resume", "run/checkpoints/step_2"]) == 2
    assert "not a run folder (it has no config.yaml); did you mean --resume run?" in capsys.readouterr().err


OBJECTS = """
import functools, lockstep, small_run
class Score:
    def __call__(self, completion_ids, **_):
        return [1.0 / len(ids) for ids in completion_ids]
def scaled(by, completion_ids, **_):
    return [by * len(ids) for ids in completion_ids]
brief, long = Score(), functools.partial(scaled, 2.0)
if __name__ == "__main__":
    lockstep.train(small_run.SMALL, "run", rewards=[brief, long])
"""


def test_objects_of_a_script_are_named_as_there(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OBJECTS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, env=environment, check=True)
    config = (tmp_path / "run/config.yaml").read_text()
    assert "- mine.py:brief" in config and "- mine.py:long" in config
    first = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert first["rewards/long/mean"] > 2 and 0 < first["rewards/brief/mean"] <= 1


def test_functions_of_no_file_train_and_are_said_to_be_lost(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    python = partial(subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    for arguments, given in ((["-"], SCRIPT), (["-c", SCRIPT], "")):
        done = python([sys.executable, *arguments], input=given)
        assert done.returncode == 0, done.stderr
        assert "reward brief is in no file: this process trains with it, and no other one finds it" in done.stderr
        assert "- __main__:brief" in (tmp_path / "run" / "config.yaml").read_text()
        shutil.rmtree(tmp_path / "run")


def test_what_is_public_is_listed() -> None:
    assert {"LLM", "RunConfig", "SamplingParams", "train", "evaluate"} <= set(dir(lockstep)) == set(lockstep.__all__)


def test_what_config_yaml_cannot_name(tmp_path: Path) -> None:
    def local(completions, **_):
        return [0.0] * len(completions)

    for function in (local, lambda completions: [0.0] * len(completions), json.JSONDecoder().decode):
        with pytest.raises(InputError, match="cannot be named in config.yaml"):
            lockstep.train(SMALL, tmp_path / "run", rewards=[function])
    assert not (tmp_path / "run").exists()


def test_a_function_of_a_script_that_is_run_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import lockstep, lockstep.api\n\ndef first(completions, **_): return [0.0] * len(completions)\n\n"
        "if __name__ == '__main__':\n    def last(completions, **_): return [0.0] * len(completions)\n"
        "    assert lockstep.api._name_function('reward', first) == 'script.py:first'\n"
        "    lockstep.train(lockstep.RunConfig(), 'run', rewards=[last])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "InputError: reward last stands under `if __name__`, where no other process finds it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_one_function_stands_for_a_list_of_it_and_what_is_none_is_refused(tmp_path: Path) -> None:
    assert lockstep.api._as_functions("tools", spread) == lockstep.api._as_functions("tools", (spread,)) == [spread]
    for given, said in (("brief.py:f", "'brief.py:f'"), ([spread, 3], "3"), (None, "None")):
        place = r" \(names go into config's task.reward\)" * (given == "brief.py:f") + "$"
        with pytest.raises(InputError, match=f"rewards: {said} is no function; give one, or a list of them{place}"):
            lockstep.train(SMALL, tmp_path / "run", rewards=given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="config is of type dict; it must be a RunConfig"):
        lockstep.train({"steps": 1}, tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is not a run folder: there is no such folder"):
        lockstep.write_report(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_bad_configuration_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steps is -1"):
        lockstep.train(replace(SMALL, steps=-1), tmp_path / "run")
    with pytest.raises(InputError, match="arch 'giant' is unknown"):
        lockstep.train(replace(SMALL, arch="giant"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "3"}, "steps is '3'; it must be a whole number"),
        ({"steps": 2.5}, "steps is 2.5; it must be a whole number"),
        ({"parity": "sometimes"}, "parity is 'sometimes'; it must be one of strict, warn, off"),
        ({"task": lockstep.TaskConfig(reward="m:f")}, "task.reward is 'm:f'; it must be a list"),
        ({"sampling": None}, "sampling is of type NoneType; give a SamplingConfig"),
        ({"task": "dataset"}, "task is of type str; give a TaskConfig"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lockstep.train(replace(SMALL, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_engine_that_cannot_work_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(InputError, match="generator.page_size is 0; it must be between 1 and 4096"):
        lockstep.LLM("no/such-model", device="cpu", config=lockstep.GeneratorConfig(page_size=0))


@pytest.mark.parametrize(
    ("name", "kind"), [("config", "GeneratorConfig"), ("compile", "CompileConfig"), ("parallel", "ParallelConfig")]
)
def test_a_section_of_another_type_is_named(name: str, kind: str) -> None:
    for value in (lockstep.RunConfig(), {"capture": "none"}, False):
        message = f"^{name} is of type {type(value).__name__}; give a {kind}$"
        with pytest.raises(InputError, match=message):
            lockstep.LLM("m", **{name: value})
        if name != "config":
            with pytest.raises(InputError, match=message):
                lockstep.check_model("m", 5, 0, "cpu", "auto", **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dtype", torch.float64, r"dtype is torch.float64, .* call torch.set_default_dtype\(torch.float32\)"),
        ("device", "meta", r"device is meta, .* call torch.set_default_device\(None\)"),
    ],
)
def test_other_defaults_of_torch_are_refused(tmp_path: Path, model: Path, name: str, value: Any, said: str) -> None:
    llm, set_default = lockstep.LLM(model), getattr(torch, f"set_default_{name}")
    calls: list[Callable[[], Any]] = [
        lambda: lockstep.train(SMALL, tmp_path / "run"),
        lambda: lockstep.evaluate(lockstep.RunConfig(model=str(model))),
        lambda: lockstep.check_model(model, tokens=4),
        lambda: lockstep.LLM(model),
        lambda: llm.generate("1"),
        lambda: next(llm.stream("1")),
    ]
    set_default(value)
    try:
        for call in calls:
            with pytest.raises(InputError, match=f"torch's default {said}"):
                call()
    finally:
        set_default(torch.float32 if name == "dtype" else None)
    assert not (tmp_path / "run").exists() and llm.generate("1", lockstep.SamplingParams(max_completion_length=1))


def test_a_run_leaves_no_model_in_memory_and_begins_without_those_of_earlier_calls(tmp_path: Path, model: Path) -> None:
    def models() -> int:
        return sum(issubclass(type(found), Decoder) for found in gc.get_objects())

    lockstep.train(SMALL, tmp_path / "first", rewards=[spread])  # what is kept of a model's shapes is made once
    gc.disable()
    try:
        llm, before = lockstep.LLM(model), models()
        llm.generate("1", lockstep.SamplingParams(max_completion_length=1))
        forgotten = weakref.ref(llm.policy.model)
        del llm  # without `close`
        kept.append(forgotten)
        lockstep.train(SMALL, tmp_path / "second", rewards=[forgets])
        assert kept == [forgotten, None, None] and models() == before - 1
    finally:
        gc.enable()
        kept.clear()


def test_a_caller_in_inference_mode_trains_with_the_same_bits(tmp_path: Path) -> None:
    learning = replace(SMALL, steps=1, trainer=replace(SMALL.trainer, skip_zero_variance=False))
    for name, mode in {"run": False, "inference": True}.items():
        with torch.inference_mode(mode):
            lockstep.train(learning, tmp_path / name, rewards=[spread])
            assert torch.is_inference_mode_enabled() == mode
    one, other = (tmp_path / name / "model" / "model.safetensors" for name in ("run", "inference"))
    assert one.read_bytes() == other.read_bytes()


def test_check_model_says_what_it_takes() -> None:
    for change in ({"tokens": -1}, {"tokens": 10**18}, {"tokens": "5"}, {"seed": -1}):
        name, value = next(iter(change.items()))
        with pytest.raises(InputError, match=f"{name} is {value!r}; it must be a whole number between"):
            lockstep.check_model(**{"model": "m", "tokens": 5, "seed": 0, "device": "cpu", "dtype": "auto"} | change)
    with pytest.raises(InputError, match="model 'm': there is no such folder"):
        lockstep.check_model("m")
    with pytest.raises(InputError, match="device is 'gpu'; it must be auto, cpu or cuda"):
        lockstep.check_model("m", 5, 0, "gpu", "auto")
    with pytest.raises(InputError, match="dtype is 'half'; it must be auto, float32 or bfloat16"):
        lockstep.check_model("m", 5, 0, "cpu", "half")


def test_public_names_are_there_documented_and_complete() -> None:
    for name in lockstep.__all__:
        assert name == "__version__" or inspect.getdoc(getattr(lockstep, name)), name
    configs = {n for n, c in vars(lockstep.config).items() if n.endswith("Config") and dataclasses.is_dataclass(c)}
    assert configs <= set(lockstep.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = lockstep.trian


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, lockstep; lockstep.RunConfig(); sys.exit('torch' in sys.modules or 'tyro' in sys.modules)"
    assert finished([sys.executable, "-c", code]).returncode == 0
