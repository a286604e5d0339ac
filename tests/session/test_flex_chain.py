"""Flex attention through both roles: windows and masks, eager and captured, schedules, packings and faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flex_cases import dilated
from small import (
    CONFIG,
    DEEPSEEK,
    assert_no_schedule_changes_a_bit,
    compare,
    generate,
    make_model,
    requests,
    train_groups,
    words,
)
from test_families import rounds

from lockstep import ops
from lockstep.cli.main import main
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig, RunConfig, validate
from lockstep.errors import InputError
from lockstep.generator import Engine, KVCache, SharedWeights
from lockstep.graph import EAGER, Runtime, check_against_eager
from lockstep.models import Decoder, ModelConfig
from lockstep.models.config import MoEConfig
from lockstep.ops.attention import flex
from lockstep.session.attention import register_mask_function, round_page_size, set_attention
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.types import SamplingParams

WINDOW = replace(CONFIG, sliding_window=40, sliding_layers=(1,))
MODELS: dict[str, tuple[ModelConfig, str | None]] = {
    "causal": (CONFIG, None),
    "a layer with a window": (WINDOW, None),
    "mask": (CONFIG, "flex_cases:dilated"),
    "window and mask, experts": (
        replace(WINDOW, family="qwen3_moe", sliding_layers=(0, 1), moe=MoEConfig(6, 2, 40)),
        "flex_cases:dilated",
    ),
}
EngineOf = Callable[..., Engine]


def model_of(name: str, dtype: torch.dtype) -> Decoder:
    config, mask = MODELS[name]
    model = make_model(dtype, config=config)
    set_attention(model, "flex", mask)
    return model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), ("window and mask, experts", torch.bfloat16)],
)
def test_no_schedule_or_packing_changes_a_bit(name: str, dtype: torch.dtype, engine_of: EngineOf) -> None:
    assert_no_schedule_changes_a_bit(model_of(name, dtype), engine_of, count=5, page_size=64)


def test_captured_is_eager_and_parity_holds_over_updates() -> None:
    name = "window and mask, experts"
    runs = [rounds(model_of(name, torch.bfloat16), capture) for capture in ("none", "step")]
    assert runs[0] == runs[1]
    completions, different = runs[0]
    assert different == [0, 0, 0]
    assert completions[0] != completions[1] != completions[2]


def test_graphs_are_held_to_layers_that_are_computed_again() -> None:
    """The check's eager way has layers computed again in the backward pass."""
    runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
    trainer = Trainer(model_of("mask", torch.bfloat16), OptimizerConfig(), LossConfig(), runtime=runtime)
    work = trainer.check_cases([BatchShape(48, 32, 4, 40)], SamplingParams(), check_parity=True)
    assert {verdict.faults for verdict in check_against_eager(runtime, work, "strict")} == {()}


def test_native_windows_in_every_schedule(engine_of: EngineOf) -> None:
    model = make_model(torch.float32, config=WINDOW)
    set_attention(model, "native", None)
    assert_no_schedule_changes_a_bit(model, engine_of, count=4, page_size=16)
    prompts, sampling = requests(2, length=12)
    unmasked = make_model(torch.float32, config=CONFIG)
    found, others = (words(generate(engine_of(x), prompts, sampling)) for x in (model, unmasked))
    assert found != others, "the window is seen"


def test_native_windows_captured_and_over_updates() -> None:
    runs = [rounds(make_model(torch.float32, config=WINDOW), capture) for capture in ("none", "step")]
    assert runs[0] == runs[1] and runs[0][1] == [0, 0, 0]


