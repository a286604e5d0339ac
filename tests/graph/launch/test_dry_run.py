"""Rehearsals: every kernel call of a graph once, nothing computed, and the graphs that are launched afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor

from lockstep.config import CompileConfig
from lockstep.graph import Inputs, Runtime, capture
from lockstep.graph.launch.dry_run import dry_run

CPU = torch.device("cpu")
calls: list[tuple] = []


@torch.library.custom_op("rehearsed::scale", mutates_args=())
def scale(x: Tensor, weight: Tensor) -> Tensor:
    calls.append((tuple(x.shape), x.data_ptr() % 16, weight.data_ptr() % 16))
    if type(x) is not Tensor:
        assert x.shape[0] != 13
        return torch.empty_like(x)
    return x * weight


@scale.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rehearsed::twice", mutates_args=())
def twice(x: Tensor, weight: Tensor) -> Tensor:
    return scale(scale(x, weight), weight)


@twice.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def body(inputs: Inputs) -> dict[str, Tensor]:
    x = inputs.user["x"]
    for weight in inputs.param.values():
        x = scale(x + 1, weight)
    inputs.buffer["total"].add_(x.sum())
    return {"y": twice(x, inputs.param["a"])[1:], "sum": x.sum()}


def inputs_of(rows: int, weights: Tensor) -> Inputs:
    params = dict(zip("abc", weights, strict=True))
    return Inputs(params, buffer={"total": torch.zeros(())}, user={"x": torch.ones(rows, 4)})


@pytest.fixture(autouse=True)
def no_calls() -> Iterator[None]:
    calls.clear()
    yield


@pytest.mark.parametrize("rows", [2, 8])
def test_calls_that_are_alike_are_made_once_and_on_the_shapes_of_the_launch(rows: int) -> None:
    weights = torch.ones(3, 4)
    captured = capture("f", body, inputs_of(5, weights), writes={"buffer"}, dynamic={"x": ("rows", None)})
    assert not calls
    inputs = inputs_of(rows, weights)
    outputs = dry_run(captured, inputs.tensors(), "rehearsed")
    assert calls == [((rows, 4), 0, 0)] * 3  # once for three layers, and twice within the implementation of `twice`
    assert {name: tuple(y.shape) for name, y in outputs.items()} == {"y": (rows - 1, 4), "sum": ()}
    assert not any(y.any() for y in outputs.values())
    assert inputs.buffer["total"] == 0 and torch.equal(weights, torch.ones(3, 4))


def test_kernels_see_how_well_an_address_is_aligned() -> None:
    weights = torch.ones(16)[1:13].view(3, 4)  # 4 bytes beyond a multiple of 16
    inputs = inputs_of(2, weights)
    captured = capture("f", body, inputs, writes={"buffer"})
    dry_run(captured, inputs.tensors(), "rehearsed")
    place = weights.data_ptr() % 16
    assert place and calls and all(call[2] == place for call in calls)


def test_an_implementation_that_fails_is_passed_over() -> None:
    inputs = inputs_of(13, torch.ones(3, 4))
    captured = capture("f", body, inputs, writes={"buffer"})
    outputs = dry_run(captured, inputs.tensors(), "rehearsed")
    assert calls and outputs["y"].shape == (12, 4)


def test_a_rehearsal_makes_the_graphs_and_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[bool] = []

    @contextmanager
    def compile_only(compiles: bool) -> Iterator[list[str]]:
        within.append(True)
        yield ["a kernel"]
        within.append(False)

    precompile = pytest.importorskip("lockstep.ops.precompile")
    monkeypatch.setattr(precompile, "compile_only", compile_only)
    runtime = Runtime(CompileConfig(capture="step", cudagraph_mode="full"), CPU, recorder=FakeRecorder())
    inputs = inputs_of(4, torch.ones(3, 4))
    function = runtime.program("f", body, Inputs(inputs.param, buffer=inputs.buffer), {"buffer"})
    with runtime.warm_up.rehearsal() as kernels:
        first = function(inputs.user)
    assert kernels == ["a kernel"]
    (graph,) = function.graphs.values()
    assert within == [True, False] and graph.launches == 0 and inputs.buffer["total"] == 0
    assert first["y"].shape == (3, 4) and not first["y"].any()
    second = function(inputs.user)
    assert function.graphs == {key: graph for key in function.graphs} and graph.launches == 1
    assert torch.equal(second["y"], torch.full((3, 4), 4.0)) and inputs.buffer["total"] == 64
    assert runtime.timings.seconds["compile"] > 0
