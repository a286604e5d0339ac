"""Mixture of experts: both roles choose the same experts, a difference is caught where log-probabilities cannot show
it, and what is recorded of the routing is right."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from small import CONFIG, compare, generate, make_model, of_one_shape, requests, train_groups

from lockstep import ops
from lockstep.config import (
    CompileConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.errors import InputError, ParityError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime, check_against_eager
from lockstep.models import Decoder, PackedAttention, Routing
from lockstep.models.config import MoEConfig
from lockstep.models.init import init_folder
from lockstep.ops.moe import routing
from lockstep.rl.loop import Loop
from lockstep.rl.step_checks import raise_mismatch
from lockstep.session.build import build
from lockstep.session.certificate import Certificate
from lockstep.session.parity_check import check_model
from lockstep.session.warm_up import warm_up
from lockstep.trainer import BatchShape, StepResult, Trainer, pack
from lockstep.types import PackedBatch, RolloutGroup, SamplingParams, Trajectory

MOE = replace(CONFIG, num_layers=3, family="qwen3_moe", moe=MoEConfig(6, 2, 40, dense_layers=(1,)))
CHOICES = 4  # a token's: two layers of two slots
TWINS = replace(MOE, moe=MoEConfig(6, 1, 40, router_bias=True))
SHAPE = BatchShape(512, 128, 16, 200)


def runtime_of(capture: str) -> Runtime:
    return Runtime(CompileConfig("step"), torch.device("cpu")) if capture == "step" else EAGER


def twins() -> Decoder:
    """A model whose experts 2i and 2i + 1 are the same, so that a token may go to either without a bit changing."""
    model = make_model(torch.float32, config=TWINS)
    with torch.no_grad():
        for layer in model.layers:
            if layer.moe is not None:
                for weight in (layer.moe.router, layer.moe.experts.gate_up, layer.moe.experts.down):
                    weight[1::2] = weight[::2]
                layer.moe.router_bias.zero_()
    return model


def higher_index_wins(values: torch.Tensor, count: int) -> torch.Tensor:
    """A mutant of `routing._top_indices` that breaks ties the other way."""
    last = values.shape[-1] - 1
    return last - top(values.flip(-1), count)


top = routing._top_indices


@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("mutant", ["ties", "bias"])
def test_other_experts_stop_a_strict_run_though_log_probs_are_equal(
    mutant: str, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = twins()
    weights, runtime = SharedWeights(copy.deepcopy(model)), runtime_of(capture)
    if mutant == "bias":  # far smaller than what tells other experts apart
        weights.model.layers[2].moe.router_bias[1::2] += 1e-6
    prompts, sampling = requests(3, length=8)
    with monkeypatch.context() as patch:
        if mutant == "ties":
            patch.setattr(routing, "_top_indices", higher_index_wins)
        completions = generate(Engine(weights, GeneratorConfig(), 16384, runtime=runtime), prompts, sampling)
    trainer = of_one_shape(Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime))
    before = trainer.flat.data.clone()
    for batch in pack(train_groups(prompts, sampling, completions), max_tokens=4096, check_parity=True):
        trainer.forward_backward(batch)
    result = trainer.optim_step(1e-2)
    assert result.routing and result.logprob_diff_max == 0
    assert result.tokens_different == result.routing.tokens_different == result.tokens_checked > 0
    assert not result.applied and torch.equal(trainer.flat.data, before)
    assert {m.kind for m in result.mismatches} == {"experts"}
    with pytest.raises(ParityError, match="step 6: .* went to other experts") as error:
        raise_mismatch(5, result)
    assert "\n  group 0 sample 0, completion token 0, experts: generator " in str(error.value)


def test_equal_choices_pass_and_are_counted() -> None:
    result, completions = checked(make_model(torch.bfloat16, config=MOE))
    tokens = sum(len(c.token_ids) for c in completions)
    assert result.tokens_checked == tokens and result.tokens_different == 0
    assert result.routing and result.routing.choices_checked == tokens * CHOICES
    assert all(len(c.route_digests or ()) == len(c.token_ids) for c in completions)
    certificate = Certificate("strict")
    for step in range(2):
        certificate.add(step, result, tokens)
    found = certificate.to_dict()
    assert (found["identical"], found["expert_choices_checked"]) == (True, 2 * tokens * CHOICES)
    assert found["tokens_routed_differently"] == 0


def test_one_planted_digest_is_named() -> None:
    def plant(groups: list[RolloutGroup]) -> None:
        groups[1].rollouts[1].route_digests[3] ^= 1  # type: ignore[index]

    result, _ = checked(make_model(torch.float32, config=MOE), plant)
    assert result.routing and (result.tokens_different, result.routing.tokens_different) == (1, 1)
    (mismatch,) = result.mismatches
    assert (mismatch.request, mismatch.position, mismatch.kind) == ("group 1 sample 1", 3, "experts")
    assert mismatch.trainer == int(mismatch.generator) ^ 1


def test_a_dense_models_records_have_nothing_of_it() -> None:
    result, completions = checked(make_model(torch.float32))
    assert result.routing is None and all(c.route_digests is None for c in completions)
    certificate = Certificate("strict")
    certificate.add(0, result, result.tokens_checked)
    assert not {"expert_choices_checked", "tokens_routed_differently"} & certificate.to_dict().keys()


def test_missing_digests_are_refused() -> None:
    def forget(groups: list[RolloutGroup]) -> None:
        for group in groups:
            for sequence in group.rollouts:
                sequence.turns[0].route_digests = None

    def forget_one(groups: list[RolloutGroup]) -> None:
        groups[1].rollouts[0].turns[0].route_digests = None

    def shorten(groups: list[RolloutGroup]) -> None:
        groups[1].rollouts[0].route_digests.pop()  # type: ignore[union-attr]

    model = make_model(torch.float32, config=MOE)
    with pytest.raises(ValueError, match="cannot be checked without the generator's route digests"):
        checked(model, forget)
    with pytest.raises(ValueError, match="group 1 sample 0: parity cannot be checked without its route digests"):
        checked(model, forget_one)
    with pytest.raises(ValueError, match="group 1 sample 0: 6 route digests for 7 completion tokens"):
        checked(model, shorten)


def checked(
    model: Decoder, change: Callable[[list[RolloutGroup]], None] = lambda groups: None
) -> tuple[StepResult, list[Trajectory]]:
    """What the trainer finds of a generator's rollouts, `change`d before."""
    prompts, sampling = requests(4, length=8)
    completions = generate(Engine(SharedWeights(model), GeneratorConfig(), 16384), prompts, sampling)
    groups = train_groups(prompts, sampling, completions)
    change(groups)
    trainer = Trainer(model, OptimizerConfig(), LossConfig())
    for batch in pack(groups, max_tokens=4096, check_parity=True):
        trainer.check(batch)
    return trainer.finish_check(), [c for group in completions for c in group]