def test_lists_of_tiles_pass_through_captured_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU layers with one window share lists that an operator of its own makes, open sizes and all."""
    calls = []

    def packed(*arguments: Any) -> list[torch.Tensor]:
        calls.append("packed")
        return flex._tiles_packed(*arguments)

    def paged(by: ops.Paged, sizes: ops.FlexSizes, k_cache: torch.Tensor, window: int) -> list[torch.Tensor]:
        calls.append("paged")
        return flex._tiles_paged(by, sizes, *k_cache.shape[:2], window)

    def run(capture: bool) -> tuple[list, int]:
        model = model_of("mask", torch.bfloat16)
        runtime = Runtime(CompileConfig("step"), torch.device("cpu")) if capture else EAGER
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
        engine = Engine(SharedWeights(model), GeneratorConfig(page_size=64), 16384, runtime=runtime)
        prompts, sampling = requests(4, length=6)
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=400, check_parity=True):
            trainer.forward_backward(batch)
        return words(completions), trainer.optim_step(1e-2).tokens_different

    expected = run(capture=False)
    assert expected[1] == 0
    monkeypatch.setattr(ops, "flex_tiles_packed", packed)
    monkeypatch.setattr(ops, "flex_tiles_paged", paged)
    assert run(capture=True) == expected
    assert calls.count("paged") == 2 and "packed" in calls, "one a graph, not one a layer"


def test_attention_decides_the_bits(engine_of: EngineOf) -> None:
    """Windows and masks reach both roles, and a trainer with another mask than the generator's is caught."""
    prompts, sampling = requests(4, length=12)
    results = {name: words(generate(engine_of(model_of(name, torch.float32)), prompts, sampling)) for name in MODELS}
    assert len({str(result) for result in results.values()}) == len(MODELS)
    model = model_of("mask", torch.float32)
    completions = generate(engine_of(model), prompts, sampling)
    groups = train_groups(prompts, sampling, completions)
    assert compare(model, groups).tokens_different == 0
    set_attention(model, "flex", None)
    assert compare(model, groups).tokens_different > 0


def test_pages_that_are_handed_out_hold_no_values_of_others() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.empty(0), zeroes_values=True)
    cache.v.fill_(torch.nan)
    pages = cache.allocate(2)
    assert pages is not None
    assert not cache.v[:, pages].any() and cache.v[:, [p for p in range(4) if p not in pages]].isnan().all()


def test_pages_are_whole_key_tiles_with_flex() -> None:
    sizes = {n: round_page_size(GeneratorConfig(page_size=n), "flex").page_size for n in (1, 16, 64, 65, 128)}
    assert sizes == {1: 64, 16: 64, 64: 64, 65: 128, 128: 128}
    assert round_page_size(GeneratorConfig(page_size=16), "native").page_size == 16


