"""The policy step as graphs: the same bits as eager, whatever the passes and however it is launched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor, fx

from lockstep.algorithms.sft import SFT
from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import (
    EAGER,
    GraphError,
    Inputs,
    Runtime,
    Store,
    compile_report,
    module_inputs,
    substitute_inputs,
)
from lockstep.graph.ir.captured import op_name
from lockstep.graph.launch.memory import Outputs
from lockstep.models import Decoder
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.trainer import programs as trainer_runs
from lockstep.types import SamplingParams

WAYS = {"captured": {}, "recorded": {"recorded": True}, "recomputed": {"recorded": True, "recompute": ("full",)}}
WAYS["elementwise"] = {"recorded": True, "recompute": ("elementwise", "layers.0")}
WAYS["operators"] = {"recorded": True, "recompute": ("linear*", "lockstep.*")}
ONE_SIZE = [BatchShape(44, 32, 16, 44)]  # a graph for all micro-batches


def three_steps(
    model: Decoder,
    rollout: Callable[..., Any],
    runtime: Runtime,
    reference: Decoder | None = None,
    updates: int = 1,
    shapes: Sequence[BatchShape] = (),
) -> list[Any]:
    """Results, accumulated gradients and final state of three steps, all micro-batches checked once more."""
    loss = LossConfig(beta=0.1 if reference else 0.0)
    trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), loss, reference=reference, runtime=runtime)
    seen: list[Any] = []
    for step in range(3):
        batches = pack(rollout(model, step), max_tokens=44, check_parity=True, shapes=shapes)
        assert len(batches) > 1
        for update in range(updates):
            for batch in batches:
                if reference and update == 0:
                    trainer.reference_logprobs(batch)
                trainer.forward_backward(batch, keep_support=updates > 1)
                if update == 0:
                    trainer.check(batch)
                batch.check_parity = False
            seen += [trainer.flat.grad.clone(), trainer.optim_step(1e-2)]
    assert all(result.applied and result.tokens_different == 0 for result in seen[1::2])
    return [*seen, trainer.flat.data.clone(), *(t.clone() for t in trainer.state()[0].values())]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *(("captured", torch.bfloat16), ("recorded", torch.float32)),
        *((way, torch.float32) for way in ("recomputed", "elementwise", "operators")),
    ],
)
def test_three_captured_steps_are_three_eager_steps(decoder, rollout, runtime_of, way: str, dtype) -> None:
    """Of graphs of one size and two layers, and of several sizes."""
    runtime, shapes, layers = runtime_of(**WAYS[way]), ONE_SIZE, 2
    if way == "recorded":
        shapes, layers = [], 1
    eager = three_steps(decoder(dtype, layers=layers), rollout, EAGER, shapes=shapes)
    assert same(three_steps(decoder(dtype, layers=layers), rollout, runtime, shapes=shapes), eager)
    launches = runtime.launches
    assert launches["optim_step"] == 3 and launches["forward_backward"] == launches["check"] >= 6
    recorded = [g for f in runtime.programs for g in f.graphs.values()]
    assert runtime.replays.total() == (launches.total() - len(recorded) if way != "captured" else 0)
    trained = [g.captured for f in runtime.programs if f.name == "forward_backward" for g in f.graphs.values()]
    for name in ("score_logits", "linear_fp32"):  # the head's product is not made again where its logits are kept
        kept = [sum(op_name(node) == f"lockstep.{name}" for node in one.graph.nodes) for one in trained]
        assert kept and set(kept) == {way != "recomputed"}


def test_a_reference_and_later_updates_on_the_support_that_was_sampled(decoder, rollout, runtime_of) -> None:
    runtime = runtime_of(**WAYS["recomputed"])
    models = [(decoder(layers=1), decoder(seed=1, layers=1)) for _ in range(2)]
    eager, found = (
        three_steps(model, rollout, runs, reference, updates=2, shapes=ONE_SIZE)
        for runs, (model, reference) in zip((EAGER, runtime), models, strict=True)
    )
    assert same(found, eager)
    assert runtime.launches["reference_logprobs"] >= 6


def test_a_graph_serves_every_step_of_its_bucket(decoder, rollout, runtime_of) -> None:
    runtime = runtime_of(recorded=True)
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    for step in range(4):
        sampling = SamplingParams(n=3, max_completion_length=9, ignore_eos=True)
        (batch,) = pack(rollout(model, step, sampling), max_tokens=256, check_parity=True)
        trainer.forward_backward(batch)
        assert trainer.optim_step(1e-2).applied
        runtime.end_warm_up()
    assert (runtime.captures, runtime.recompiles) == (2, 0)
    assert runtime.replays == {"forward_backward": 3, "optim_step": 3}


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "sapo", "dppo", "rloo"])
def test_every_algorithm_s_graphs_compute_what_eager_does(decoder, rollout, runtime_of, loss_type: str) -> None:
    """Two updates a rollout, the second at ratios that are not 1. The algorithms left out have one of these losses, or
    that of a run of `tests/rl/test_loop_algorithms.py`."""

    def run(runtime: Runtime) -> list[Any]:
        model = decoder(layers=1)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(loss_type), runtime=runtime)
        (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
        results = []
        for _ in range(2):
            trainer.forward_backward(batch)
            results.append(trainer.optim_step(1e-2))
            batch.check_parity = False
        assert results[0].tokens_different == 0 == results[0].clip_ratio
        return [*results, trainer.flat.data]

    assert same(run(runtime_of(stored=True)), run(EAGER))


def test_supervised_steps_and_other_losses_have_graphs_of_their_own(decoder, rollout, runtime_of) -> None:
    def run(runtime: Runtime) -> list[Any]:
        model = decoder(layers=1)
        trainer = Trainer(model, OptimizerConfig(), LossConfig("ppo"), runtime=runtime)
        groups = rollout(model, 0)
        lengths = [len(s.token_ids) for g in groups for s in g.rollouts]
        for sequence, weight in zip(
            (s for g in groups for s in g.rollouts), SFT().weights(lengths, len(lengths), 0), strict=True
        ):
            sequence.loss_weight = weight
        (batch,) = pack(groups, max_tokens=256, check_parity=False)
        results = []
        for loss_type in ("sft", None, "sft", None):
            trainer.forward_backward(batch, loss_type=loss_type)
            results.append(trainer.optim_step(1e-2))
        return [*results, trainer.flat.data]

    runtime = runtime_of()
    assert same(run(runtime), run(EAGER)) and runtime.captures == 3


def test_a_flipped_bit_stops_the_update_inside_the_graph_and_is_named(decoder, rollout, runtime_of) -> None:
    model = decoder(layers=1)
    groups = rollout(model, 0)
    values = groups[0].rollouts[1].logprobs
    trainer_value, values[2] = values[2], float(torch.tensor(values[2]).nextafter(torch.tensor(0.0)))
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True, stored=True))
    before = trainer.flat.data.clone()
    for batch in pack(groups, max_tokens=44, check_parity=True):
        trainer.forward_backward(batch)
    result = trainer.optim_step(1e-2)
    assert not result.applied and result.tokens_different == 1 and torch.equal(trainer.flat.data, before)
    (mismatch,) = result.mismatches
    assert (mismatch.position, mismatch.kind, mismatch.trainer) == (2, "sampled", trainer_value)
    assert not trainer.flat.grad.any()


def mismatches_of_two(decoder, rollout, runtime: Runtime, shapes: list[BatchShape]) -> list[Any]:
    """Micro-batches, the first of which has a token whose log-probabilities both differ: what is said of it, and what
    `checked` was before."""
    model = decoder(layers=1)
    groups = [rollout(model, step) for step in range(2)]
    sequence = groups[0][0].rollouts[0]
    assert sequence.logprobs is not None and sequence.model_logprobs is not None
    sequence.logprobs[1] *= 2
    sequence.model_logprobs[1] *= 2
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    for some, shape in zip(groups, itertools.cycle(shapes), strict=False):
        for batch in pack(some, max_tokens=256, check_parity=True, shapes=[shape]):
            trainer.forward_backward(batch)
    checked = [logprobs.clone() for logprobs in trainer.checked_logprobs]
    result = trainer.optim_step(1e-2)
    assert not result.applied and result.tokens_different == 1
    return [*result.mismatches, *checked]


SHAPES = {"several": [BatchShape(256, 64, 16, 64), BatchShape(320, 64, 16, 64)], "one": [BatchShape(256, 64, 16, 64)]}


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_mismatches_of_any_micro_batch_are_named(decoder, rollout, shapes: str, mode: str) -> None:
    runtime = Runtime(CompileConfig("step", mode), torch.device("cpu"), recorder=FakeRecorder(), store=Store())
    expected = mismatches_of_two(decoder, rollout, EAGER, SHAPES[shapes])
    assert [(m.position, m.kind) for m in expected[:2]] == [(1, "sampled"), (1, "model")]
    assert same(mismatches_of_two(decoder, rollout, runtime, SHAPES[shapes]), expected)


def test_a_result_taken_after_the_next_steps_launch_names_its_own_mismatches(decoder, rollout, runtime_of) -> None:
    model = decoder(layers=1)
    groups = rollout(model, 0)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True, stored=True))
    right, values = groups[0].rollouts[0].logprobs, []
    for i in range(3):
        groups[0].rollouts[0].turns[0].logprobs = [*right[:i], right[i] * 2, *right[i + 1 :]]
        groups[1].rollouts[0].logprobs[0] *= 1.5
        (batch,) = pack(groups, max_tokens=256, check_parity=True)
        trainer.forward_backward(batch)
        values.append(trainer.launch_optim_step(1e-2))
    found = [value.get().mismatches for value in values]
    assert [m[0].position for m in found] == [0, 1, 2]
    assert [m[0].trainer for m in found] == right[:3] and all(len(m) == 2 for m in found)


def unlasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs that are left in the graphs' memory."""
    monkeypatch.setattr(trainer_runs, "COMPARED_OUTPUTS", ())


