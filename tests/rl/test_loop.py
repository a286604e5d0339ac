"""The loop as a whole: it learns, it fails closed, it says what it cannot do."""

from __future__ import annotations

import copy
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.config import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    idle_update_message,
    idle_warmup_message,
    reference_message,
    resolve_parallel,
)
from lockstep.errors import InputError, LockstepError, NonFiniteError, ParityError
from lockstep.generator import SharedWeights
from lockstep.rl.loop import Loop
from lockstep.run.report.metric_titles import catalogued_name
from lockstep.run.train import train
from lockstep.session.build import TrainingSession, build, resolve
from lockstep.timings import Timings
from lockstep.trainer.result import PendingResult

pytestmark = pytest.mark.usefixtures("shallow_models")
REWARD = """
def letters(completion_ids, **_):
    "The share of lower-case letters."
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]

def constant(completions, **_):
    return [1.0] * len(completions)

def broken(completions, **_):
    raise KeyError("no such column")

def infinite(completion_ids, **_):
    return [1e38 if i % 2 else -1e38 for i in range(len(completion_ids))]
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A tiny model on two prompts, rewarded for lower-case letters."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a longer prompt than that"}\n')
    return RunConfig(
        recipe="dataset",
        steps=8,
        task=TaskConfig(
            "dataset",
            data=str(tmp_path / "data.jsonl"),
            reward=(f"{tmp_path / 'rewards.py'}:letters",),
            validation_prompts=0,
        ),
        sampling=SamplingConfig(num_generations=8, max_completion_length=12),
        trainer=TrainerConfig(prompts_per_step=2),
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )


def rewarded_by(config: RunConfig, function: str) -> RunConfig:
    path = config.task.reward[0].rsplit(":", 1)[0]
    return replace(config, task=replace(config.task, reward=(f"{path}:{function}",)))


def weights(run: TrainingSession) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.policy.model.parameters()]


def steps(loop: Loop, count: int) -> list[dict]:
    return [loop.step(i)[0] for i in range(count)]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_reward_rises_and_every_token_is_checked(config: RunConfig, loss_type: str) -> None:
    sampling, optimizer = replace(config.sampling, num_generations=16), OptimizerConfig(learning_rate=2e-2)
    config = replace(config, sampling=sampling, optimizer=optimizer, loss=LossConfig(loss_type))  # type: ignore[arg-type]
    loop = Loop(config, build(config))
    metrics = steps(loop, 7)
    rewards = [m["reward/mean"] for m in metrics]
    assert rewards[0] < 0.1 and rewards[-1] > 0.3
    for m in metrics:
        assert m["parity/tokens_different"] == 0
        assert m["parity/tokens_checked"] == 32 * m["response_length/mean"]
    assert loop.certificate.to_dict()["identical"] is True


def test_a_step_says_where_its_time_went(config: RunConfig) -> None:
    loop = Loop(config, build(config))
    loop.validate()
    metrics, _ = loop.step(0)
    assert all(catalogued_name(name) for name in metrics)
    parts = [s for s in loop.spans if s.name in ("generate", "advantages", "pack", "forward_backward", "optim_step")]
    assert [s.name for s in parts] == ["generate", "advantages", "pack", "forward_backward", "forward_backward"] + [
        "optim_step"
    ]
    step = loop.spans[-1]
    assert step.name == "step" and step.facts == {"step": 0} and step.seconds == metrics["time/step"]
    assert 0.1 * step.seconds < sum(s.seconds for s in parts) < step.seconds  # the rest may be a wait for the processor
    within = [s for s in loop.spans if s.name in ("encode", "prefill", "decode", "read", "rewards")]
    assert {s.name for s in within} == {"encode", "prefill", "decode", "read", "rewards"}
    assert all(parts[0].began < s.began and s.seconds < parts[0].seconds for s in within)
    assert metrics["time/generate"] == parts[0].seconds > metrics["time/rewards"] > 0
    assert metrics["time/forward_backward"] == parts[3].seconds + parts[4].seconds
    assert sum(s.facts["tokens"] for s in within if s.name == "prefill") == len("helloa longer prompt than that")


class HostEvent:
    """An event of a device that is done as soon as it is asked."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: HostEvent) -> float:
        return (end_event.at - self.at) * 1e3


