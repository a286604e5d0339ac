"""Reinforcement learning on captured graphs: metrics, tokens and weights are eager's, and nothing is captured late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config import (
    CompileConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    resolve_compile,
    validate,
)
from lockstep.errors import InputError
from lockstep.rl.loop import Loop
from lockstep.session import build as build_room
from lockstep.session import warm_up

REWARD = """
def letters(completion_ids, **_):
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]
"""
GRAPHS = ("recompiles", "graph_replays")


@pytest.fixture
def config(tmp_path: Path, shallow: Path) -> RunConfig:
    """A tiny model, completions of one length, every group trained on."""
    (tmp_path / "rewards.py").write_text(REWARD)
    prompts = ("hello", "a longer prompt than that", "held out", "held out too")
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    return RunConfig(
        recipe="dataset",
        model=str(shallow),
        steps=3,
        task=TaskConfig(
            "dataset",
            data=str(tmp_path / "data.jsonl"),
            reward=(f"{tmp_path / 'rewards.py'}:letters",),
            validation_prompts=2,
        ),
        sampling=SamplingConfig(num_generations=4, max_completion_length=10, top_p=0.9, ignore_eos=True),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )


def train(config: RunConfig) -> tuple[list[dict[str, Any]], list[Any], list[torch.Tensor]]:
    """Each step's metrics (but times), everything that was sampled, and the final weights."""
    run = build_room.build(config)
    warm_up.warm_up(run)
    loop = Loop(config, run)
    validation = loop.validate()
    metrics, samples = [], []
    for step in range(config.steps):
        found, groups = loop.step(step)
        metrics.append({k: v for k, v in found.items() if not k.startswith(("time/", "perf/", "memory/"))})
        samples += [r for g in groups for r in g.rollouts]
    return [validation, *metrics, loop.validate()], samples, [p.detach().clone() for p in run.policy.model.parameters()]


@pytest.mark.parametrize(("dtype", "recorded"), [("float32", False), ("bfloat16", True)])
def test_a_captured_run_is_the_eager_run(config, runtime_of, monkeypatch, dtype: str, recorded: bool) -> None:
    config = replace(config, dtype=dtype)
    eager_metrics, eager_samples, eager_weights = train(config)
    if recorded:  # in place of a GPU
        monkeypatch.setattr(build_room, "make_runtime", lambda *_: runtime_of(recorded=True, recompute=("full",)))
    captured = replace(config, compile=CompileConfig("step", verify="off"))
    metrics, samples, weights = train(captured)
    graphs = [{k: m.pop(k) for k in list(m) if k.startswith(GRAPHS)} for m in metrics[1:-1]]
    assert [g["recompiles"] for g in graphs] == [0, 0, 0]
    assert (graphs[2]["graph_replays"] > graphs[1]["graph_replays"] > graphs[0]["graph_replays"] > 0) == recorded
    assert all(m.pop("recompiles") == m.pop("graph_replays") == 0 for m in eager_metrics[1:-1])
    assert metrics == eager_metrics and samples == eager_samples
    assert all(map(torch.equal, weights, eager_weights))
    assert all(m["parity/tokens_checked"] == 80 and m["parity/tokens_different"] == 0 for m in metrics[1:-1])


def test_twenty_steps_of_any_lengths_make_no_graph_after_the_warm_up(config, runtime_of, monkeypatch) -> None:
    monkeypatch.setattr(build_room, "make_runtime", lambda *_: runtime_of(recorded=True))
    sampling = replace(config.sampling, max_completion_length=40, stop=("a", "e", "i"))
    trainer = replace(config.trainer, skip_zero_variance=True)
    config = replace(config, compile=CompileConfig("step", verify="off"), sampling=sampling, trainer=trainer)
    run = build_room.build(config)
    warm_up.warm_up(run)
    graphs, traces = made(run), run.runtime.captures
    loop = Loop(config, run)
    lengths = set()
    for step in range(20):
        metrics, groups = loop.step(step)
        lengths |= {len(r.token_ids) for g in groups for r in g.rollouts}
        assert metrics["recompiles"] == 0 and metrics["parity/tokens_different"] == 0
    assert len(lengths) > 12 and (made(run), run.runtime.captures) == (graphs, traces)


