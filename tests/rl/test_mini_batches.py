"""What a step has sampled, cut into mini-batches that make an update each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from lockstep.config import (
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
)
from lockstep.errors import InputError, ParityError
from lockstep.rl.batching import split_mini_batches
from lockstep.rl.loop import Loop
from lockstep.session.build import TrainingSession, build
from lockstep.trainer import StepResult, learning_rate
from lockstep.types import RolloutGroup, SamplingParams

REWARD = """
def some(completion_ids, **_):
    return [sum(ids) % 11 / 11 for ids in completion_ids]
"""
TOKENS = 3 * 4 * 12


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """`config(sampling, **trainer)`: three prompts, four samples of twelve tokens, of which two updates are made; they
    go so far that tokens are clipped."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": "hello " * i}) for i in (1, 2, 3)))
    data, reward = str(tmp_path / "data.jsonl"), f"{tmp_path / 'rewards.py'}:some"

    def make(top_k: int = 0, loss: LossConfig | None = None, **trainer: int) -> RunConfig:
        return RunConfig(
            recipe="dataset",
            task=TaskConfig("dataset", data=data, reward=(reward,), validation_prompts=0),
            sampling=SamplingConfig(num_generations=4, max_completion_length=12, ignore_eos=True, top_k=top_k),
            trainer=TrainerConfig(prompts_per_step=3, num_mini_batches=2, **trainer),
            loss=loss or LossConfig(epsilon=1e-3),
            optimizer=OptimizerConfig(learning_rate=1e-2),
        )

    return make


def weights(run: TrainingSession) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.policy.model.parameters()]


@pytest.mark.parametrize("number", [1, 2, 5, 7, 9])
def test_a_cut_is_in_order_and_even(number: int) -> None:
    groups = [RolloutGroup([], SamplingParams(), i) for i in range(7)]
    parts = split_mini_batches(groups, number)
    assert [g.group for part in parts for g in part] == list(range(7)) and len(parts) == min(number, 7)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert split_mini_batches([], number) == []


def by_hand(config: RunConfig, iterations: int) -> tuple[list[StepResult], TrainingSession]:
    """A step whose groups are cut into the first and the other two, by the trainer's own calls."""
    loop = Loop(config, run := build(config))
    groups, without_reward, *_ = loop._collect(0)
    assert not without_reward
    loop._set_advantages(groups, {})
    trainer = run.trainer
    halves = [loop._pack_groups(half, loop._loss_weights(half)) for half in (groups[:1], groups[1:])]
    for batch in halves[1]:  # of the weights that sampled it: its support
        trainer.forward_backward(batch, keep_support=True)
        batch.check_parity = False
    trainer.finish_check()  # without those gradients
    found, lr = list[StepResult](), learning_rate(config.optimizer, 0, config.steps)
    for i in range(iterations):
        for half in halves:
            for batch in half:
                trainer.forward_backward(batch, keep_support=i == 0 and iterations > 1)
                batch.check_parity = False
            found.append(trainer.optim_step(lr))
    return found, run


@pytest.mark.parametrize(("top_k", "iterations"), [(0, 1), (20, 1), (20, 2)])
def test_two_mini_batches_are_two_updates_by_hand(
    config: Callable[..., RunConfig], top_k: int, iterations: int
) -> None:
    made = config(top_k, num_iterations=iterations)
    loop = Loop(made, run := build(made))
    metrics, _ = loop.step(0)
    found, expected = by_hand(made, iterations)
    assert all(map(torch.equal, weights(run), weights(expected)))
    assert all(map(torch.equal, run.trainer.state()[0].values(), expected.trainer.state()[0].values()))
    assert metrics["updates"] == 2 * iterations == run.trainer.weights_version
    for name in ("loss", "grad_norm"):  # of the first iteration
        assert metrics[name] == fmean(getattr(update, name) for update in found[:2]), name
    assert metrics["clip_ratio"] == fmean(update.clip_ratio for update in found)
    assert found[0].clip_ratio == 0 < metrics["clip_ratio"] < 1 and math.isfinite(metrics["loss"])
    assert metrics["parity/tokens_checked"] == TOKENS and metrics["parity/tokens_not_covered"] == 0


@pytest.mark.parametrize("top_k", [0, 20])
def test_a_mismatch_in_a_later_mini_batch_stops_before_weights_change(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, top_k: int
) -> None:
    loop = Loop(made := config(top_k), run := build(made))
    collect, before = loop._collect, weights(run)

    def with_another_bit(step: int):
        found = collect(step)
        logprobs = found[0][2].rollouts[1].turns[0].logprobs
        assert logprobs is not None
        logprobs[5] = torch.tensor(logprobs[5]).nextafter(torch.tensor(0.0)).item()
        return found

    monkeypatch.setattr(loop, "_collect", with_another_bit)
    message = rf"step 1: 1 of {TOKENS} tokens differ .*\n  group 2 sample 1, completion token 5, sampled: "
    with pytest.raises(ParityError, match=message):
        loop.step(0)
    assert all(map(torch.equal, before, weights(run))) and run.trainer.weights_version == 0


def test_each_mini_batch_has_means_of_its_own_and_none_without_advantages(config: Callable[..., RunConfig]) -> None:
    loop = Loop(made := config(), build(made))
    groups, *_ = loop._collect(0)
    groups[2].rollouts[0].advantage = 1.0
    part, checks = loop._pack(
        groups, []
    )  # the first mini-batch has nothing to learn from, nor the second's first group
    assert [len(batch.sequences) for batch in (*part, *checks)] == [4, 8]
    assert part[0].weight_C[part[0].valid_C].tolist() == pytest.approx([1 / (12 * 8)] * 48)
    for group in groups:
        group.rollouts[0].advantage = 1.0
    *parts, checks = loop._pack(groups, [])
    assert checks == []
    assert [b.weight_C[0].item() * 12 for of_one in parts for b in of_one] == pytest.approx([1 / 4, 1 / 8])


def test_weights_of_later_mini_batches_are_corrected(config: Callable[..., RunConfig]) -> None:
    """Without an iteration more: what trains them is not what sampled them."""
    loss = LossConfig(importance_sampling_mode="token_mask", importance_sampling_clip_max=1.01)
    found = Loop(made := validate(config(loss=loss)), build(made)).step(0)[0]
    assert 0 < found["importance_sampling/clip_ratio"] < 1
    with pytest.raises(InputError, match=r"with trainer\.num_iterations 1 and trainer\.num_mini_batches 1: what"):
        validate(replace(made, trainer=replace(made.trainer, num_mini_batches=1)))


def test_more_mini_batches_than_prompts_are_refused(config: Callable[..., RunConfig]) -> None:
    made = config()
    with pytest.raises(InputError, match=r"trainer\.num_mini_batches is 4 and .*_step 3; each .* use at most 3"):
        validate(replace(made, trainer=replace(made.trainer, num_mini_batches=4)))
