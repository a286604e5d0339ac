"""Open sizes: one trace for many shapes, and what a trace must not take for a number."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep import ops
from lockstep.cache import fingerprint
from lockstep.graph import GraphError, Inputs, Runtime, capture, digest, dump, verify
from lockstep.graph.ir.sizes import Sizes

DYNAMIC = {"x": ("T", None), "rows": ("C",)}


def body(t: Inputs) -> dict[str, Tensor]:
    hidden = ops.linear(t.user["x"], t.param["w"])
    t.buffer["rows_seen"].add_(t.user["rows"].shape[0])
    return {"y": ops.gather_rows(hidden, t.user["rows"]), "pad": torch.zeros(2 * t.user["x"].shape[0])}


def inputs(tokens: int, rows: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 4, generator=generator)
    user = {"x": torch.randn(tokens, 4, generator=generator), "rows": torch.arange(rows) % tokens}
    return Inputs({"w": weight}, buffer={"rows_seen": torch.zeros((), dtype=torch.int64)}, user=user)


def function_of(runtime: Runtime, tokens: int = 5, rows: int = 3):
    given = inputs(tokens, rows)
    static = Inputs(given.param, buffer=given.buffer)
    return runtime.program("f", body, static, {"buffer"}, DYNAMIC), static


@pytest.mark.parametrize("recorded", [False, True])
def test_one_trace_serves_every_size_with_the_bits_of_eager(runtime_of: Callable[..., Runtime], recorded: bool):
    runtime = runtime_of(recorded)
    function, static = function_of(runtime)
    seen = 0
    for tokens, rows in ((5, 3), (5, 5), (32, 7), (3, 5), (5, 3)):
        user = inputs(tokens, rows).user
        outputs = function(user)
        seen += rows
        assert torch.equal(outputs["y"], ops.linear(user["x"], static.param["w"])[user["rows"]])
        assert len(outputs["pad"]) == 2 * tokens and static.buffer["rows_seen"] == seen
    assert runtime.captures == 1 and len(function.graphs) == 4


def test_equal_sizes_at_the_trace_stay_two():
    captured = capture("f", body, inputs(6, 6), writes={"buffer"}, dynamic=DYNAMIC)
    assert [spec.shape for spec in captured.inputs] == [(4, 4), (), ("T", 4), ("C",)]
    text = dump(captured)
    assert "float32[C, 4]" in text and "float32[2*T]" in text and "int C" in text
    assert digest(captured) == digest(capture("f", body, inputs(9, 3), writes={"buffer"}, dynamic=DYNAMIC))


def test_an_expression_of_sizes_is_written_out_once(monkeypatch: pytest.MonkeyPatch):
    """Every check asks for every node's shape, some of them more than once."""
    written, text = [], Sizes.text
    monkeypatch.setattr(Sizes, "text", lambda sizes, found: (written.append(found), text(sizes, found))[1])
    captured = capture("f", body, inputs(6, 6), writes={"buffer"}, dynamic=DYNAMIC)
    for _ in range(3):
        verify(captured)
    assert len(written) == len(set(written)) > 0


def test_a_size_of_one_has_a_trace_of_its_own(runtime_of: Callable[..., Runtime]):
    runtime = runtime_of()
    function, _ = function_of(runtime)
    for rows in (1, 4, 1, 3):
        function(inputs(5, rows).user)
    function(inputs(7, 1).user)  # the other size stays open
    assert runtime.captures == 2


def test_where_one_shape_is_expected_its_sizes_are_fixed(runtime_of: Callable[..., Runtime]):
    runtime = runtime_of()
    function, static = function_of(runtime)
    function.one_shape = True
    for count, tokens in ((1, 5), (2, 6), (2, 7), (2, 5)):  # the second shape is traced for all others
        user = inputs(tokens, 3).user
        assert torch.equal(function(user)["y"], ops.linear(user["x"], static.param["w"])[user["rows"]])
        assert runtime.captures == count
    shapes = [graph.captured.inputs[2].shape for graph in function.graphs.values()]
    assert shapes == [(5, 4), ("T", 4), ("T", 4)]
    function.close()
    function(inputs(5, 3).user)
    assert runtime.captures == 2


def test_a_size_taken_for_a_number_is_refused_by_name():
    for wrong, what in (
        (lambda t: {"y": t.user["x"] * int(t.user["x"].shape[0])}, "T was taken for 6 .*test_dynamic.py"),
        (chunked, "T was taken for 6 .*test_dynamic.py:"),
        (paired, "C was taken for T "),
    ):
        with pytest.raises(GraphError, match=f"f: cannot be captured: size {what}"):
            capture("f", wrong, inputs(6, 6), writes={"buffer"}, dynamic=DYNAMIC)


def chunked(t: Inputs) -> dict[str, Tensor]:
    return {"y": torch.cat([t.user["x"][i : i + 2].sum(1) for i in range(0, t.user["x"].shape[0], 2)])}


def paired(t: Inputs) -> dict[str, Tensor]:
    return {"y": t.user["x"][:, 0] + t.user["rows"]}


def test_a_trace_is_not_used_where_what_it_assumed_does_not_hold(runtime_of: Callable[..., Runtime]):
    def halved(t: Inputs) -> dict[str, Tensor]:
        x = t.user["x"]
        return {"y": x * 2 if x.shape[0] > 8 else x * 3}

    runtime = runtime_of()
    function = runtime.program("f", halved, Inputs(), (), {"x": ("T",)})
    for size, factor in ((10, 2), (20, 2), (4, 3), (5, 3)):
        assert function({"x": torch.ones(size)})["y"].tolist() == [factor] * size
    assert runtime.captures == 3  # 10 and 20 share; 4 and 5 have fixed sizes