def test_what_is_launched_is_measured_by_the_device(config: RunConfig) -> None:
    run = build(config)
    run.timings = run.runtime.timings = run.engine.timings = Timings(keep_spans=True, event=HostEvent)
    loop = Loop(config, run)
    metrics, _ = loop.step(0)
    device = [s for s in loop.spans if s.on_device]
    timed = {"step", "generate", "forward_backward", "optim_step"}
    assert metrics["time/sync"] == 0.0  # the generator reads the trainer's weights
    assert {s.name for s in device} == {*timed, "prefill", "decode"}
    for name in timed:
        assert metrics[f"time/{name}"] == sum(s.seconds for s in device if s.name == name)
    *parts, step = device
    assert step.name == "step" and all(step.began <= s.began <= step.began + step.seconds for s in parts)


def test_without_advantages_nothing_is_learned(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build(replace(config, trainer=replace(config.trainer, skip_zero_variance=False)))
    loop = Loop(replace(config, trainer=replace(config.trainer, skip_zero_variance=False)), run)
    monkeypatch.setattr(loop, "_set_advantages", lambda *_: None)
    before = weights(run)
    assert all(m["grad_norm"] == 0 for m in steps(loop, 3))
    assert all(map(torch.equal, before, weights(run)))


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"num_iterations": 3}, "sampling": {"top_p": 0.9, "temperature": 0.8}},
        {"loss": {"beta": 0.1, "scale_rewards": "group"}},
        {"trainer": {"mode": "per_sample"}, "sampling": {"top_k": 50}},
        {"trainer": {"max_tokens_per_micro_batch": 64}, "sampling": {"min_p": 0.01}},
        {"loss": {"loss_type": "dapo", "overlong_buffer": 6, "mask_truncated_completions": False}},
        {"dtype": "bfloat16"},
    ],
)
def test_every_mode_keeps_parity_and_moves_the_weights(config: RunConfig, changes: dict) -> None:
    for section, fields in changes.items():
        value = replace(getattr(config, section), **fields) if isinstance(fields, dict) else fields
        config = replace(config, **{section: value})
    run = build(config)
    loop = Loop(config, run)
    before = weights(run)
    metrics = steps(loop, 3)
    assert all(m["parity/tokens_different"] == 0 and m["parity/tokens_checked"] > 0 for m in metrics)
    assert run.trainer.weights_version == 3 * config.trainer.num_iterations
    assert not all(map(torch.equal, before, weights(run)))
    if config.loss.beta:
        assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6) and metrics[2]["kl"] > 0


def with_a_flipped_bit(run: TrainingSession) -> TrainingSession:
    """The generator reads a copy of the weights in which one bit is wrong."""
    snapshot = SharedWeights(copy.deepcopy(run.policy.model))
    snapshot.model.layers[0].o.data.view(torch.int32)[3, 5] ^= 1 << 20
    run.engine.runner.set_weights(snapshot)
    return run


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("updates", [1, 3])
def test_strict_parity_stops_before_weights_change(config: RunConfig, updates: int, capture: str) -> None:
    compiled = CompileConfig("step", verify="off") if capture == "step" else CompileConfig()
    config = replace(config, compile=compiled, trainer=replace(config.trainer, num_iterations=updates))
    run = with_a_flipped_bit(build(config))
    before = weights(run)
    with pytest.raises(ParityError, match=r"step 1: \d+ of 192 .*\n  group \d sample \d, completion token \d+, "):
        Loop(config, run).step(0)
    assert all(map(torch.equal, before, weights(run)))
    assert run.trainer.weights_version == 0


def test_no_update_follows_one_that_was_not_made(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, trainer=replace(config.trainer, num_iterations=3))
    run, launched = build(config), []
    launch = run.trainer.launch_optim_step

    def second_overflows(lr: float, sampled: int) -> PendingResult:
        launched.append(weights(run))
        if len(launched) == 2:
            run.trainer.flat.grad[0] = torch.inf
        return launch(lr, sampled)

    monkeypatch.setattr(run.trainer, "launch_optim_step", second_overflows)
    with pytest.raises(NonFiniteError, match="step 1, update 2 of 3: loss is .* the weights were not changed"):
        Loop(config, run).step(0)
    assert len(launched) == 2 and run.trainer.weights_version == 1
    assert all(map(torch.equal, launched[1], weights(run)))


def test_warn_goes_on_and_records(config: RunConfig) -> None:
    config = replace(config, parity="warn")
    run = with_a_flipped_bit(build(config))
    loop = Loop(config, run)
    metrics, _ = loop.step(0)
    assert metrics["parity/tokens_different"] > 0 and metrics["logprob_diff/max"] > 0
    assert run.trainer.weights_version == 1
    certificate = loop.certificate.to_dict()
    assert certificate["identical"] is False and certificate["first_difference"]["step"] == 0