def route(model: Decoder, batch: PackedBatch) -> tuple[list[Routing], int]:
    """What the routers find, and how many rows are valid."""
    routes: list[Routing] = []
    attend = PackedAttention(ops.Packed(batch.cu_seqlens, batch.prefix_start_S, batch.prefix_len_S, batch.max_len))
    model(batch.tokens_T, batch.positions_T, attend, routes)
    return routes, int(batch.cu_seqlens[-1])


def batches_of(model: Decoder, max_tokens: int = 512, check_parity: bool = True) -> list[PackedBatch]:
    prompts, sampling = requests(3, length=8)
    completions = generate(Engine(SharedWeights(model), GeneratorConfig(), 16384), prompts, sampling)
    groups = train_groups(prompts, sampling, completions)
    shape = SHAPE._replace(tokens=max_tokens)
    return pack(groups, max_tokens=max_tokens, check_parity=check_parity, shapes=[shape])


def times_of(batch: PackedBatch) -> list[int]:
    """Of each row how many sequences it is part of, a prompt's of all its samples."""
    times = [1] * int(batch.cu_seqlens[-1])
    prompts = zip(batch.prefix_start_S.tolist(), batch.prefix_len_S.tolist(), strict=True)
    for start, samples in Counter((start, start + length) for start, length in prompts if length).items():
        times[slice(*start)] = [samples] * (start[1] - start[0])
    return times