def made(run: build_room.TrainingSession) -> list[int]:
    return [len(function.graphs) for function in run.runtime.programs]


def test_a_step_whose_completions_are_all_masked_updates_nothing(config) -> None:
    loss = replace(config.loss, mask_truncated_completions=True)  # ignore_eos: every completion is cut off
    config = replace(config, loss=loss)
    run = build_room.build(config)
    before = [tensor.clone() for tensor in run.trainer.state()[0].values()]
    metrics, _ = Loop(config, run).step(0)
    assert (metrics["updates"], metrics["grad_norm"]) == (0, 0.0) and run.trainer.weights_version == 0
    assert metrics["parity/tokens_checked"] == 80 and metrics["parity/tokens_different"] == 0
    assert all(map(torch.equal, before, run.trainer.state()[0].values()))


def test_the_device_decides_what_is_captured_unless_told() -> None:
    def resolved(on_gpu: bool, **given: Any) -> tuple[str | None, str | None]:
        c = resolve_compile(CompileConfig(**given), on_gpu)
        return c.capture, c.cudagraph_mode

    assert resolved(False) == ("none", "none") and resolved(True) == ("step", "full")
    assert resolved(False, capture="step") == ("step", "none") and resolved(True, capture="none") == ("none", "none")
    assert resolved(True, cudagraph_mode="none") == ("step", "none")
    assert resolved(True, backend="none") == ("none", "none")
    config = build_room.resolve(RunConfig(device="cpu"))
    assert (config.compile.capture, config.compile.cudagraph_mode) == ("none", "none")


def test_graphs_are_checked_before_the_first_step_and_remembered(config, runtime_of, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))  # in which no other test's checks are remembered
    monkeypatch.setattr(build_room, "make_runtime", lambda *_: runtime_of(recorded=True))
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)  # of what the line before replaced
    config = replace(config, compile=CompileConfig("step"))
    run = build_room.build(config)
    before = [p.detach().clone() for p in run.policy.model.parameters()]
    found = []
    for verify in ("strict", "strict", "off"):
        run.verdicts = []
        run.config = replace(config, compile=CompileConfig("step", verify=verify))
        warm_up.warm_up(run)
        found.append({v.function: (v.level, v.cases > 0, v.cases == v.known) for v in run.verdicts})
    names = ("forward_backward", "optim_step", "decode", "mixed")
    assert found == [dict.fromkeys(names, ("full", True, False)), dict.fromkeys(names, ("full", True, True)), {}]
    assert all(map(torch.equal, before, run.policy.model.parameters()))
    assert not run.trainer.flat.grad.any() and run.runtime.recompiles == 0
    report = run.compile_report()
    assert report["functions"]["decode"]["level"] == "full" and report["graphs"] >= report["traces"] >= 4


@pytest.mark.parametrize(
    ("compile_config", "message"),
    [
        (
            CompileConfig("none", "full"),
            "compile.cudagraph_mode is full: CUDA graphs are recorded from captured graphs",
        ),
        (CompileConfig("none", "piecewise", backend="none"), "compile.cudagraph_mode is piecewise: .* or use none"),
        (CompileConfig("step", "piecewise", backend="none"), "compile.backend is none with compile.capture step: noth"),
        (CompileConfig(backend="eager"), "compile.backend is eager with compile.capture none: it has no graph to run"),
        (CompileConfig(recompute=("full",)), "compile: .* act on captured graphs; set compile.capture to step"),
        (CompileConfig(verify="off"), "set compile.capture to step"),
        (CompileConfig(canonicalize=False), "set compile.capture to step"),
    ],
)
def test_combinations_that_cannot_work_are_refused(compile_config: CompileConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(RunConfig(device="cpu", compile=compile_config))


def test_cuda_graphs_without_a_gpu_are_refused(config: RunConfig) -> None:
    config = validate(replace(config, device="cpu", compile=CompileConfig("step", "full")))
    with pytest.raises(InputError, match="compile.cudagraph_mode is full; CUDA graphs need a GPU"):
        build_room.build(config)