def test_off_checks_nothing_and_says_so(config: RunConfig) -> None:
    config = replace(config, parity="off")
    loop = Loop(config, with_a_flipped_bit(build(config)))
    assert loop.step(0)[0]["parity/tokens_checked"] == 0
    assert loop.certificate.to_dict()["identical"] is None


def test_nothing_to_learn_from_goes_on_then_stops(config: RunConfig) -> None:
    config = rewarded_by(replace(config, trainer=replace(config.trainer, max_idle_steps=2)), "constant")
    run = build(config)
    loop = Loop(config, run)
    before = weights(run)
    metrics, _ = loop.step(0)
    assert metrics["frac_reward_zero_std"] == 1 and metrics["updates"] == 0 and metrics["lr"] > 0
    assert metrics["parity/tokens_checked"] > 0 and metrics["parity/tokens_different"] == 0
    assert all(map(torch.equal, before, weights(run)))
    with pytest.raises(LockstepError, match="step 2: for 2 steps every group's rewards were all equal") as raised:
        loop.step(1)
    assert not raised.value.reported  # by this rank; all others have the same error


def test_groups_without_advantages_are_trained_on_for_their_kl_alone(config: RunConfig) -> None:
    loop = Loop(config, build(config))
    groups, without_reward, *_ = loop._collect(0)
    for i, rollout in enumerate(groups[0].rollouts):  # the other group's advantages are 0
        rollout.advantage = float(i % 3 - 1)

    def sequences(beta: float) -> list[int]:
        loop.config = replace(config, loss=LossConfig(beta=beta))
        return [sum(len(b.sequences) for b in batches) for batches in loop._pack(groups, without_reward)]

    assert sequences(0.0) == [8, 8] and sequences(0.1) == [16, 0]


def test_a_supervised_step_weighs_every_token_alike(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = replace(config.trainer, warmup_steps=1, warmup_batch_size=6)
    config = replace(config, task=TaskConfig("sum-digits", validation_prompts=0), trainer=trainer)
    run = build(config)
    seen, forward_backward = [], run.trainer.forward_backward

    def seeing(batch, loss_type):
        seen.append(batch)
        forward_backward(batch, loss_type)

    monkeypatch.setattr(run.trainer, "forward_backward", seeing)
    Loop(config, run).warmup_step(0)
    lengths = [len(s.token_ids) for batch in seen for s in batch.sequences]
    weights = torch.cat([batch.weight_C[batch.valid_C] for batch in seen])
    assert len(set(lengths)) > 1 and len(weights) == sum(lengths)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / sum(lengths)))


def test_an_overflowing_loss_stops_before_weights_change(config: RunConfig) -> None:
    config = rewarded_by(config, "infinite")
    run = build(config)
    before = weights(run)
    with pytest.raises(NonFiniteError, match="step 1: loss is .* the weights were not changed"):
        Loop(config, run).step(0)
    assert all(map(torch.equal, before, weights(run)))


def test_a_raising_reward_is_named(config: RunConfig) -> None:
    config = rewarded_by(config, "broken")
    with pytest.raises(InputError, match=r"broken.*KeyError"):
        Loop(config, build(config)).step(0)


AWAY = """
import asyncio
from lockstep.environments import End, Environment

class Away(Environment):
    calls = 0

    async def step(self, turn):
        type(self).calls += 1
        if self.calls <= 8:
            await asyncio.sleep(60)
        return End(float(sum(turn.token_ids) % 5))
"""


def test_as_many_timeouts_as_are_allowed_end_a_run(config: RunConfig, tmp_path: Path) -> None:
    """They come at once, as from a service that is away."""
    (tmp_path / "away.py").write_text(AWAY)
    task = replace(config.task, environment=f"{tmp_path / 'away.py'}:Away", reward=(), environment_timeout=2.0)
    config = replace(config, task=replace(task, max_environment_failures=9))
    run = build(config)
    assert Loop(config, run).step(0)[0]["environment/errors"] == 8
    run.environment.calls = 0  # type: ignore[attr-defined]
    config = replace(config, task=replace(config.task, max_environment_failures=8))
    told = r"failed for 8 .* \(task.max_environment_failures\); the first: it took longer than task.environment_timeout"
    with pytest.raises(LockstepError, match=told):
        Loop(config, run).step(0)


