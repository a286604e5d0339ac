"""A run with terms of whole sequences: graphs, a resumption in the middle and two updates a rollout change no bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import (
    CheckpointConfig,
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.rl.loop import Loop
from lockstep.run.train import train
from lockstep.session.build import build

REWARD = """
def letters(completion_ids, **_):
    "The share of lower-case letters."
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]

def some(prompts, completion_ids, **_):
    "The same, of every second prompt; all samples of the others are alike."
    return [bool(len(p) % 4) * x for p, x in zip(prompts, letters(completion_ids))]

def equal(completion_ids, **_):
    return [1.0] * len(completion_ids)
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A tiny model on prompts of unequal length, rewarded for lower-case letters; two updates a rollout."""
    (tmp_path / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": "hello " * (1 + i % 4)}) for i in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    data, reward = str(tmp_path / "data.jsonl"), f"{tmp_path / 'rewards.py'}:letters"
    return RunConfig(
        recipe="dataset",
        steps=3,
        task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0),
        sampling=SamplingConfig(num_generations=4, max_completion_length=12, top_k=40),
        trainer=TrainerConfig(prompts_per_step=3, num_iterations=2, max_tokens_per_micro_batch=80),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        checkpoint=CheckpointConfig(interval=1),
    )


def metrics(run: Path) -> list[dict[str, float]]:
    """Of each step, without what is measured."""
    measured = ("time/", "perf/", "memory/", "graphs/", "compile/", "cudagraph/")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(measured)} for line in lines]


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_graphs_and_a_resumption_change_no_bit(config: RunConfig, tmp_path: Path) -> None:
    loss = LossConfig("gspo", epsilon=3e-3, epsilon_high=4e-3)
    eager = replace(config, loss=loss, compile=CompileConfig("none"))
    train(eager, tmp_path / "eager", resume=False)
    graphs = replace(eager, compile=CompileConfig("step"))
    train(replace(graphs, steps=1), tmp_path / "graphs", resume=False)
    train(graphs, tmp_path / "graphs", resume=True)
    assert weights(tmp_path / "eager") == weights(tmp_path / "graphs")
    found, expected = metrics(tmp_path / "graphs"), metrics(tmp_path / "eager")
    assert [m["loss"] for m in found] == [m["loss"] for m in expected] and len(found) == 3
    assert all(m["parity/tokens_different"] == 0 < m["parity/tokens_checked"] and m["updates"] == 2 for m in found)


def test_kl_in_the_reward(config: RunConfig) -> None:
    """In the first step the reference is the policy; after it rewards are less by beta times the estimates' sum."""
    loss = LossConfig(beta=0.5, use_kl_in_reward=True, kl_estimator="k1")
    made = replace(config, loss=loss, parallel=replace(config.parallel, batch_shards=3))
    loop = Loop(made, build(made))
    first, groups = loop.step(0)
    assert first["kl"] == 0 and all(r.reward == r.rewards["letters"] for g in groups for r in g.rollouts)
    second, groups = loop.step(1)
    taken = sum(r.rewards["letters"] - r.reward for g in groups for r in g.rollouts)
    tokens = sum(len(r.token_ids) for g in groups for r in g.rollouts)
    assert second["kl"] != 0 and taken == pytest.approx(0.5 * second["kl"] * tokens, rel=1e-6)
    assert second["parity/tokens_different"] == 0 == second["parity/tokens_not_covered"]


def test_weights_that_are_cut_are_counted(config: RunConfig) -> None:
    loss = LossConfig(importance_sampling_mode="sequence_mask", importance_sampling_clip_max=1.01)
    found = Loop(made := replace(config, loss=loss), build(made)).step(0)[0]
    assert found["clip_ratio"] == 0 < found["importance_sampling/clip_ratio"] < 1


def rewarded_by(config: RunConfig, function: str, **loss: Any) -> RunConfig:
    path = config.task.reward[0].rsplit(":", 1)[0]
    task = replace(config.task, reward=(f"{path}:{function}",))
    return replace(config, task=task, loss=LossConfig("dapo", dynamic_sampling=True, **loss), steps=2)


def test_steps_are_full_and_no_prompt_is_used_twice_or_left_out(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second prompt has no signal: those of further ones take their place, in order, over the steps."""
    made = rewarded_by(config, "some")
    loop = Loop(made, run := build(made))
    asked: list[tuple[int, int]] = []
    of_task = run.task.train_problem
    monkeypatch.setattr(run.task, "train_problem", lambda *place: (asked.append(place), of_task(*place))[1])
    for step in range(2):
        before = len(asked)
        found, groups = loop.step(step)
        assert len(groups) == 3 and all(len({r.reward for r in g.rollouts}) > 1 for g in groups)
        assert sorted(g.group % 3 for g in groups) == [0, 1, 2] and any(g.group >= 3 for g in groups)
        assert found["dynamic_sampling/prompts"] == len(asked) - before > 3
        assert found["frac_reward_zero_std"] == 0 == found["parity/tokens_not_covered"]
        assert found["parity/tokens_checked"] > sum(len(r.token_ids) for g in groups for r in g.rollouts)
    assert asked == [divmod(i, 3) for i in range(len(asked))] and loop.prompts_used == len(asked)


def test_a_resumption_goes_on_with_the_next_prompt(config: RunConfig, tmp_path: Path) -> None:
    made = replace(rewarded_by(config, "some"), compile=CompileConfig("none"))
    train(made, tmp_path / "whole", resume=False)
    train(replace(made, steps=1), tmp_path / "parts", resume=False)
    train(made, tmp_path / "parts", resume=True)
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")
    assert (tmp_path / "whole/rollouts.jsonl").read_text() == (tmp_path / "parts/rollouts.jsonl").read_text()


def test_a_step_without_signals_ends_at_the_bound(config: RunConfig) -> None:
    made = rewarded_by(config, "equal", max_num_gen_batches=2)
    found, groups = (loop := Loop(made, build(made))).step(0)
    assert (found["dynamic_sampling/prompts"], found["dynamic_sampling/rounds"], loop.prompts_used) == (6, 2, 6)
    assert [g.group for g in groups] == [3, 4, 5] and found["updates"] == 0 == found["parity/tokens_not_covered"]
