"""Settings that nothing reads are refused, and a file of settings says what it begins from."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.cli import resolve
from lockstep.cli.main import main
from lockstep.cli.resolve import parse
from lockstep.config import (
    LOSS_TYPES,
    READ_BY,
    ParallelConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
    ineffective_settings,
    validate,
    yaml_file,
)
from lockstep.config.recipes import RECIPES
from lockstep.errors import InputError

ROWS = "train dataset --data d.jsonl --reward math --model m"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --arch qwen3-100m --model m", "arch has no effect with a model, which has an architecture of its own"),
        ("train --arch tiny --model m", "arch has no effect with a model"),
        ("parity --model m --parallel.no-symmetric-memory", "parallel.symmetric_memory has no effect with parallel"),
        (f"{ROWS} --arch tiny", "arch has no effect with a model"),
        (f"{ROWS} --task.validation-seed 99", "task.validation_seed has no effect on dataset, whose validation rows"),
        (f"{ROWS} --task.validation-seed=5", "task.validation_seed has no effect on dataset, whose validation rows"),
        (f"{ROWS} --checkpoint.keep-last 2", "checkpoint.keep_last has no effect without checkpoints; set checkpoint"),
        (f"{ROWS} --checkpoint.keep_last 5", "checkpoint.keep_last has no effect without checkpoints; set checkpoint"),
        (f"{ROWS} --task.no-shuffle --task.seed 1", "task.seed has no effect with task.shuffle off"),
        (
            f"{ROWS} --task.max-response-length 512",
            "task.max_response_length has no effect without task.environment (one completion's is "
            "sampling.max_completion_length); remove it, or name one",
        ),
        ("train --task.split test", "task.split has no effect on sum-digits; remove it, or name a recipe"),
        (
            "train --task.validation-prompts 0 --task.validation-interval 5",
            "task.validation_interval has no effect with task.validation_prompts 0, which turns validation off",
        ),
        ("train --trainer.warmup-steps 0 --trainer.warmup-loss 1", "trainer.warmup_loss has no effect with trainer.wa"),
        ("train --loss.no-use-bias-correction-kl", "loss.use_bias_correction_kl has no effect without loss.beta"),
        (
            "train --loss.importance-sampling-mode token_mask",
            "loss.importance_sampling_mode has no effect with trainer.num_iterations 1 and trainer.num_mini",
        ),
        (
            "train --trainer.num-iterations 2 --loss.importance-sampling-mode token_mask --loss.epsilon 0.2",
            "loss.epsilon has no effect beside loss.importance_sampling_mode, which is in place of the loss's own",
        ),
        (
            "train --loss.beta 0.1 --loss.use-kl-in-reward --loss.use-bias-correction-kl",
            "loss.use_bias_correction_kl has no effect beside loss.use_kl_in_reward",
        ),
        ("train --parallel.timeout 60", "parallel.timeout has no effect in one process; start several with torchrun"),
        (
            "train --sampling.ignore-eos --loss.mask-truncated-completions",
            "loss.mask_truncated_completions leaves out every completion where sampling.ignore_eos lets none end",
        ),
        ("train --trainer.warmup-interval 5", "trainer.warmup_interval has no effect without trainer.warmup_reward"),
        (f"{ROWS} --loss.overlong-penalty 2", "loss.overlong_penalty has no effect without loss.overlong_buffer"),
        ("eval --model m --task gsm8k --data d --no-easy", "--no-easy has no effect on gsm8k; remove it"),
    ],
)
def test_a_flag_that_nothing_reads(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(shlex.split(line)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("model", [None, "org/model"])
def test_no_recipe_sets_what_nothing_reads(name: str, model: str | None) -> None:
    config = RECIPES[name](model)
    default = RunConfig()
    without_effect = [part.path(name) for part in config.sections() for name, _ in part.ineffective_fields()]
    fields = {path: yaml_file.flatten(config)[path] for path in without_effect}
    assert fields and fields == {path: yaml_file.flatten(default)[path] for path in fields}


def test_what_a_recipe_left_behind_is_refused_only_where_it_is_given() -> None:
    begin = RECIPES["sum-digits"](None)
    config = replace(begin, trainer=replace(begin.trainer, warmup_steps=0))
    assert validate(config) is config  # its warmup_learning_rate stays
    assert "trainer.warmup_learning_rate" in dict(ineffective_settings(config))
    assert "trainer.warmup_learning_rate" not in dict(ineffective_settings(begin))


def test_a_run_of_when_pushes_were_off_by_themselves_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = replace(RECIPES["sum-digits"](None), parallel=ParallelConfig(symmetric_memory=False))
    yaml_file.save(config, file)
    assert validate(yaml_file.load(file)) == config
    assert "parallel.symmetric_memory" in dict(ineffective_settings(config))


def test_every_field_that_may_be_without_effect_is_one() -> None:
    rows = RunConfig(task=TaskConfig(name="dataset", shuffle=False, validation_prompts=0), model="m")
    drawn = RunConfig(task=TaskConfig(name="word-arithmetic"), trainer=TrainerConfig(warmup_steps=9))
    named = {path for config in (rows, drawn) for path, _ in ineffective_settings(config)}
    assert len(named) > 20 and named <= yaml_file.flatten(RunConfig()).keys()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file holds no key; name what it begins from, such as recipe: sum-digits"),
        ("# steps: 3\n", "the file holds no key"),
        ("{}", "the file holds no key"),
        ("recipe: nosuch", "recipe is 'nosuch', which is none; allowed: sum-digits, word-arithmetic, gsm8k, dataset"),
        ("recipe: gms8k\nsteps: 2", "recipe is 'gms8k', which is none; did you mean gsm8k?"),
        ("recipe: [gsm8k]", "recipe is ['gsm8k'], which is none"),
        ("recipe: gsm8k", "task.data is missing: gsm8k needs --data FILE.jsonl"),
        ("recipe: gsm8k\nmodel: 3", "model is 3; it must be a string"),
        ("recipe: sum-digits\nmodel: m\narch: tiny-moe", "arch has no effect with a model"),
    ],
)
def test_a_file_says_what_it_begins_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text(text)
    assert main(["train", "--config", "my.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_what_a_file_leaves_out_is_the_recipes(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("recipe: word-arithmetic\nmodel: org/model\nsteps: 7\ntask: {validation_interval: 5}\n")
    begin = RECIPES["word-arithmetic"]("org/model")
    expected = replace(begin, steps=7, task=replace(begin.task, validation_interval=5))
    assert yaml_file.load(path, resolve.RECIPES) == expected
    yaml_file.save(expected, path)
    assert yaml_file.load(path, resolve.RECIPES) == expected


@pytest.mark.parametrize("more", ["", "recipe: custom\n"])
def test_a_file_without_a_recipe_has_the_name_of_none(tmp_path: Path, more: str) -> None:
    (path := tmp_path / "my.yaml").write_text(f"{more}steps: 3\n")
    config = parse(["train", "--config", str(path), "--seed", "2"]).to_config()
    assert config == RunConfig(steps=3, seed=2) and config.recipe == "custom" not in RECIPES


def test_a_model_beside_a_file_is_what_its_recipe_is_for(tmp_path: Path) -> None:
    (path := tmp_path / "my.yaml").write_text("recipe: sum-digits\nsteps: 3\n")
    flags = parse(["train", "--config", str(path), "--model", "org/model"])
    assert flags.to_config() == replace(RECIPES["sum-digits"]("org/model"), steps=3)
    assert parse(["train", "--config", str(path)]).to_config() == replace(RECIPES["sum-digits"](None), steps=3)


@pytest.mark.parametrize("name", ["gsm8k", "dataset"])
def test_an_architecture_alone_is_in_place_of_the_recipes_model(tmp_path: Path, name: str) -> None:
    (path := tmp_path / "my.yaml").write_text(f"recipe: {name}\narch: tiny-llama\n")
    expected = replace(RECIPES[name](None), model=None, arch="tiny-llama")
    assert yaml_file.load(path, resolve.RECIPES) == expected
    assert parse(["train", name, "--arch", "tiny-llama"]).to_config() == expected
    assert parse(["train", name]).to_config().model == RECIPES[name](None).model is not None
    path.write_text(f"recipe: {name}\narch: tiny\nmodel: m\n")
    assert yaml_file.load(path, resolve.RECIPES).model == "m"


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_file_with_another_algorithm_than_its_recipe(tmp_path: Path, loss_type: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"recipe: sum-digits\nloss: {{loss_type: {loss_type}}}\n")
    loss = validate(yaml_file.load(path, resolve.RECIPES)).loss
    assert (loss.overlong_buffer > 0) == (loss_type == "dapo")
    assert (loss.scale_rewards == "group") == (loss_type in READ_BY["scale_rewards"])
    path.write_text(f"recipe: sum-digits\nloss: {{loss_type: {loss_type}, overlong_buffer: 4}}\n")
    if loss_type != "dapo":
        with pytest.raises(InputError, match=f"loss.overlong_buffer has no effect on loss_type {loss_type}"):
            validate(yaml_file.load(path, resolve.RECIPES))


def test_a_whole_file_of_ones_own_recipe_is_replayed(tmp_path: Path) -> None:
    path, config = tmp_path / "my.yaml", RunConfig(recipe="of my own", steps=3)
    yaml_file.save(config, path)
    assert yaml_file.load(path, resolve.RECIPES) == config
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "top_k" not in line))
    with pytest.raises(InputError, match="recipe is 'of my own', which is none"):
        yaml_file.load(path, resolve.RECIPES)


def test_hints_for_an_unknown_flag_name_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--learning-rate", "3", "--stepz", "4"]) == 2
    said = capsys.readouterr().err
    assert said.count("--optimizer.learning-rate") == 1 and "warmup" not in said  # which is another's name
    assert said.count("--steps") == 1 and "precompile" not in said


def test_an_infinite_number_is_refused_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--optimizer.learning-rate", "inf"]) == 2
    assert "optimizer.learning_rate is inf; it must be at least 0 and finite" in capsys.readouterr().err
