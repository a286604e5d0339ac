"""A folder that `lockstep init` made is known as untrained, and recipes that can teach from nothing do so."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_edits import edited, tensors, written
from safetensors.torch import load_file, save_file
from small import load_model
from test_cli import Recorder, resolved, run  # noqa: F401 (run is a fixture)

from lockstep.cli.main import main
from lockstep.config.random_weights import MARK, random_width
from lockstep.config.recipes import RECIPES
from lockstep.models import save_model
from lockstep.models.init import init_folder

TINY = ("tiny", "tiny-llama", "tiny-qwen3-moe", "tiny-deepseek-v3")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    shutil.copytree(model, tmp_path / "random")
    return tmp_path / "random"


def test_only_weights_as_init_wrote_them_are_random(folder: Path, tmp_path: Path) -> None:
    assert random_width(str(folder)) == 128
    loaded = load_model(folder, torch.float32)
    save_model(loaded, tmp_path / "trained")
    assert random_width(str(tmp_path / "trained")) is None
    save_model(loaded, tmp_path / "shards", 10**6, MARK)
    assert random_width(str(tmp_path / "shards")) == 128
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    save_file(load_file(shard), shard)
    assert random_width(str(tmp_path / "shards")) is None
    tensors(lambda t: t)(folder)
    assert random_width(str(folder)) is None


def test_transformers_loads_marked_weights_and_saves_them_without_the_mark(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.model.embed_tokens.weight, load_model(folder, torch.float32).embed)
    theirs.save_pretrained(folder)
    assert random_width(str(folder)) is None


@pytest.mark.parametrize(
    "damage",
    [
        written("model.safetensors", None),
        written("model.safetensors", b""),
        written("model.safetensors", b"\xff" * 20),
        written("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        written("model.safetensors", (4).to_bytes(8, "little") + b"null"),
        written("config.json", None),
        written("config.json", b"[]"),
        edited(hidden_size="128"),
        edited(hidden_size=0),
    ],
)
def test_a_folder_that_cannot_be_read_is_left_to_loading(damage, folder: Path) -> None:  # type: ignore[no-untyped-def]
    damage(folder)
    assert random_width(str(folder)) is None
    assert random_width(str(folder / "model.safetensors")) is None


@pytest.mark.parametrize("model", ["", " ", "org/name", "./nowhere", "\0"])
def test_what_is_no_folder_has_no_random_weights(model: str) -> None:
    assert random_width(model) is None


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_its_settings_for_a_random_model(name: str, folder: Path) -> None:
    model = str(folder)
    edited(hidden_size={"word-arithmetic": 768}.get(name, 128))(folder)
    alone, on_folder, on_trained = (RECIPES[name](given) for given in (None, model, "org/name"))
    if name in ("gsm8k", "dataset"):  # without worked examples
        assert on_folder == replace(on_trained, model=model)
        return
    assert on_folder == replace(alone, model=model, arch=on_trained.arch, checkpoint=on_trained.checkpoint)
    assert on_folder.trainer.warmup_steps > 0 == on_trained.trainer.warmup_steps


@pytest.mark.parametrize("name", ["sum-digits", "word-arithmetic"])
def test_rates_fall_with_the_width(name: str, folder: Path) -> None:
    rates = []
    for width in (256, 1024):
        edited(hidden_size=width)(folder)
        config = RECIPES[name](str(folder))
        rates.append((config.optimizer.learning_rate, config.trainer.warmup_learning_rate))
    assert rates[0] == pytest.approx([4 * rate for rate in rates[1]])


@pytest.mark.parametrize("name", RECIPES)
def test_an_architecture_is_taken_as_a_folder_of_it(run: Recorder, folder: Path, name: str) -> None:  # noqa: F811
    rows = {"gsm8k": "--data d", "dataset": "--data d --reward m:f"}.get(name, "")
    edited(hidden_size=1024)(folder)
    of_folder = resolved(run, f"{name} {rows} --model {folder}")
    expected = replace(of_folder, model=None, arch="qwen3-0.6b")
    assert resolved(run, f"{name} {rows} --arch qwen3-0.6b") == expected
    config = resolved(run, f"{name} {rows} --arch qwen3-0.6b --optimizer.learning-rate 1e-5")
    assert config == replace(expected, optimizer=replace(expected.optimizer, learning_rate=1e-5))
    for more, flag in (("arch: qwen3-0.6b", ""), ("", "--arch qwen3-0.6b")):
        Path("my.yaml").write_text(f"recipe: {name}\n{more}\n")
        assert resolved(run, f"--config my.yaml {rows} {flag}") == expected


def test_one_line_says_why_and_flags_win(
    run: Recorder,  # noqa: F811
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = resolved(run, f"sum-digits --model {folder} --optimizer.learning-rate 1e-5 --trainer.warmup-steps 0")
    assert (config.optimizer.learning_rate, config.trainer.warmup_steps, config.task.easy) == (1e-5, 0, True)
    said = [line for line in capsys.readouterr().err.splitlines() if "random weights" in line]
    assert said == [
        f"model {folder} has random weights, as lockstep init made them: sum-digits takes its settings for a random "
        "model, a supervised warm-up first; flags override them"
    ]
    tensors(lambda t: t)(folder)
    assert resolved(run, f"sum-digits --model {folder}") == RECIPES["sum-digits"](str(folder))
    assert resolved(run, f"dataset --model {folder} --data d --reward m:f").model == str(folder)
    assert "random weights" not in capsys.readouterr().err


@pytest.mark.usefixtures("shallow_models")
@pytest.mark.parametrize("arch", TINY)
def test_a_random_folder_of_every_family_is_taught(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    init_folder(arch, tmp_path / arch, seed=0)
    few = ["--trainer.warmup-steps", "16", "--trainer.warmup-batch-size", "12", "--trainer.prompts-per-step", "2"]
    few += ["--steps", "1", "--task.validation-prompts", "0", "--run-dir", "run"]
    assert main(["train", "sum-digits", "--model", arch, *few]) == 0
    warmup = json.loads(Path("run/summary.json").read_text())["warmup"]
    assert warmup["loss_first"] > 5 and warmup["loss_last"] < 2.5
    (step,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert step["parity/tokens_checked"] > 0 == step["parity/tokens_different"]
    assert step.get("parity/tokens_routed_differently", 0) == 0