def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs that the graph's own next launch overwrites."""
    monkeypatch.setattr(Outputs, "save", lambda self, names: None)


@pytest.mark.parametrize(("mutant", "shapes"), [(unlasting, "several"), (unsaved, "one")])
def test_keeping_outputs_across_launches_would_be_noticed(decoder, rollout, monkeypatch, mutant, shapes) -> None:
    expected = mismatches_of_two(decoder, rollout, EAGER, SHAPES[shapes])
    mutant(monkeypatch)
    runtime = Runtime(CompileConfig("step", "full"), torch.device("cpu"), recorder=FakeRecorder())
    found = mismatches_of_two(decoder, rollout, runtime, SHAPES[shapes])
    assert len(found) != len(expected) or not same(found, expected)


def test_weights_that_moved_are_noticed(decoder, rollout, runtime_of) -> None:
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime_of(recorded=True, stored=True))
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    trainer.forward_backward(batch)
    model.layers[0].down.data = model.layers[0].down.data.clone()
    with pytest.raises(GraphError, match=r"static input param 'layers\.0\.down' has moved in memory"):
        trainer.forward_backward(batch)


def test_an_operator_that_is_not_graph_safe_is_refused_by_name(decoder, rollout, monkeypatch) -> None:
    def waits(_: object, node: fx.Node) -> str | None:
        return "it reads lengths on the host" if op_name(node) == "lockstep.attention_packed_backward" else None

    monkeypatch.setattr("lockstep.graph.ir.verify._why_not_recordable", waits)
    runtime = Runtime(CompileConfig("step", "full"), torch.device("cpu"), recorder=FakeRecorder())
    model = decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    with pytest.raises(GraphError, match=r"(?s)forward_backward\(.*attention_packed_backward.*: it reads lengths"):
        trainer.forward_backward(batch)


def test_where_nothing_is_captured_a_function_is_called_on_the_modules_own_tensors(decoder) -> None:
    runtime, model = Runtime(CompileConfig("none"), torch.device("cpu")), decoder()
    embed, hooked = model.embed, []

    def body(inputs: Inputs, scale: float) -> dict[str, Tensor]:
        with substitute_inputs(model, inputs):
            assert model.embed is embed and inputs.param["embed"] is embed
            hooked.extend(m for m in model.modules() if m._forward_hooks)
        return {"scaled": inputs.user["x"] * scale}

    function = runtime.program("scaled", body, module_inputs(model))
    with torch.inference_mode():
        assert torch.equal(function({"x": torch.ones(3)}, scale=2.0)["scaled"], torch.full((3,), 2.0))
    assert function.level == "eager" and not hooked and not function.graphs
    assert not runtime.compiles and not runtime.programs and compile_report(runtime) == {}
    other = replace(module_inputs(model), param={name: p * 2 for name, p in model.named_parameters()}, module=None)
    with substitute_inputs(model, other):
        assert torch.equal(model.embed, 2 * embed)
    assert model.embed is embed