def test_a_condition_that_divides_by_what_an_earlier_one_rules_out_is_broken(runtime_of: Callable[..., Runtime]):
    def body(t: Inputs) -> dict[str, Tensor]:
        tokens = t.user["x"].shape[0]
        return {"y": t.user["x"] * (2 if tokens >= 8 and tokens % (tokens // 8) == 0 else 3)}

    runtime = runtime_of()
    function = runtime.program("f", body, Inputs(), dynamic={"x": ("T",)})
    assert [function({"x": torch.ones(tokens)})["y"].sum() for tokens in (16, 24, 5, 17)] == [32, 48, 15, 51]
    assert runtime.captures == 3


def test_inputs_that_disagree_about_a_size_are_refused(runtime_of: Callable[..., Runtime]):
    function = runtime_of().program(
        "f", lambda t: {"y": t.user["x"] + t.user["z"]}, Inputs(), (), dict.fromkeys("xz", "T")
    )
    assert function({"x": torch.ones(3), "z": torch.ones(3)})["y"].tolist() == [2, 2, 2]
    with pytest.raises(GraphError, match="size T of user 'z' is 4, that of an input before it 3"):
        function({"x": torch.ones(3), "z": torch.ones(4)})
    with pytest.raises(GraphError, match="user 'x' has open sizes and must be contiguous"):
        function({"x": torch.ones(8)[::2], "z": torch.ones(4)})


def test_other_static_tensors_share_the_trace(runtime_of: Callable[..., Runtime]):
    """Graphs for several numbers of rows: the buffers differ in size, the weights are the same."""

    def step(t: Inputs) -> dict[str, Tensor]:
        t.buffer["state"].add_(t.param["w"])
        return {"sum": t.buffer["state"].sum(1)}

    weight, runtime = torch.tensor([1.0, 2.0]), runtime_of(recorded=True)
    states = [torch.zeros(rows, 2) for rows in (8, 4, 2)]
    first = runtime.program(
        "decode", step, Inputs({"w": weight}, buffer={"state": states[0]}), {"buffer"}, {"state": ("R", None)}
    )
    functions = [first, *(first.bind_to(Inputs({"w": weight}, buffer={"state": s})) for s in states[1:])]
    for launches in (1, 2):
        for function, state in zip(functions, states, strict=True):
            assert function()["sum"].tolist() == [3.0 * launches] * len(state)
            assert torch.equal(state, launches * weight.expand_as(state))
    assert runtime.captures == 1 and runtime.launches == {"decode": 6} and runtime.replays == {"decode": 3}


def test_start_up_is_split_into_phases(runtime_of: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch):
    """By the time that this thread computes: others may keep it from that."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    runtime = runtime_of(recorded=True)
    fingerprint.is_modified()  # of the package, not of a program: asked once
    function, _ = function_of(runtime)
    began = time.thread_time()
    for tokens in (5, 6):
        function(inputs(tokens, 3).user)
    total = time.thread_time() - began
    seconds = runtime.timings.seconds
    assert {"import_tracer", "trace", "passes", "record"} <= seconds.keys() and all(s > 0 for s in seconds.values())
    assert 0.5 * total < sum(seconds.values()) <= total
    ((title, log),) = runtime.builder.logs.items()
    assert title == "f()" and log[0].startswith("canonicalize: ")


def gathered(t: Inputs) -> dict[str, Tensor]:
    t.buffer["rows_seen"].add_(t.user["rows"].shape[0])
    return {"y": ops.gather_rows(t.user["x"], t.user["rows"]), "x": t.user["x"] + 1}


@pytest.mark.parametrize(("recorded", "loaded"), [(False, False), (True, False), (True, True)])
def test_making_graphs_launches_only_those_that_are_recorded_with_kernels_that_are_not_loaded(
    runtime_of: Callable[..., Runtime], recorded: bool, loaded: bool
):
    runtime = runtime_of(recorded)
    runtime.warm_up.kernels_loaded, launched = loaded, recorded and not loaded
    other, static = function_of(runtime)
    function = runtime.program("g", gathered, static, {"buffer"}, DYNAMIC)
    function.lasting = ("y",)
    for tokens, rows in ((5, 3), (8, 4)):
        user = inputs(tokens, rows).user
        with runtime.warm_up.make_graphs():
            blank = function(user)
            assert recorded == ("record" in runtime.timings.seconds)
        assert static.buffer["rows_seen"].item() == (rows if launched else 0)
        outputs, total = function(user), runtime.timings.seconds.get("record")
        expected = gathered(replace(static, buffer={"rows_seen": torch.zeros(())}, user=user))
        assert all(torch.equal(outputs[name], value) for name, value in expected.items())
        assert {k: (v.shape, v.dtype) for k, v in blank.items()} == {k: (v.shape, v.dtype) for k, v in outputs.items()}
        assert launched or not any(v.any() for v in blank.values())
        assert runtime.timings.seconds.get("record") == total
        other(user)
        assert torch.equal(outputs["y"], expected["y"])  # out of what graphs share
        function(user)
        static.buffer["rows_seen"].zero_()
    assert runtime.replays["g"] == (runtime.launches["g"] - 2 * launched if recorded else 0)


def test_a_graph_whose_shapes_are_computed_is_launched_to_have_them(runtime_of: Callable[..., Runtime]):
    runtime = runtime_of(False)
    function, static = function_of(runtime)
    with runtime.warm_up.make_graphs():
        outputs = function(inputs(5, 3).user)
    assert static.buffer["rows_seen"].item() == 3 and len(outputs["pad"]) == 10
