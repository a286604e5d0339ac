"""Joint capture: the policy step cut by the min-cut partitioner is the step, bit for bit, and says how it was cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from small import CONFIG, make_model
from torch import Tensor
from two_roles import CPU, TwoRoles, batch, results, runtime_of

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import (
    EAGER,
    Differentiated,
    GraphError,
    Runtime,
    check_against_eager,
    compile_report,
    digest,
    dumps,
    loads,
)
from lockstep.graph.ir.captured import is_backward, module_of, op_name
from lockstep.models import Decoder
from lockstep.models.config import MoEConfig
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.types import SamplingParams

MOE = replace(CONFIG, num_layers=2, family="qwen3_moe", moe=MoEConfig(6, 2, 40, dense_layers=(1,)))


def joint(mode: str = "none", **given: Any) -> Runtime:
    return Runtime(CompileConfig("joint", mode, **given), CPU, recorder=FakeRecorder())  # type: ignore[arg-type]


def three_steps(model: Decoder, rollout: Callable[..., Any], runtime: Runtime, reference: Any) -> list[Any]:
    """Gradients, results and state of three steps."""
    loss = LossConfig(beta=0.1 if reference else 0.0)
    trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), loss, reference=reference, runtime=runtime)
    seen: list[Any] = []
    for step in range(3):
        for packed in pack(rollout(model, step), max_tokens=256, check_parity=True):
            if reference:
                trainer.reference_logprobs(packed)
            trainer.forward_backward(packed)
        seen += [trainer.flat.grad.clone(), trainer.optim_step(1e-2)]
        assert seen[-1].applied and seen[-1].tokens_different == 0
    return [*seen, trainer.flat.data.clone(), *(t.clone() for t in trainer.state()[0].values())]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("dtype", "runtime", "with_reference"),
    [(torch.float32, joint(), True), (torch.bfloat16, joint("full", recompute=("full",)), False)],
    ids=["float32", "bfloat16, recorded, recomputed"],
)
def test_three_joint_steps_are_three_eager_steps(decoder, rollout, dtype, runtime, with_reference: bool) -> None:
    def run(runtime: Runtime) -> list[Any]:
        return three_steps(decoder(dtype), rollout, runtime, decoder(dtype, seed=1) if with_reference else None)

    assert same(run(runtime), run(EAGER))
    logs = {
        title: log for title, log in compile_report(runtime)["passes"].items() if log[0].startswith("capture: joint")
    }
    assert logs and all(title.startswith("forward_backward(") for title in logs)
    for log in logs.values():
        assert re.match(
            r"capture: joint; \d{2,} calls forward, \d{2,} backward, \d+\.\d MiB kept for the backward", log[0]
        )


def test_a_mixture_of_experts_with_its_own_loss() -> None:
    def run(runtime: Runtime) -> list[Any]:
        model = make_model(torch.float32, config=MOE)
        loss = LossConfig(router_aux_loss_coef=0.01)
        trainer = Trainer(model, OptimizerConfig(), loss, runtime=runtime)
        shape = BatchShape(32, 16, 4, 24)
        trainer.warm_up([shape], SamplingParams(), check_parity=False, with_checks=False)
        case = trainer.check_cases([shape], SamplingParams(), check_parity=False, with_checks=False)
        return [model, case]

    runtime = joint()
    _, work = run(runtime)
    (verdict, _) = check_against_eager(runtime, work, "strict")
    assert (verdict.function, verdict.level, verdict.cases) == ("forward_backward", "captured", 4)


def test_open_sizes_tags_and_names_are_those_of_a_trace() -> None:
    runtimes = {capture: runtime_of(capture, "eager") for capture in ("step", "joint")}
    roles = {capture: TwoRoles(runtime) for capture, runtime in runtimes.items()}
    assert same(list(results(roles["joint"]).values()), list(results(roles["step"]).values()))
    (a, *_), (b, *_) = (list(r.train.graphs.values()) for r in roles.values())
    assert a.captured.inputs == b.captured.inputs and a.captured.outputs == b.captured.outputs
    assert a.captured.sizes.names == b.captured.sizes.names == ("T",) and runtimes["joint"].captures == 2
    nodes = {n.name: n for n in b.captured.graph.nodes}
    assert module_of(next(n for n in nodes.values() if op_name(n) == "aten.tanh")) == "0"
    assert is_backward(next(n for n in nodes.values() if op_name(n) == "aten.ones_like"))
    assert [op_name(n) for n in nodes.values() if op_name(n) in ("aten.copy_", "aten.add_")].count("aten.add_") == 3
    assert [name for name, _ in b.captured.stages()] == ["capture", "canonicalize", "keep_logits"]


def test_a_joint_graph_is_stored_and_loaded() -> None:
    roles = TwoRoles(runtime_of("joint", "eager"))
    captured = roles.train.graph({"x": batch(6)}, {}).captured
    loaded = loads(dumps(captured))
    assert digest(loaded) == digest(captured) and loaded.log[0].startswith("capture: joint")


def test_functions_without_a_backward_pass_are_traced(decoder) -> None:
    runtime = joint()
    engine = Engine(SharedWeights(decoder()), GeneratorConfig(), 1024, runtime=runtime)
    engine.warm_up(2, 32, SamplingParams(max_completion_length=8))
    assert runtime.captures >= 2 and not any("joint" in line for log in runtime.builder.logs.values() for line in log)


def test_a_closed_over_number_is_refused_and_so_is_an_unused_parameter() -> None:
    factor = 2.0
    roles = TwoRoles()
    body, inputs = roles._eager["train"]
    given = replace(inputs, user={"x": batch(3)})

    def closes_over(t: Any) -> Any:
        return t.param["0.norm"].sum() * factor, {}

    def leaves_one_out(t: Any) -> Any:
        return t.param["0.norm"].sum(), {}

    runtime = joint()
    for forward, message in (
        (closes_over, "closes over 'factor'"),
        (leaves_one_out, "no gradient reaches param '0.up'"),
    ):
        function = runtime.program("train", Differentiated(forward, body.accumulate), inputs, {"grad", "buffer"})
        with pytest.raises(GraphError, match=message):
            function(given.user)
