"""Capture: what varies, what is constant, what is refused."""

from __future__ import annotations

import functools
import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.graph import (
    GraphError,
    Inputs,
    backward,
    capture,
    digest,
    dump,
    module_inputs,
    run_passes,
    substitute_inputs,
)
from lockstep.graph.ir.captured import is_backward, module_of


def run(captured, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        return captured.module.forward(*(tensor for _, _, tensor in inputs.flat()))


def test_only_tensors_vary() -> None:
    captured = capture("f", lambda t, factor: {"y": t.user["x"] * factor}, user(torch.ones(3)), statics={"factor": 3})
    (y,) = run(captured, user(torch.tensor([1.0, 2.0, 5.0])))
    assert y.tolist() == [3.0, 6.0, 15.0]
    assert captured.title == "f(factor=3)" and [str(i) for i in captured.inputs] == ["user 'x'"]


def user(x: Tensor) -> Inputs:
    return Inputs(user={"x": x})


def test_tracing_touches_nothing_and_a_run_writes_the_inputs_themselves() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        t.grad["g"][1:].add_(t.user["x"])
        t.buffer["count"].add_(1)
        return {"total": t.grad["g"].sum()}

    grad, count = torch.zeros(3), torch.zeros((), dtype=torch.int64)
    inputs = Inputs(grad={"g": grad}, buffer={"count": count}, user={"x": torch.tensor([2.0, 3.0])})
    captured = capture("f", body, inputs, writes={"grad", "buffer"})
    assert not grad.any() and count == 0
    for calls in (1, 2):
        (total,) = run(run_passes(captured, []), inputs)
        assert grad.tolist() == [0.0, 2.0 * calls, 3.0 * calls] and count == calls and total == 5.0 * calls


def test_numbers_and_tensors_of_the_closure_are_refused_by_name() -> None:
    bound, weight = 3, torch.ones(3)
    for body, name in (
        (lambda t: {"y": t.user["x"] * bound}, "'bound', a int value; pass it as a static"),
        (lambda t: {"y": t.user["x"] * weight}, "'weight', a Tensor tensor; pass it as an input"),
        (functools.partial(lambda t, k: {"y": t.user["x"] * k}, k=2.0), "'k', a float value"),
    ):
        with pytest.raises(GraphError, match=f"f: the traced function closes over {name}"):
            capture("f", body, user(torch.ones(3)))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda t: {"y": t.user["x"] + 1 if t.user["x"].sum() > 0 else t.user["x"] * 2}, "asked for the value"),
        (lambda t: {"y": t.user["x"] + t.user["x"].data_ptr()}, "a kernel was called outside an operator"),
    ],
)
def test_reading_a_value_or_an_address_while_tracing_is_refused(body, reason: str) -> None:
    for _ in range(2):  # torch itself warns of an address once a process
        with pytest.raises(GraphError, match=f"f: cannot be captured: .*{reason}"):
            capture("f", body, user(torch.ones(3)))


class Tied(nn.Module):
    """A tied pair, a buffer and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.head = self.table
        self.block = nn.Module()
        self.block.weight = nn.Parameter(torch.randn(4, 4))
        self.block.register_buffer("shift", torch.ones(4))
        self.scale = torch.full((4,), 2.0)


def test_a_module_is_substituted_wherever_its_tensors_stand_and_restored() -> None:
    module = Tied()
    own = module_inputs(module)
    assert list(own.param) == ["table", "block.weight"] and list(own.buffer) == ["scale", "block.shift"]
    other = own.with_tensors([tensor + 1 for _, _, tensor in own.flat()])
    before = (module.table, module.block.weight, module.block.shift, module.scale)
    with pytest.raises(ZeroDivisionError), substitute_inputs(module, other):
        assert module.head is module.table is other.param["table"]
        assert module.block.weight is other.param["block.weight"]
        assert module.scale is other.buffer["scale"] and module.block.shift is other.buffer["block.shift"]
        raise ZeroDivisionError
    after = (module.table, module.block.weight, module.block.shift, module.scale)
    assert all(a is b for a, b in zip(before, after, strict=True)) and module.head is module.table
    assert not module.block._forward_hooks and not module.block._forward_pre_hooks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.Parameter(torch.ones(4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.weight)


def test_backward_and_modules_are_marked() -> None:
    module = nn.Sequential(Block(), Block())
    own = module_inputs(module)

    def body(t: Inputs) -> dict[str, Tensor]:
        with substitute_inputs(module, t), torch.enable_grad():
            loss = module(t.user["x"]).square().sum()
            with backward():
                return dict(zip(t.param, torch.autograd.grad(loss, list(t.param.values())), strict=True))

    x = torch.randn(3, 4)
    inputs = Inputs(param=own.param, user={"x": x})
    captured = capture("f", body, inputs)
    calls = [n for n in captured.graph.nodes if n.op == "call_function"]
    marks = [is_backward(n) for n in calls]
    assert marks == sorted(marks) and 0 < sum(marks) < len(marks)
    assert {module_of(n) for n in calls if not is_backward(n)} == {"", "0", "1"}
    assert "lockstep.linear.default(rms_norm_1, arg3_1)  # 1" in dump(captured)
    expected = torch.autograd.grad(module(x).square().sum(), list(own.param.values()))
    assert all(map(torch.equal, run(captured, inputs), expected))


def test_an_interrupted_trace_leaves_no_marks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Block):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    def body(t: Inputs) -> dict[str, Tensor]:
        with substitute_inputs(module, t):
            return {"y": module(t.user["x"])}

    ignored = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    for layer in (Interrupted(), nn.Sequential(Block(), Interrupted())):
        module = nn.Sequential(layer)
        own = module_inputs(module)
        with pytest.raises(KeyboardInterrupt):
            capture("f", body, Inputs(own.param, user={"x": torch.ones(2, 4)}))
        gc.collect()
    assert not ignored


def test_threads_may_trace_functions_of_their_own() -> None:
    def digests(_: int) -> list[str]:
        module = nn.Sequential(*(Block() for _ in range(8)))
        inputs = Inputs(module_inputs(module).param, user={"x": torch.ones(2, 4)})

        def body(t: Inputs) -> dict[str, Tensor]:
            with substitute_inputs(module, t):
                return {"y": module(t.user["x"])}

        return [digest(capture("f", body, inputs)) for _ in range(4)]

    with ThreadPoolExecutor(3) as pool:
        assert set(sum(pool.map(digests, range(3)), [])) == set(digests(0))
