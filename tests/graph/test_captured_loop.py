"""Reinforcement learning on captured graphs: metrics, tokens and weights are eager's, and nothing is captured late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import build as build_room
from lockstep.config import (
    CompileConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
)
from lockstep.errors import InputError
from lockstep.loop import Loop

REWARD = """
def letters(completion_ids, **_):
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]
"""
GRAPHS = {"recompiles", "graph_replays"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The tiny model, completions of one length, every group trained on."""
    (tmp_path / "rewards.py").write_text(REWARD)
    prompts = ("hello", "a longer prompt than that", "held out", "held out too")
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    return RunConfig(
        recipe="dataset",
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
    loop = Loop(config, run)
    validation = loop.validate()
    metrics, samples = [], []
    for step in range(config.steps):
        found, groups = loop.step(step)
        metrics.append({k: v for k, v in found.items() if not k.startswith(("time/", "perf/", "memory/"))})
        samples += [r.completion for g in groups for r in g.rollouts]
    return [validation, *metrics, loop.validate()], samples, [p.detach().clone() for p in run.policy.model.parameters()]


@pytest.mark.parametrize(("dtype", "recorded"), [("float32", False), ("bfloat16", True)])
def test_a_captured_run_is_the_eager_run(config, compiler_of, monkeypatch, dtype: str, recorded: bool) -> None:
    config = replace(config, dtype=dtype)
    eager_metrics, eager_samples, eager_weights = train(config)
    if recorded:  # in place of a GPU
        monkeypatch.setattr(build_room, "make_compiler", lambda *_: compiler_of(recorded=True, recompute=("full",)))
    captured = replace(config, compile=CompileConfig("step"))
    metrics, samples, weights = train(captured)
    graphs = [{k: m.pop(k) for k in GRAPHS} for m in metrics[1:-1]]
    assert [g["recompiles"] for g in graphs] == [0, 0, 0]
    assert (graphs[2]["graph_replays"] > graphs[1]["graph_replays"] > graphs[0]["graph_replays"] > 0) == recorded
    assert all(m.pop("recompiles") == m.pop("graph_replays") == 0 for m in eager_metrics[1:-1])
    assert metrics == eager_metrics and samples == eager_samples
    assert all(map(torch.equal, weights, eager_weights))
    assert all(m["parity/tokens_checked"] == 80 and m["parity/tokens_different"] == 0 for m in metrics[1:-1])


@pytest.mark.parametrize(
    ("compile_config", "message"),
    [
        (
            CompileConfig("step", "piecewise"),
            "compile.cudagraph_mode is piecewise: attention is recorded with the rest",
        ),
        (CompileConfig("step", "full_and_piecewise"), "compile.cudagraph_mode is full_and_piecewise"),
        (CompileConfig("none", "full"), "compile: .* act on captured graphs; set compile.capture to step"),
        (CompileConfig(recompute=("full",)), "set compile.capture to step"),
        (CompileConfig(canonicalize=False), "set compile.capture to step"),
    ],
)
def test_combinations_that_cannot_work_are_refused(compile_config: CompileConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(RunConfig(compile=compile_config))


def test_cuda_graphs_without_a_gpu_are_refused(config: RunConfig) -> None:
    config = validate(replace(config, device="cpu", compile=CompileConfig("step", "full")))
    with pytest.raises(InputError, match="compile.cudagraph_mode is full; CUDA graphs need a GPU"):
        build_room.build(config)
