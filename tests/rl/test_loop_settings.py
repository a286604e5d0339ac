"""What the loop makes of its settings: rates, penalties, masks, the sampled support, and steps without anything to
learn; each asserted by its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.config import (
    CheckpointConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.errors import LockstepError
from lockstep.rl.loop import Loop
from lockstep.run.train import train
from lockstep.session.build import build
from lockstep.types import PackedBatch, RolloutGroup, SamplingParams, Segment, Trajectory

REWARD = """
def odd(completions, **_):
    return [i % 2 for i in range(len(completions))]

def equal(completions, **_):
    return [1.0] * len(completions)
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """`config(reward, **fields)`: a tiny model, one prompt of four samples of eight tokens, all cut at the limit."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello"}\n')

    def make(reward: str = "odd", **fields) -> RunConfig:
        task = TaskConfig(
            *("dataset", str(tmp_path / "data.jsonl")),
            reward=(f"{tmp_path / 'rewards.py'}:{reward}",),
            validation_prompts=0,
        )
        base = RunConfig(
            recipe="dataset",
            steps=4,
            task=task,
            sampling=SamplingConfig(num_generations=4, max_completion_length=8, ignore_eos=True),
            trainer=TrainerConfig(prompts_per_step=1),
        )
        return replace(base, **fields)

    return make


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("linear", [5e-4, 1e-3, 1e-3, 5e-4]),
        ("cosine", [5e-4, 1e-3, 1e-3, 5e-4]),
        ("constant", [5e-4, 1e-3, 1e-3, 1e-3]),
    ],
)
def test_the_rate_of_each_step_is_the_schedules(
    config: Callable[..., RunConfig], scheduler: str, expected: list[float]
) -> None:
    """Two steps of warm-up, then two of decay: the rate that an update had, and how far it moved the weights."""
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=2, lr_scheduler=scheduler)  # type: ignore[arg-type]
    made = config(optimizer=optimizer)
    run = build(made)
    loop, seen = Loop(made, run), []
    for step in range(4):
        seen.append(loop.step(step)[0]["lr"])
        assert run.trainer.programs.state.lr.item() == pytest.approx(expected[step])
    assert seen == pytest.approx(expected)


def test_the_overlong_penalty_is_in_the_reward_and_the_advantage(config: Callable[..., RunConfig]) -> None:
    """Lengths 2, 6, 7 and 8 of at most 8, and a buffer of 4: 0, a half, three quarters and all of the penalty."""
    loop = Loop(made := config(loss=LossConfig("dapo", overlong_buffer=4, overlong_penalty=0.5)), build(made))
    group = rollouts([2, 6, 7, 8])
    loop._set_advantages([group], {})
    assert [r.reward for r in group.rollouts] == [1.0, 0.75, 0.625, 0.5]
    assert [r.advantage for r in group.rollouts] == [0.28125, 0.03125, -0.09375, -0.21875]
    assert loop.step(0)[0]["reward/mean"] == 0.5 - 0.5  # every second has 1, and all are cut off


def rollouts(lengths: list[int]) -> RolloutGroup:
    """One group whose completions have these lengths, all cut off but the first two, rewarded with 1."""
    made = [
        Trajectory(
            [Segment([1]), Segment([1] * n, True, [-1.0] * n, [-1.0] * n, [0] * n)],
            "length" if i > 1 else "stop",
            reward=1.0,
        )
        for i, n in enumerate(lengths)
    ]
    return RolloutGroup(made, SamplingParams(n=len(lengths)))


@pytest.mark.parametrize(
    ("loss_type", "masked", "expected"),
    [
        ("grpo", False, [1 / 8, 1 / 16, 1 / 32, 1 / 32]),
        ("grpo", True, [1 / 8, 1 / 16, 0, 0]),
        ("dr_grpo", False, [1 / 32] * 4),
        ("dr_grpo", True, [1 / 32, 1 / 32, 0, 0]),
        ("dapo", False, [1 / 22] * 4),
        ("dapo", True, [1 / 6, 1 / 6, 0, 0]),
    ],
)
def test_masked_completions_weigh_nothing_and_the_means_are_trls(
    config: Callable[..., RunConfig], loss_type: str, masked: bool, expected: list[float]
) -> None:
    """TRL 1.16: grpo's and dr_grpo's means count masked sequences, dapo's does not count their tokens."""
    made = config(loss=LossConfig(loss_type, mask_truncated_completions=masked))  # type: ignore[arg-type]
    group, loop = rollouts([2, 4, 8, 8]), Loop(made, build(made))
    weights = loop._loss_weights([group])
    assert [weights.get(id(r), 0.0) for r in group.rollouts] == pytest.approx(expected)
    for r, advantage in zip(group.rollouts, (1.0, -1.0, 2.0, -2.0), strict=True):
        r.advantage = advantage
    (batch,), checks = loop._pack([group], [])
    assert not checks and batch.weight_C[batch.valid_C].split([2, 4, 8, 8])[3].tolist() == pytest.approx(
        [expected[3]] * 8
    )


def test_masked_completions_have_no_advantage_beside_a_critic(config: Callable[..., RunConfig]) -> None:
    made = config(loss=LossConfig("ppo", mask_truncated_completions=True))
    loop = Loop(made, build(made))
    _, groups = loop.step(0)[:2]
    assert {r.finish_reason for g in groups for r in g.rollouts} == {"length"}
    assert [r.advantage for g in groups for r in g.rollouts] == [0.0] * sum(len(g.rollouts) for g in groups)


@pytest.mark.parametrize("updates", [1, 3])
def test_later_updates_have_the_support_that_was_sampled(
    config: Callable[..., RunConfig], updates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(
        sampling=replace(config().sampling, top_k=20, temperature=0.8),
        trainer=TrainerConfig(prompts_per_step=1, num_iterations=updates),
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    run, seen = build(made), []
    forward_backward = run.trainer.forward_backward

    def recorded(batch: PackedBatch, **options: bool) -> None:
        seen.append(batch.support_C)
        forward_backward(batch, **options)
        seen.append(batch.support_C)

    monkeypatch.setattr(run.trainer, "forward_backward", recorded)
    metrics, _ = Loop(made, run).step(0)
    assert metrics["updates"] == updates and len(seen) == 2 * updates and seen[0] is None
    if updates == 1:
        assert seen[1] is None  # nobody would read it
        return
    kept = seen[1]
    assert all(support is not None and torch.equal(support, kept) for support in seen[1:])
    bits = sum((kept >> i & 1).long() for i in range(8)).sum(1)
    assert bits[:32].tolist() == [20] * 32  # top_k tokens a completion token


def test_steps_without_anything_to_learn_are_counted_over_a_resumption(
    config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    made = config("equal", trainer=TrainerConfig(prompts_per_step=1, max_idle_steps=4), checkpoint=CheckpointConfig(1))
    train(replace(made, steps=2), tmp_path / "run", resume=False)
    with pytest.raises(LockstepError, match="step 4: for 4 steps every group's rewards were all equal"):
        train(replace(made, steps=9), tmp_path / "run", resume=True)
