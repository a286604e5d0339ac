"""Configuration: validation messages, and config.yaml written and read back strictly."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from processes import finished

from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
    yaml_file,
)
from lockstep.config.recipes import RECIPES
from lockstep.errors import InputError


def test_defaults_are_valid() -> None:
    assert validate(RunConfig()) == RunConfig()


def test_importing_configuration_does_not_import_torch() -> None:
    code = "import sys, lockstep.config.yaml_file, lockstep.config.recipes; sys.exit('torch' in sys.modules)"
    assert finished([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_named_and_valid_once_given_their_data(name: str) -> None:
    config = RECIPES[name](None)
    assert config.recipe == config.task.name == name
    if name in ("gsm8k", "dataset"):
        with pytest.raises(InputError, match=r"task\.data is missing"):
            validate(config)
        config = replace(config, task=replace(config.task, data="x.jsonl", reward=("m:f",)))
    validate(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(steps=-1), "steps is -1; it must be at least 0"),
        (RunConfig(sampling=SamplingConfig(top_p=0.0)), "sampling.top_p is 0.0; it must be between"),
        (RunConfig(sampling=SamplingConfig(temperature=0.0)), "sampling.temperature is 0"),
        (RunConfig(optimizer=OptimizerConfig(learning_rate=float("nan"))), "optimizer.learning_rate is nan"),
        (RunConfig(task=TaskConfig(name="dataset", data="x")), "task.reward is missing"),
        (RunConfig(task=TaskConfig(data="x")), "task.data has no effect on sum-digits"),
        (RunConfig(task=TaskConfig(reward=("m:f",), reward_weights=(1.0, 2.0))), "2 values for 1 reward functions"),
        (RunConfig(loss=LossConfig(overlong_buffer=4)), "overlong_buffer has no effect on loss_type grpo"),
        (RunConfig(loss=LossConfig("dapo", overlong_buffer=101)), "overlong_buffer is 101; it must be at most 100"),
        (
            RunConfig(
                loss=LossConfig("dapo", overlong_buffer=301), task=TaskConfig(environment="calculator", max_turns=3)
            ),
            "overlong_buffer is 301; it must be at most 300, the tokens that a trajectory may sample",
        ),
        (RunConfig(loss=LossConfig(epsilon_high=0.1)), "epsilon_high is below"),
        (RunConfig(sampling=SamplingConfig(num_generations=1)), "num_generations is 1"),
        (
            RunConfig(task=TaskConfig(name="gsm8k", data="x"), trainer=TrainerConfig(warmup_steps=1)),
            "task gsm8k does not have",
        ),
    ],
)
def test_validation_names_the_field(config: RunConfig, message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (SamplingConfig(top_p=0.0), "sampling.top_p is 0.0; it must be between 1e-06 and 1 (1 is off)"),
        (CheckpointConfig(1, grace=1e10), "checkpoint.grace is 10000000000.0; it must be between 0.0 and 86400.0"),
        (SamplingConfig(top_k=-1), "sampling.top_k is -1; it must be between 0 and 2147483647 (0 is off)"),
        (SamplingConfig(min_p=-1.0), "sampling.min_p is -1.0; it must be between 0 and 1 (0 is off)"),
        (SamplingConfig(stop=("",)), "sampling.stop holds an empty string"),
        (OptimizerConfig(learning_rate=-1.0), "optimizer.learning_rate is -1.0; it must be at least 0"),
        (TaskConfig(data="x"), "task.data has no effect on sum-digits"),
        (TaskConfig("dataset", "x", validation_data=""), "task.validation_data is empty; give one, or leave it out"),
        (TaskConfig("dataset", "x", validation_split=""), "task.validation_split is empty; give one, or leave it out"),
        (CompileConfig("step", dump=""), "compile.dump is empty; name a folder, or leave it out"),
        (LossConfig(epsilon_high=float("inf")), "loss.epsilon_high is inf; it must be at least 0 and finite"),
        (TrainerConfig(warmup_steps=10**400), f"trainer.warmup_steps is {10**400}; it must be at least 0 and finite"),
    ],
)
def test_a_section_is_validated_by_itself(section: Any, message: str) -> None:
    type(section)().validate()
    with pytest.raises(InputError) as caught:
        section.validate()
    assert str(caught.value).startswith(message)


def test_greedy_sampling_of_one_sample_is_refused_for_training_alone() -> None:
    sampling = SamplingConfig(num_generations=1, temperature=0.0)
    sampling.validate()
    with pytest.raises(InputError, match=r"sampling\.temperature is 0: training needs"):
        validate(RunConfig(sampling=sampling))


def test_one_sample_a_prompt_is_for_algorithms_that_do_not_compare_a_prompts_samples() -> None:
    one = RunConfig(sampling=SamplingConfig(num_generations=1), loss=LossConfig("reinforce_pp"))
    assert validate(one) == one
    with pytest.raises(InputError, match=r"sampling\.num_generations is 1: every group's advantage would be zero"):
        validate(dataclasses.replace(one, loss=LossConfig("reinforce_pp_baseline")))


def test_an_algorithm_with_a_teacher_needs_no_rewards() -> None:
    rows = RunConfig(task=TaskConfig(name="dataset", data="x"), loss=LossConfig("own.py:Pupil", teacher="a folder"))
    assert validate(rows) == rows
    with pytest.raises(InputError, match=r"task\.reward is missing"):
        validate(dataclasses.replace(rows, loss=LossConfig("own.py:Pupil")))


def test_every_number_says_its_range() -> None:
    for part in RunConfig().sections():
        numbers = {item.name for item in dataclasses.fields(part) if item.type in (int, float, float | None)}
        assert numbers == {item.name for item in dataclasses.fields(part) if "range" in item.metadata}


texts = st.text(st.characters(exclude_categories=["Cs"]))
configs = st.builds(
    RunConfig,
    model=st.none() | texts,
    parity=st.sampled_from(["strict", "warn", "off"]),
    seed=st.integers(0, 2**63 - 1),
    task=st.builds(TaskConfig, reward=st.lists(texts).map(tuple), reward_weights=st.lists(st.floats()).map(tuple)),
    sampling=st.builds(SamplingConfig, temperature=st.floats(), stop=st.lists(texts).map(tuple)),
    loss=st.builds(LossConfig, epsilon_high=st.none() | st.floats(allow_nan=False)),
)


@given(config=configs)
def test_save_and_load_give_the_same_configuration(tmp_path_factory: pytest.TempPathFactory, config: RunConfig) -> None:
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    yaml_file.save(config, path)
    assert repr(yaml_file.load(path)) == repr(config)  # repr, so that NaN equals NaN and 1 is not 1.0


def test_texts_that_look_like_numbers_stay_texts(tmp_path: Path) -> None:
    config = RunConfig(
        sampling=SamplingConfig(stop=("+.5", ".5", "1:30.5", "1:30", "010", "1e-6", "1.e+3", "0x_", ".nan"))
    )
    yaml_file.save(config, tmp_path / "my.yaml")
    assert yaml_file.load(tmp_path / "my.yaml") == config


def test_every_field_is_written(tmp_path: Path) -> None:
    yaml_file.save(RunConfig(), tmp_path / "config.yaml")
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert list(written) == [item.name for item in dataclasses.fields(RunConfig)]
    assert list(written["task"]) == [item.name for item in dataclasses.fields(TaskConfig)]


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "my.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", RunConfig()),
        ("steps: 3\nsampling:\n  top_p: 1\n", RunConfig(steps=3, sampling=SamplingConfig(top_p=1.0))),
        ("optimizer: {learning_rate: 2e-6}", RunConfig(optimizer=OptimizerConfig(learning_rate=2e-6))),
        ("parity: off", RunConfig(parity="off")),
        ("task: {reward: ['a.py:f', b:g]}", RunConfig(task=TaskConfig(reward=("a.py:f", "b:g")))),
        ("loss: {epsilon_high: null}", RunConfig()),
    ],
)
def test_what_people_write_by_hand(tmp_path: Path, text: str, expected: RunConfig) -> None:
    assert yaml_file.load(written(tmp_path, text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 3", "unknown key stepz; did you mean steps"),
        ("sampling: {top-p: 0.5}", "unknown key sampling.top-p; did you mean top_p"),
        ("learning_rate: 3", "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("max_response_length: 8", "did you mean sampling.max_completion_length or task.max_response_length?"),
        ("sampling: {max_new_tokens: 8}", "max_new_tokens; did you mean sampling.max_completion_length?"),
        (
            "optimizer.learning_rate: 3",
            "unknown key optimizer.learning_rate; write it within its section, as optimizer:",
        ),
        ("output_dir: x", "unknown key output_dir; that is the flag --run-dir, and no key"),
        ("use_vllm: true", "unknown key use_vllm; the engine is in the same process"),
        ("zzzzzz: 3", "unknown key zzzzzz; allowed: recipe, model"),
        ("3: 3", "unknown key 3; allowed"),
        ("steps: three", "steps is 'three'; it must be a whole number"),
        ("steps: 3.0", "steps is 3.0; it must be a whole number"),
        ("steps: true", "steps is True; it must be a whole number"),
        ("steps: 1:30", "steps is '1:30'; it must be a whole number"),
        ("steps: 010", "steps is '010'; it must be a whole number"),
        ("steps: null", "steps is None; it must be a whole number"),
        ("seed: '7'", "seed is '7'; it must be a whole number"),
        ("model: 3", "model is 3; it must be a string"),
        ("sampling: {temperature: hot}", "sampling.temperature is 'hot'; it must be a number"),
        ("sampling: {temperature: 1:30.5}", "sampling.temperature is '1:30.5'; it must be a number"),
        ("sampling: {temperature: false}", "sampling.temperature is False; it must be a number"),
        ("sampling: {ignore_eos: 'yes'}", "sampling.ignore_eos is 'yes'; it must be true or false"),
        ("parity: maybe", "parity is 'maybe'; it must be one of strict, warn, off"),
        ("parallel: {zero_stage: 2.0}", "parallel.zero_stage is 2.0; it must be one of 2, 3"),
        ("task: {reward: a:b}", "task.reward is 'a:b'; it must be a list, each item a string"),
        ("task: {reward_weights: [1, x]}", "task.reward_weights[1] is 'x'; it must be a number"),
        ("task: sum-digits", "task holds 'sum-digits'; it must be a mapping"),
        ("task:", "task holds None; it must be a mapping"),
        ("- 1", "the file holds [1]; it must be a mapping"),
        ("steps: 1\nsteps: 2", "key steps is given twice"),
        ("task: {data: [", "but found '<stream end>' at line 1, column 15: "),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        (f"steps: 1{5000 * '0'}", "not valid YAML: Exceeds the limit"),
        ("steps: !!bool maybe", "not valid YAML: 'maybe' is no bool at line 1, column 8"),
        ("steps: 3\ntask: {data: !!timestamp x}", "not valid YAML: 'x' is no timestamp at line 2, column 14"),
        ("task: {data: 2026-02-31}", "not valid YAML: day is out of range for month at line 1, column 14"),
        (r'model: "\UFFFFFFFF"', "not valid YAML: Python int too large"),
        (f"%YAML 1.{5000 * '9'}\n--- {{}}", "not valid YAML: Exceeds the limit"),
        ("steps: !!set [1]", "not valid YAML: expected a mapping node, but found sequence at line 1, column 8"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        yaml_file.load(written(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path / 'my.yaml'}: ")
    assert message in str(caught.value)


def test_a_missing_file_or_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            yaml_file.load(path)


def test_flat_names_are_dotted() -> None:
    flat = yaml_file.flatten(RunConfig(steps=7))
    assert flat["steps"] == 7 and flat["sampling.top_p"] == 1.0 and flat["task.reward"] == []
    assert not any(isinstance(value, dict) for value in flat.values())


def test_a_pipe_as_a_configuration_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="pipe.yaml: cannot be read: it is not a regular file"):
        yaml_file.load(tmp_path / "pipe.yaml")
