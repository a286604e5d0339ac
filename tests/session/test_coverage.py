"""What a run says of its parity check: every sampled token is compared, or the run says how many are not."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_edits import edited

from lockstep.config import CompileConfig, OptimizerConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.errors import InputError, NonFiniteError, ParityError
from lockstep.rl import loop as loops
from lockstep.rl.loop import Loop
from lockstep.run.display import Display
from lockstep.run.metrics import rollout_records
from lockstep.run.train import train
from lockstep.session import parity_check
from lockstep.session.build import TrainingSession, build
from lockstep.session.certificate import Certificate
from lockstep.session.parity_check import check_model
from lockstep.trainer import Packing, StepResult, pack_shards
from lockstep.types import RolloutGroup, Segment, Trajectory

REWARD = """
def odd(completions, **_):
    return [i % 2 for i in range(len(completions))]

def equal(completions, **_):
    return [1.0] * len(completions)

def of_hello(prompts, **_):
    return [i % 2 if prompt == "hello" else None for i, prompt in enumerate(prompts)]
"""


@pytest.fixture
def config(tmp_path: Path, shallow: Path) -> Callable[..., RunConfig]:
    """`config(reward, **fields)`: a tiny model, two prompts of four samples of eight tokens."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a longer prompt than that"}\n')

    def make(reward: str, **fields) -> RunConfig:
        return RunConfig(
            recipe="dataset",
            model=str(shallow),
            steps=2,
            task=TaskConfig(
                *("dataset", str(tmp_path / "data.jsonl")),
                reward=(f"{tmp_path / 'rewards.py'}:{reward}",),
                reward_on_error="skip",
                validation_prompts=0,
            ),
            sampling=SamplingConfig(num_generations=4, max_completion_length=8, ignore_eos=True),
            trainer=TrainerConfig(prompts_per_step=2),
            optimizer=OptimizerConfig(learning_rate=1e-3),
            **fields,
        )

    return make


def weights(run: TrainingSession) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.policy.model.parameters()]