@pytest.mark.parametrize("capture", ["none", "step"])
def test_loads_are_those_of_a_hand_count_without_padding(capture: str) -> None:
    model = make_model(torch.float32, config=MOE)
    trainer = of_one_shape(Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(capture)))
    checked, *batches = batches_of(model, max_tokens=160)
    loads, tokens = [[0] * 6, [0] * 6], 0
    for batch in batches:
        routes, valid = route(model, batch)
        assert valid < len(batch.tokens_T)
        times = times_of(batch)
        tokens += sum(times)
        for layer, found in enumerate(routes):
            for row, time in zip(found.experts_TK[:valid].tolist(), times, strict=True):
                for expert in row:
                    loads[layer][expert] += time
    assert len(batches) > 1 and [sum(layer) for layer in loads] == [2 * tokens, 2 * tokens]
    trainer.check(checked)  # which counts for nothing
    for batch in batches:
        trainer.forward_backward(batch)
    found = trainer.optim_step(1e-3).routing
    assert found and (found.min_expert_tokens, found.max_expert_tokens) == (min(map(min, loads)), max(map(max, loads)))
    assert found.load_imbalance == pytest.approx(sum(6 * max(layer) / sum(layer) for layer in loads) / 2)
    assert set(found.metrics()) == {
        *("moe/load_imbalance", "moe/expert_tokens/min", "moe/expert_tokens/max", "parity/tokens_routed_differently"),
        "parity/prompt_tokens_routed_differently",
    }
    trainer.forward_backward(batches[1])
    again = trainer.finish_check().routing
    assert again and again.max_expert_tokens < found.max_expert_tokens  # each step starts at 0