def test_a_run_folder_holds_the_evidence_of_a_failure(config: RunConfig, tmp_path: Path) -> None:
    config = rewarded_by(replace(config, trainer=replace(config.trainer, max_idle_steps=2)), "constant")
    with pytest.raises(LockstepError):
        train(config, tmp_path / "run", resume=False)
    for name in ("config.yaml", "metrics.jsonl", "rollouts.jsonl", "parity.json", "summary.json", "report.html"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_shards_of_a_batch_are_packed_apart_and_train_the_same_groups(config: RunConfig) -> None:
    """In one process; `tests/parallel` holds ranks to the bits of it."""
    shards = replace(config, parallel=ParallelConfig(batch_shards=2))
    loops = [Loop(c, build(c)) for c in (config, shards)]
    whole, parts = (loop._pack(*loop._collect(0)[:2]) for loop in loops)
    assert sum(map(len, whole)) == 1 and sum(map(len, parts)) == 2
    metrics = [steps(loop, 2) for loop in loops]
    assert [m["parity/tokens_checked"] for m in metrics[0]] == [m["parity/tokens_checked"] for m in metrics[1]]
    assert metrics[0][0]["grad_norm"] == pytest.approx(metrics[1][0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("prompts", "parts", "parallel", "said"),
    [
        (
            8,
            4,
            ParallelConfig(),
            "updates of 2 leave 2 of 4 processes nothing to do; use 2 mini-batches at most, or 16 ",
        ),
        (8, 3, ParallelConfig(batch_shards=8), "updates of 2 leave 2 of 4 processes nothing to do; use 2 "),
        (6, 6, ParallelConfig(tp=2), "updates of 1 leave 1 of 2 groups of 2 processes nothing to do; use 3 "),
    ],
)
def test_processes_without_a_prompt_in_an_update_are_told_of(
    config: RunConfig, prompts: int, parts: int, parallel: ParallelConfig, said: str
) -> None:
    trainer = replace(config.trainer, prompts_per_step=prompts, num_mini_batches=parts)
    config = resolve_parallel(replace(config, trainer=trainer, parallel=parallel), 4)
    found = idle_update_message(config, 4)
    assert found is not None
    assert found.startswith(f"trainer.num_mini_batches is {parts} and trainer.prompts_per_step {prompts}: {said}")
    most, enough = map(int, re.findall(r"use (\d+) .*, or (\d+) prompts$", found)[0])
    for right in ({"num_mini_batches": most}, {"prompts_per_step": enough}):
        assert idle_update_message(resolve_parallel(replace(config, trainer=replace(trainer, **right)), 4), 4) is None


def test_processes_without_an_example_in_a_supervised_step_are_told_of(config: RunConfig) -> None:
    def told(steps: int, examples: int) -> str | None:
        trainer = replace(config.trainer, warmup_steps=steps, warmup_batch_size=examples)
        return idle_warmup_message(replace(config, trainer=trainer, parallel=ParallelConfig(tp=2)), 8)

    words = "supervised steps leave 1 of 4 groups of 2 processes nothing to do; use 4 at least"
    assert told(1, 3) == f"trainer.warmup_batch_size is 3: {words}" and told(1, 4) is told(0, 3) is None


def test_a_reference_from_before_supervised_steps_is_told_of(config: RunConfig) -> None:
    def told(beta: float, steps: int) -> str | None:
        trainer = replace(config.trainer, warmup_steps=steps)
        return reference_message(replace(config, trainer=trainer, loss=replace(config.loss, beta=beta)))

    assert told(0, 5) is told(0.1, 0) is None
    assert (found := told(0.1, 5)) is not None and "the model from before the supervised steps" in found


def test_what_ranks_cannot_share_is_refused(config: RunConfig) -> None:
    with pytest.raises(InputError, match=r"parallel\.batch_shards is 3, which 2 processes cannot share evenly"):
        resolve(replace(config, parallel=ParallelConfig(batch_shards=3)), 2)
    with pytest.raises(InputError, match=r"trainer\.prompts_per_step is 2, which 4 shards .* evenly; use 4"):
        resolve(config, 4)
    twelve = replace(config, trainer=replace(config.trainer, prompts_per_step=12))
    for ranks in (1, 2, 4, 12):
        assert resolve_parallel(replace(twelve, parallel=ParallelConfig(batch_shards=12)), ranks).parallel.cell == 8
    with pytest.raises(InputError, match=r"parallel\.cell is 8: 3 processes .* use a multiple of 3, such as 12, which"):
        resolve_parallel(replace(twelve, parallel=ParallelConfig(batch_shards=12)), 3)
    piecewise = CompileConfig("step", "piecewise")
    with pytest.raises(InputError, match=r"cudagraph_mode is piecewise with 2 processes"):
        resolve_parallel(replace(config, compile=piecewise), 2)
    assert resolve(config, 2).parallel.batch_shards == 2