def every_second_dropped(pack: Callable) -> Callable:
    """Of what `pack` returns, half of the completion tokens are taken for padding."""

    def packed(*arguments, **options):
        batches = pack(*arguments, **options)
        for batch in batches:
            batch.valid_C[1::2] = False
        return batches

    return packed


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("reward", ["odd", "equal"])
def test_a_strict_run_stops_where_tokens_are_not_compared(
    config: Callable[..., RunConfig], reward: str, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the step trains or only checks."""
    made = config(reward, compile=CompileConfig("step", verify="off") if capture == "step" else CompileConfig())
    run = build(made)
    loop, before = Loop(made, run), weights(run)
    monkeypatch.setattr(loops, "pack_shards", every_second_dropped(loops.pack_shards))
    with pytest.raises(
        ParityError, match=r"^step 1: 0 of 32 tokens .*; 64 were sampled; the weights were not changed$"
    ):
        loop.step(0)
    assert all(map(torch.equal, before, weights(run))) and run.trainer.weights_version == 0
    found = loop.certificate.to_dict()
    assert (found["identical"], found["tokens_checked"], found["tokens_not_covered"]) == (False, 32, 32)


def test_a_group_that_is_not_packed_stops_it_too(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config("odd")
    run = build(made)
    loop, before = Loop(made, run), weights(run)
    batches = loop._pack_groups
    monkeypatch.setattr(loop, "_pack_groups", lambda groups, weights: batches(groups[:1], weights))
    with pytest.raises(
        ParityError, match=r"^step 1: 0 of 32 tokens .*; 64 were sampled; the weights were not changed$"
    ):
        loop.step(0)
    assert all(map(torch.equal, before, weights(run)))


def test_a_run_that_only_warns_says_so_everywhere(
    config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(loops, "pack_shards", every_second_dropped(loops.pack_shards))
    train(config("odd", parity="warn"), tmp_path / "run", resume=False)
    certificate = json.loads((tmp_path / "run" / "parity.json").read_text())
    assert (certificate["identical"], certificate["tokens_not_covered"]) == (False, 64)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["parity/tokens_not_covered"] for step in steps] == [32, 32]
    assert [step["updates"] for step in steps] == [1, 1]
    assert "parity BROKEN (64 sampled tokens were not compared)" in capfd.readouterr().err
    assert "64 sampled tokens were not compared" in (tmp_path / "run" / "report.html").read_text()


def test_the_display_tells_of_tokens_that_are_not_compared() -> None:
    stream = io.StringIO()
    with Display(3, live=False, stream=stream) as display:
        for i, missing in enumerate((0, 5, 0)):
            display.update(i, {"parity/tokens_checked": 10, "parity/tokens_not_covered": missing})
    first, second, third = stream.getvalue().splitlines()
    assert "parity identical (10 tokens)" in first
    assert "parity BROKEN (5 sampled tokens were not compared)" in second and "BROKEN (5 " in third


def test_groups_without_a_reward_are_compared(config: Callable[..., RunConfig]) -> None:
    made = config("of_hello")
    loop = Loop(made, build(made))
    metrics, groups = loop.step(0)
    assert metrics["groups_without_reward"] == 1 and len(groups) == 1 and metrics["updates"] == 1
    assert (metrics["parity/tokens_checked"], metrics["parity/tokens_not_covered"]) == (64, 0)
    found = loop.certificate.to_dict()
    assert (found["identical"], found["tokens_checked"], found["tokens_not_covered"]) == (True, 64, 0)
    assert len(loop.evidence()["groups"]) == 2
    trained, excluded_groups = rollout_records(0, groups + loop.excluded_groups)
    assert "without_reward" not in trained and excluded_groups["without_reward"] is True
    of_sample = {(s["reward"], s["advantage"], *s["rewards"].values()) for s in excluded_groups["samples"]}
    assert (None, None, None) in of_sample and {advantage for _, advantage, _ in of_sample} == {None}


def test_a_difference_in_a_group_without_a_reward_stops_the_run(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config("of_hello")
    run = build(made)
    loop, before, collect = Loop(made, run), weights(run), run.engine.advance

    def planted():
        grown = collect()
        for one in grown:
            if one.completion is not None and len(one.completion.prompt.token_ids) > 10 and one.identity.sample == 3:
                one.completion.logprobs[2] += 1e-3
        return grown

    monkeypatch.setattr(run.engine, "advance", planted)
    with pytest.raises(ParityError, match=r"1 of 64 tokens .*\n  group 1 sample 3, completion token 2, sampled"):
        loop.step(0)
    assert all(map(torch.equal, before, weights(run)))


def test_a_step_of_numbers_that_are_none_is_refused(
    config: Callable[..., RunConfig],
) -> None:
    """Also one that only checks, where both roles have NaN."""
    for reward in ("odd", "equal"):
        made = config(reward)
        run = build(made)
        with torch.no_grad():
            run.policy.model.norm.fill_(math.nan)
        loop = Loop(made, run)
        with pytest.raises((ParityError, NonFiniteError)):
            loop.step(0)
        found = loop.certificate.to_dict()
        assert found["identical"] is False and found["tokens_different"] == 64 and math.isnan(found["logprob_diff_max"])


def result(sampled: int, checked: int, different: int = 0, diff_max: float = 0.0) -> StepResult:
    return StepResult(0.0, 0.0, 0.0, True, True, 0.0, None, 1.0, checked, sampled, checked, different, diff_max)


def test_the_certificate_adds_up_what_is_missing() -> None:
    certificate = Certificate("strict")
    certificate.add(0, result(10, 10), 10)
    assert certificate.to_dict()["identical"] is True
    certificate.add(1, result(10, 7), 10)
    found = certificate.to_dict()
    assert (found["identical"], found["tokens_checked"], found["tokens_not_covered"]) == (False, 17, 3)
    nothing = Certificate("strict")
    nothing.add(0, result(10, 0), 10)
    assert nothing.to_dict()["identical"] is False
    assert Certificate("strict").to_dict()["identical"] is None


@pytest.mark.parametrize("values", [[0.5, math.nan, 0.25], [math.nan, 0.5], [0.5, math.nan]])
def test_the_certificates_largest_difference_keeps_nan(values: list[float]) -> None:
    certificate = Certificate("warn")
    for step, value in enumerate(values):
        certificate.add(step, result(1, 1, 1, value), 1)
    assert math.isnan(certificate.logprob_diff_max)
    certificate = Certificate("warn")
    for step, value in enumerate((0.25, 0.5, 0.125)):
        certificate.add(step, result(1, 1, 1, value), 1)
    assert certificate.logprob_diff_max == 0.5


def test_the_parity_command_fails_where_tokens_are_not_compared(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_check, "pack_shards", every_second_dropped(parity_check.pack_shards))
    report = check_model(str(model), tokens=64, seed=0, device="cpu", dtype="float32")
    assert not report.identical and report.tokens_different == 0 < report.tokens_not_covered
    assert report.to_dict()["identical"] is False
    assert f"  Not compared      : {report.tokens_not_covered}\n" in report.render()
    assert report.render().endswith("FAIL: not every sampled token was compared.")
    assert replace(report, tokens_not_covered=0).identical
    assert f"  Tokens checked    : {report.tokens_checked} (64 were asked for; the completions" in report.render()


def test_a_check_of_no_model_is_refused() -> None:
    with pytest.raises(InputError, match="model 'None': there is no such folder"):
        check_model(None, tokens=1, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [1, 2])
def test_a_context_that_holds_no_completion_is_refused(context: int, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    edited(max_position_embeddings=context)(folder)
    if context == 2:
        assert check_model(folder, tokens=1, device="cpu").identical
    else:
        with pytest.raises(InputError, match="the model's context is 1; a prompt and a completion need one token each"):
            check_model(str(folder), tokens=1, device="cpu")


@pytest.mark.parametrize(("seed", "tokens"), [(10, 9000), (390, 3000)])
def test_all_that_is_scored_is_padded_to_the_shape_that_was_expected(seed: int, tokens: int) -> None:
    prompts, sampling = parity_check._random_prompts(tokens, seed, 1000, 100, 16)
    shape, _ = parity_check._expected_batches(prompts, sampling, 1024, 1)
    rollouts = [[Segment(prompt), Segment([0] * 16, sampled=True)] for prompt in prompts]
    groups = [RolloutGroup([Trajectory(r)] * of.n, of) for r, of in zip(rollouts, sampling, strict=True)]
    for batch in pack_shards([groups], range(1), Packing(1024, shapes=[shape]), check_parity=False):
        found = len(batch.tokens_T), len(batch.targets_C), len(batch.prefix_len_S), batch.max_len
        assert found == tuple(shape)