@pytest.mark.parametrize(
    ("config", "attention", "mask", "message"),
    [
        (CONFIG, "native", "m:f", "attention_mask has no effect on attention native"),
        (CONFIG, "paged", None, "attention is 'paged'; it must be native or flex"),
        (DEEPSEEK, "flex", None, "attention is flex, and deepseek_v3 has latent attention"),
        (
            replace(CONFIG, attention_scale=0.3),
            "flex",
            None,
            "attention is flex, and qwen3 has sinks or a scale of its own",
        ),
        (replace(CONFIG, num_heads=65, num_kv_heads=1), "flex", None, "at most 64 query heads a key head"),
        (
            replace(CONFIG, head_dim=8),
            "flex",
            None,
            "heads of at least 16 elements; the model has 6 heads, 2 of keys, of 8",
        ),
        (CONFIG, "flex", "dilated", "attention_mask 'dilated' must be module:function or path.py:function"),
        (CONFIG, "flex", "absent_module:f", "attention_mask 'absent_module:f': importing absent_module raised"),
        (CONFIG, "flex", "flex_cases:absent", "flex_cases has no function 'absent'"),
    ],
)
def test_what_cannot_be_is_refused(config: ModelConfig, attention: str, mask: str | None, message: str) -> None:
    with pytest.raises(InputError) as error:
        set_attention(Decoder(config, torch.float32), attention, mask)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("key > 5 and query > 5", "raised RuntimeError: Boolean value of Tensor"),
        ("key if key < 5 else query", "raised RuntimeError: Boolean value of Tensor"),
        ("query - key", "returned torch.int32; it must return a bool tensor"),
        ("True", "returned bool; it must return a bool tensor"),
        ("(query > 5).any() & (key >= 0)", "is not elementwise"),
        ("(query > 5)[:3, :]", "raised IndexError"),
        ("query.items() > 5", "raised AttributeError"),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
        ("torch.ones(999).bool()[key] & (query > 0)", "raised "),
        ("torch.ones(999).bool()[key]", "reads a tensor from elsewhere"),
    ],
)
def test_a_mask_that_is_no_function_of_positions_is_refused(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mask.py").write_text(f"import torch\n\n\ndef f(query, key):\n    return {body}\n")
    with pytest.raises(InputError) as error:
        register_mask_function(f"{tmp_path}/mask.py:f")
    assert str(error.value).startswith(f"attention_mask '{tmp_path}/mask.py:f' ") and message in str(error.value)


@pytest.mark.parametrize("spec", ["operator:ge", "flex_cases:Mask", "small:CONFIG.__eq__"])
def test_a_mask_that_is_no_plain_function_is_refused(spec: str) -> None:
    with pytest.raises(InputError, match=f"attention_mask '{spec}'"):
        register_mask_function(spec)


def test_another_source_is_another_mask(tmp_path: Path) -> None:
    names = []
    for number in (5, 6):
        (tmp_path / str(number)).mkdir()
        file = tmp_path / str(number) / "mask.py"
        file.write_text(f"def f(query, key):\n    return query - key < {number}\n")
        names.append(register_mask_function(f"{file}:f").rpartition("@")[2])
    assert names[0] != names[1]
    q, k = torch.tensor([[3]]), torch.tensor([0, 1])
    name = register_mask_function("flex_cases:dilated")
    assert torch.equal(ops.visibility(0, name)(q, k), dilated(q, k)) and len(name.rpartition("@")[2]) == 12


def test_a_mask_without_flex_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InputError, match="attention_mask has no effect on attention native; set attention to flex"):
        validate(RunConfig(attention_mask="m:f"))
    with pytest.raises(InputError, match="attention_mask is empty"):
        validate(RunConfig(attention="flex", attention_mask=""))


TRAIN = (
    *("train", "sum-digits", "--steps", "3", "--trainer.warmup-steps", "0", "--trainer.prompts-per-step", "2"),
    *("--sampling.num-generations", "2", "--sampling.max-completion-length", "8", "--task.validation-prompts", "2"),
    *("--metrics.no-progress", "--trainer.no-skip-zero-variance"),
)


def test_a_run_with_flex_has_no_token_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "masks.py").write_text("def near(query, key):\n    return (query - key < 30) | (key < 4)\n")
    command = [*TRAIN, "--run-dir", "run", "--attention", "flex", "--attention-mask", "masks.py:near"]
    assert main([*command, "--checkpoint.interval", "1"]) == 0
    certificate = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert certificate["identical"] is True and certificate["tokens_checked"] > 0
    assert "page_size: 64" in (tmp_path / "run" / "config.yaml").read_text()
    parity = ["parity", "--model", "run/model", "--tokens", "200", "--attention", "flex"]
    assert main(parity) == 0
    assert main([*parity, "--attention-mask", "masks.py:near"]) == 0
    generate_one = ["generate", "--model", "run/model", "--prompt", "1+", "--max-completion-length", "4"]
    assert main([*generate_one, "--attention", "flex"]) == 0
    assert main([*generate_one, "--attention-mask", "masks.py:near"]) == 2
    capsys.readouterr()
    masks = tmp_path / "masks.py"
    size = len(masks.read_bytes())
    masks.write_text(masks.read_text() + "\n")
    assert main(["train", "--resume", "run", "--steps", "4"]) == 2
    assert f"attention_mask masks.py:near was {size} bytes with SHA-256" in " ".join(capsys.readouterr().err.split())
