"""A pass from outside the package: this file, by its name and a function's, in `compile.passes`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import completed, make_model, train_group

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig, RunConfig, validate
from lockstep.errors import InputError
from lockstep.graph import EAGER, Captured, GraphError, Runtime, Store, check_against_eager
from lockstep.graph.check.against_eager import PassedChecks
from lockstep.graph.ir.captured import op_name
from lockstep.graph.passes.rewrite import rewritten
from lockstep.session.build import resolve
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.types import SamplingParams

SHAPE = BatchShape(64, 32, 8, 32)


def swap_operands(captured: Captured) -> tuple[Captured, str]:
    """a + b as b + a: another graph with the same bits."""
    result = rewritten(captured)
    sums = [n for n in result.graph.nodes if op_name(n) == "aten.add" and len(n.all_input_nodes) == 2 and not n.kwargs]
    for node in sums:
        node.args = node.args[::-1]
    return result, f"{len(sums)} sums"


def lose_a_gradient(captured: Captured) -> tuple[Captured, str]:
    """What a mistake looks like: the last write that adds two tensors adds nothing."""
    result = rewritten(captured)
    *_, last = (n for n in result.graph.nodes if op_name(n) == "aten.add_" and len(n.all_input_nodes) == 2)
    last.kwargs = {"alpha": 0}
    return result, "a gradient less"


def compile_with(*passes: str) -> CompileConfig:
    return CompileConfig("step", passes=passes)


def own(function: str) -> str:
    return f"{__file__}:{function}"


def trained(runtime: Runtime) -> tuple[Trainer, torch.Tensor]:
    """The weights after three updates."""
    model = make_model(torch.float32)
    trainer = Trainer(model, OptimizerConfig(learning_rate=0.01), LossConfig(), runtime=runtime, enforce_parity=False)
    sequences = [completed([3, 4, 5 + i], (-1.0) ** i, 0.1, [-1.0] * 3, [-1.0] * 3) for i in range(3)]
    for _ in range(3):
        for batch in pack(
            [train_group([1, 2], sequences, SamplingParams())], max_tokens=64, shapes=[SHAPE], check_parity=False
        ):
            trainer.forward_backward(batch)
        assert trainer.optim_step(0.01).applied
    return trainer, trainer.flat.data.clone()


def test_a_pass_of_ones_own_rewrites_every_graph_and_keeps_the_bits(tmp_path: Path) -> None:
    config, (_, eager) = compile_with("default", own("swap_operands")), trained(EAGER)
    for _ in range(2):  # the second start traces again: nothing tells whether the pass is what it was
        runtime = Runtime(config, torch.device("cpu"), store=Store(tmp_path))
        trainer, found = trained(runtime)
        assert torch.equal(found, eager)
        assert (runtime.captures, runtime.loaded) == (2, 0)
    logs, passes = runtime.builder.logs.values(), ["canonicalize", "keep_logits", "swap_operands"]
    assert [[line.partition(":")[0] for line in log] for log in logs] == [passes] * 2
    assert any(int(log[-1].split()[-2]) > 0 for log in logs)
    work = trainer.check_cases([SHAPE], SamplingParams(), check_parity=False, with_checks=False)
    verdicts = check_against_eager(runtime, work, "strict")
    assert {v.faults for v in verdicts} == {()}


def plus(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(b, a)


def call_a_function(captured: Captured) -> tuple[Captured, str]:
    """a + b by a function of one's own."""
    result = rewritten(captured)
    sums = [n for n in result.graph.nodes if op_name(n) == "aten.add" and len(n.all_input_nodes) == 2 and not n.kwargs]
    for node in sums:
        node.target = plus
    return result, f"{len(sums)} sums"


def test_a_check_of_a_graph_that_calls_a_function_of_ones_own_is_made_at_every_start(tmp_path: Path) -> None:
    for function, known in (("swap_operands", True), ("call_a_function", False)):
        runtime = Runtime(compile_with(own(function)), torch.device("cpu"))
        trainer, _ = trained(runtime)
        work = trainer.check_cases([SHAPE], SamplingParams(), check_parity=False, with_checks=False)[:1]
        for again in range(2):
            (verdict,) = check_against_eager(runtime, work, "strict", PassedChecks(tmp_path / function))
            assert (verdict.known == verdict.cases) == (known and again == 1)


def check_with(*passes: str) -> None:
    """Check a training step with these passes against eager."""
    runtime = Runtime(compile_with(*passes), torch.device("cpu"))
    trainer = Trainer(make_model(torch.float32), OptimizerConfig(), LossConfig(), runtime=runtime)
    (work, *_) = trainer.check_cases([SHAPE], SamplingParams(), check_parity=False)
    check_against_eager(runtime, [work], "strict")


@pytest.mark.parametrize("function", ["lose_a_gradient", "lose_a_write"])
def test_a_pass_that_changes_bits_is_named_with_the_node(function: str) -> None:
    found = rf"forward_backward.*{function} differs from the step before in grad .*, first at node add_"
    with pytest.raises(GraphError, match=found):
        check_with(own(function), "canonicalize")


def lose_a_write(captured: Captured) -> tuple[Captured, str]:
    result = rewritten(captured)
    *_, last = (n for n in result.graph.nodes if op_name(n) == "aten.add_" and len(n.all_input_nodes) == 2)
    result.graph.erase_node(last)
    return result, "a write less"


def forget_the_note(captured: Captured) -> Captured:
    return captured


def change_the_argument(captured: Captured) -> tuple[Captured, str]:
    for node in captured.graph.nodes:
        if op_name(node) == "aten.add" and len(node.all_input_nodes) == 2:
            node.args = node.args[::-1]
    return captured, "in place"


def look_for_what_is_not_there(captured: Captured) -> tuple[Captured, str]:
    return captured, {"a": "b"}[captured.name]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("forget_the_note", "forget_the_note returned a Captured; a pass returns the new graph"),
        ("change_the_argument", r"f.*: compile\.passes '.*change_the_argument' changes the graph that it is given"),
        ("look_for_what_is_not_there", r"_there. raised KeyError: .forward_backward. \(.*toy_pass.py, line \d+\)$"),
    ],
)
def test_a_pass_with_another_mistake_is_told_which(function: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        trained(Runtime(compile_with(own(function)), torch.device("cpu")))


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        (("fuze",), r"compile\.passes has no 'fuze'; use default, some of canonicalize, .*, or a function as module:"),
        (("default", "fuse"), "compile.passes has 'fuse' twice"),
        (("nowhere.py:f",), "compile.passes 'nowhere.py:f': file nowhere.py does not exist"),
        ((own("nothing"),), "has no function 'nothing'"),
    ],
)
def test_a_pass_that_there_is_not_is_refused_with_what_there_is(passes: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(validate(RunConfig(device="cpu", compile=compile_with(*passes))))


def test_what_a_list_leaves_out_cannot_be_asked_for() -> None:
    config = replace(compile_with("canonicalize"), recompute=("full",))
    with pytest.raises(InputError, match="compile.recompute is set, and compile.passes leaves recompute out"):
        validate(RunConfig(device="cpu", compile=config))