@pytest.mark.parametrize("capture", ["none", "step"])
def test_balancing_loss_and_gradient_are_those_of_transformers(capture: str) -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").load_balancing_loss_func
    model = make_model(torch.float32, config=MOE)
    parameters, coefficient = list(model.parameters()), 0.5
    batches = batches_of(model, max_tokens=160)
    grads, losses = [], []
    for loss in (LossConfig(), LossConfig(router_aux_loss_coef=coefficient)):
        trainer = Trainer(model, OptimizerConfig(), loss, runtime=runtime_of(capture))
        if not loss.router_aux_loss_coef:  # the other's sizes are open
            of_one_shape(trainer)
        for batch in batches:
            trainer.forward_backward(batch)
        grads.append([grad.clone() for grad in trainer.flat.grads])
        losses.append(trainer.optim_step(0.0))
    assert len(batches) > 1 and sum(batch.share.item() for batch in batches) == pytest.approx(1)
    expected, total = [torch.zeros_like(grad) for grad in grads[0]], 0.0
    for batch in batches:
        routes, valid = route(model, batch)
        loss = batch.share.sum() * theirs(tuple(r.logits_TE[:valid] for r in routes), num_experts=6, top_k=2)
        found = torch.autograd.grad(loss, trainer.flat.parameters, allow_unused=True)
        for sum_, grad in zip(expected, found, strict=True):
            sum_ += 0 if grad is None else coefficient * grad
        total += loss.item()
    off, on = losses
    assert off.routing and on.routing and off.routing.aux_loss is None
    assert on.routing.aux_loss == pytest.approx(total, rel=1e-5)
    assert on.routing.metrics()["moe/aux_loss"] == on.routing.aux_loss
    assert on.loss - off.loss == pytest.approx(coefficient * total, rel=1e-4)
    assert sum(grad.abs().sum() > 0 for grad in expected) > len(parameters) // 2
    for before, after, change in zip(grads[0], grads[1], expected, strict=True):
        torch.testing.assert_close(after - before, change, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo"])
def test_balancing_weighs_as_much_when_groups_are_skipped(
    loss_type: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the groups that are trained on, each step's loss is that of transformers."""
    theirs = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe").load_balancing_loss_func
    init_folder("tiny-qwen3-moe", tmp_path / "model", seed=0)
    config = RunConfig(
        model=str(tmp_path / "model"),
        task=TaskConfig(easy=True, validation_prompts=0),
        sampling=SamplingConfig(num_generations=2, max_completion_length=8),
        trainer=TrainerConfig(prompts_per_step=4),
        loss=LossConfig(loss_type=loss_type, router_aux_loss_coef=0.1),
    )
    loop = Loop(config, build(config))
    trainer, found = loop.run.trainer, []
    forward_backward = trainer.forward_backward

    def recorded(batch: PackedBatch, **options: bool) -> None:
        routes, valid = route(loop.run.policy.model, batch)
        found.append(theirs(tuple(r.logits_TE[:valid] for r in routes), num_experts=8, top_k=2).item())
        forward_backward(batch, **options)

    def reward(uniform: int, groups: list[RolloutGroup], _: object) -> None:
        for group in groups:
            for i, rollout in enumerate(group.rollouts):
                rollout.advantage = 0.0 if group.group < uniform else 1.0 - 2 * i

    monkeypatch.setattr(trainer, "forward_backward", recorded)
    for step, uniform in enumerate((0, 3)):
        monkeypatch.setattr(loop, "_set_advantages", partial(reward, uniform))
        metrics, _ = loop.step(step)
        assert len(found) == step + 1 and metrics["moe/aux_loss"] == pytest.approx(found[-1], rel=1e-5)
        assert metrics["moe/aux_loss"] > 1.5 and metrics["parity/tokens_different"] == 0


def test_balancing_needs_experts_chosen_by_a_softmax() -> None:
    for config in (CONFIG, replace(MOE, moe=MoEConfig(6, 2, 40, sigmoid=True))):
        with pytest.raises(InputError, match=r"loss.router_aux_loss_coef is 0.1: it balances experts"):
            Trainer(make_model(torch.float32, config=config), OptimizerConfig(), LossConfig(router_aux_loss_coef=0.1))


@pytest.mark.parametrize("check_parity", [True, False])
def test_graphs_of_experts_pass_the_check_against_eager_and_none_comes_late(check_parity: bool) -> None:
    model = make_model(torch.float32, config=MOE)
    batches = batches_of(model, check_parity=check_parity)
    runtime = Runtime(CompileConfig("step", "full"), torch.device("cpu"), recorder=FakeRecorder())
    sampling = SamplingParams(temperature=0.8, top_p=0.9, n=3, max_completion_length=10)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(router_aux_loss_coef=0.01), runtime=runtime)
    engine = Engine(SharedWeights(model), GeneratorConfig(), 1024, runtime=runtime)
    trainer.warm_up([SHAPE], sampling, check_parity=check_parity)
    engine.warm_up(4, 60, sampling)
    work = trainer.check_cases([SHAPE], sampling, check_parity=check_parity)
    verdicts = check_against_eager(runtime, [*work, *engine.check_cases()], "strict")
    assert {v.function for v in verdicts} == {"forward_backward", "check", "optim_step", "decode", "mixed"}
    runtime.end_warm_up()
    for batch in batches:
        trainer.forward_backward(batch)
        trainer.check(batch)
    result = trainer.optim_step(1e-3)
    assert result.applied and runtime.recompiles == 0
    assert result.routing and result.routing.choices_checked == result.tokens_checked * CHOICES
    assert (result.tokens_checked > 0) == check_parity and result.routing.max_expert_tokens > 0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Two steps of the tiny mixture of experts."""
    (tmp_path / "rewards.py").write_text("def odd(completions, **_): return [i % 2 for i in range(len(completions))]")
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a longer prompt than that"}\n')
    return RunConfig(
        recipe="dataset",
        arch="tiny-qwen3-moe",
        steps=2,
        task=TaskConfig(
            *("dataset", str(tmp_path / "data.jsonl")),
            reward=(f"{tmp_path / 'rewards.py'}:odd",),
            validation_prompts=0,
        ),
        sampling=SamplingConfig(num_generations=4, max_completion_length=8, ignore_eos=True),
        trainer=TrainerConfig(prompts_per_step=2),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


@pytest.mark.parametrize("capture", ["none", "step"])
def test_a_run_records_its_routing_and_stops_at_other_experts(
    config: RunConfig, capture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config, compile=CompileConfig(capture, verify="off") if capture == "step" else CompileConfig())
    run = build(config)
    warm_up(run)
    loop = Loop(config, run)
    metrics, _ = loop.step(0)
    assert metrics["parity/tokens_checked"] == 64 and metrics["parity/tokens_routed_differently"] == 0
    assert metrics["recompiles"] == 0 and 1 <= metrics["moe/load_imbalance"] <= 4
    assert 0 <= metrics["moe/expert_tokens/min"] <= metrics["moe/expert_tokens/max"]
    certificate = json.loads(json.dumps(loop.certificate.to_dict()))
    assert certificate["identical"] is True and certificate["expert_choices_checked"] == 64 * 4 * 2
    collect = run.engine.advance

    def planted():
        grown = collect()
        for one in grown:
            if one.completion is not None and (one.identity.group, one.identity.sample) == (1, 2):
                one.completion.route_digests[5] ^= 1
        return grown

    monkeypatch.setattr(run.engine, "advance", planted)
    before = [p.detach().clone() for p in run.policy.model.parameters()]
    with pytest.raises(ParityError, match=r"step 2: 1 of 64 tokens .*\n  group 1 sample 2, .* token 5, experts"):
        loop.step(1)
    assert all(map(torch.equal, run.policy.model.parameters(), before))
    assert loop.certificate.to_dict()["tokens_routed_differently"] == 1


def test_the_parity_command_tells_of_experts(tmp_path: Path) -> None:
    init_folder("tiny-qwen3-moe", tmp_path / "model", seed=0)
    report = check_model(str(tmp_path / "model"), tokens=64, seed=0, device="cpu", dtype="float32")
    assert report.identical and report.expert_choices_checked == report.tokens_checked * 8
    assert f"Expert choices    : {report.expert_choices_checked}\n  Routed differently: 0\n" in report.render()
    assert report.to_dict()["tokens_routed_differently"] == 0
    failed = replace(report, tokens_different=3, tokens_routed_differently=3)
    assert failed.render().endswith("FAIL: generator and trainer choose different experts.")
    dense = replace(report, expert_choices_checked=None, tokens_routed_differently=None)
    assert "xpert" not in dense.render() and "expert_choices_checked" not in dense.to_dict()


@pytest.mark.parametrize(
    "fields", [{}, {"page_size": 4}, {"max_num_batched_tokens": 5}, {"cache_tokens": 180, "page_size": 4}]
)
def test_the_experts_of_prompts_are_those_of_the_trainer(fields: dict[str, int], engine_of) -> None:
    """Whatever the pages, the chunks, the preemptions, and what the cache holds: also tokens that were drawn."""
    model = make_model(torch.float32, config=MOE)
    prompts, sampling = requests(4, length=8)
    engine = engine_of(model, **fields)
    for _ in range(2):
        completions = generate(engine, prompts, sampling)
        for prompt, samples in zip(prompts, completions, strict=True):
            assert all(c.prompt_route_digests == samples[0].prompt_route_digests for c in samples)
            assert len(samples[0].prompt_route_digests or ()) == len(prompt)
            assert all(c.route_digests[0] == c.prompt_route_digests[-1] for c in samples)  # type: ignore[index]
        found = compare(model, train_groups(prompts, sampling, completions)).routing
        assert found and (found.prompt_tokens_checked, found.prompt_tokens_different) == (sum(map(len, prompts)), 0)
    longer = [p + c[0].token_ids for p, c in zip(prompts, completions, strict=True)]  # hits pages of drawn tokens
    completions = generate(engine, longer, sampling)
    found = compare(model, train_groups(longer, sampling, completions)).routing
    assert found and (found.prompt_tokens_checked, found.prompt_tokens_different) == (sum(map(len, longer)), 0)


@pytest.mark.parametrize("capture", ["none", "step"])
def test_one_prompt_token_with_other_experts_stops_the_update(capture: str) -> None:
    """Also where the prompt's other samples had the right ones."""
    model, runtime = make_model(torch.float32, config=MOE), runtime_of(capture)
    prompts, sampling = requests(3, length=8)
    completions = generate(Engine(SharedWeights(model), GeneratorConfig(), 16384), prompts, sampling)
    groups = train_groups(prompts, sampling, completions)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    before = trainer.flat.data.clone()
    for sample, planted in ((0, 1), (1, 1), (1, 0)):
        groups[1].rollouts[sample].prompt.route_digests[2] ^= planted  # type: ignore[index]
        for batch in pack(groups, max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch)
        result = trainer.optim_step(1e-2)
        groups[1].rollouts[sample].prompt.route_digests[2] ^= planted  # type: ignore[index]
        assert result.tokens_different == 0 and result.routing
        assert result.routing.prompt_tokens_different == planted and result.applied == result.identical == (not planted)
        assert torch.equal(trainer.flat.data, before) == bool(planted)
        certificate = Certificate("strict")
        certificate.add(0, result, result.tokens_checked)
        assert certificate.to_dict()["identical"] is (not planted)
        assert certificate.to_dict()["prompt_tokens_routed_differently"] == planted
        if planted:
            with pytest.raises(
                ParityError, match="step 1: 0 of .*; 1 prompt tokens went to other experts; the weights"
            ):
                raise_mismatch(0, result)
