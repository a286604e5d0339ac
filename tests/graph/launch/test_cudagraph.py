"""Launching bound graphs, and what the fake recorder must catch as a GPU would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor

from lockstep.config import CompileConfig
from lockstep.graph import CudaRecorder, GraphError, GraphLauncher, Inputs, Runtime
from lockstep.types import coalesce_to


class Counter:
    """`total += x * factor`; returns `total * 2`."""

    def __init__(self, runtime: Runtime) -> None:
        self.total = torch.zeros(3)
        self.function = runtime.program("count", self.body, Inputs(buffer={"total": self.total}), {"buffer"})

    @staticmethod
    def body(t: Inputs, factor: int = 1) -> dict[str, Tensor]:
        t.buffer["total"].add_(t.user["x"] * factor)
        return {"double": t.buffer["total"] * 2, "positive": t.buffer["total"] > 0}

    def __call__(self, *values: float, **options) -> Tensor:
        return self.function({"x": torch.tensor(values, dtype=torch.float32)}, **options)["double"]


@pytest.fixture(params=[False, True], ids=["captured", "recorded"])
def recorded(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_every_launch_happens_once(runtime_of: Callable[..., Runtime], recorded: bool) -> None:
    runtime = runtime_of(recorded)
    counter = Counter(runtime)
    assert counter(1, 2, 3).tolist() == [2, 4, 6] and counter.total.tolist() == [1, 2, 3]
    assert counter(1, 1, 1).tolist() == [4, 6, 8]
    assert counter(1, 0, 0, times=3).tolist() == [10, 6, 8] and counter.total.tolist() == [5, 3, 4]
    assert counter(1, 1, 1, factor=2).tolist() == [14, 10, 12]
    assert (runtime.captures, runtime.launches["count"]) == (2, 6)
    assert runtime.replays["count"] == (4 if recorded else 0)  # the first launch of a graph records it


def test_captures_after_warm_up_are_counted(runtime_of: Callable[..., Runtime]) -> None:
    runtime = runtime_of()
    counter = Counter(runtime)
    counter(1, 2, 3)
    runtime.end_warm_up()
    counter(1, 2, 3)
    assert (runtime.captures, runtime.recompiles) == (1, 0)
    counter(1, 2, 3, factor=2)
    assert (runtime.captures, runtime.recompiles) == (2, 1)


def test_launches_of_graphs_that_are_closed_still_count(runtime_of: Callable[..., Runtime]) -> None:
    runtime = runtime_of(recorded=True)
    first, second = Counter(runtime), Counter(runtime)
    for counter in (first, first, second):
        counter(1, 2, 3, times=3)
    first.function.drop()
    second.function.close()
    second(1, 2, 3)
    assert (runtime.launches["count"], runtime.replays["count"]) == (10, 7)
    runtime.close()
    assert runtime.metrics() == {"recompiles": 0, "graph_replays": 7, "graph_replays/count": 7}


def bound(runtime: Runtime) -> tuple[GraphLauncher, Counter]:
    counter = Counter(runtime)
    counter(0, 0, 0)
    (graph,) = counter.function.graphs.values()
    return graph, counter


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"x": torch.ones(4)}, r"user 'x' has shape \(4,\), the graph was captured for \(3,\)"),
        ({"x": torch.ones(3, dtype=torch.int64)}, "user 'x' has dtype torch.int64"),
        ({"x": torch.ones(6)[::2]}, r"user 'x' has stride \(2,\)"),
        ({}, "missing or unknown: x"),
        ({"x": torch.ones(3), "y": torch.ones(3)}, "missing or unknown: y"),
    ],
)
def test_what_a_graph_was_not_made_for_is_refused(runtime_of, recorded: bool, user: dict, message: str) -> None:
    graph, counter = bound(runtime_of(recorded))
    with pytest.raises(GraphError, match=message):
        graph(user)
    assert not counter.total.any() and graph.launches == 1


def test_a_moved_static_input_is_named(runtime_of, recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, counter = bound(runtime_of(recorded))
    before = counter.total.detach()
    counter.total.data = torch.zeros(3)
    with pytest.raises(GraphError, match="static input buffer 'total' has moved in memory"):
        graph({"x": torch.ones(3)})
    assert not before.any()
    if recorded:  # as on a GPU, a replay that is not stopped works on the memory of old
        monkeypatch.setattr(GraphLauncher, "_check_addresses", lambda self: None)
        graph({"x": torch.ones(3)})
        assert before.tolist() == [1, 1, 1] and not counter.total.any()


def test_a_launch_after_close_is_refused(runtime_of, recorded: bool) -> None:
    runtime = runtime_of(recorded)
    graph, counter = bound(runtime)
    runtime.close()
    with pytest.raises(GraphError, match=r"count\(\): launched after close\(\)"):
        graph({"x": torch.ones(3)})
    assert not counter.function.graphs


def test_outputs_do_not_outlive_the_next_replay_of_any_graph(runtime_of: Callable[..., Runtime]) -> None:
    runtime = runtime_of(recorded=True)
    first, second = Counter(runtime), Counter(runtime)
    kept = first(1, 2, 3)
    copied = kept.clone()
    second(1, 1, 1)
    assert kept.isnan().all()  # poisoned by recording another
    again = first(1, 2, 3)
    assert again is kept and again.tolist() == [4, 8, 12]
    second(1, 1, 1)
    assert again.isnan().all() and copied.tolist() == [2, 4, 6]


def test_user_inputs_are_copied_not_referred_to(runtime_of: Callable[..., Runtime]) -> None:
    graph, counter = bound(runtime_of(recorded=True))
    x = torch.ones(3)
    graph({"x": x})
    x.fill_(100)
    graph({"x": torch.full((3,), 2.0)})
    assert counter.total.tolist() == [3, 3, 3]


@pytest.mark.parametrize("turned", [True, False])
def test_a_user_input_keeps_the_strides_that_the_graph_was_traced_for(runtime_of, recorded: bool, turned: bool) -> None:
    def body(t: Inputs, turned: bool) -> dict[str, Tensor]:
        x = t.user["x"]
        return {"in_memory": torch.as_strided(x, (4,), (6,)) + 1, "flat": (x.t().view(-1) if turned else x) + 1}

    function = runtime_of(recorded).program("f", body, Inputs())
    for start in (0.0, 10.0):
        whole = torch.arange(start, start + 24).view(4, 6)
        x = whole.t() if turned else whole[:, :3]
        found, expected = function({"x": x}, turned=turned), body(Inputs(user={"x": x}), turned)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_statics_that_are_equal_and_of_other_types_have_graphs_of_their_own(runtime_of, recorded: bool) -> None:
    def body(t: Inputs, k: int | float) -> dict[str, Tensor]:
        return {"y": t.user["x"] * 7 if k is True else t.user["x"] * k}

    function, x = runtime_of(recorded).program("f", body, Inputs()), torch.arange(3)
    for user in ({"x": x}, coalesce_to({"x": x}, torch.device("cpu"))):
        found = [function(user, k=k)["y"].clone() for k in (1, 1.0, True, 0.0, -0.0)]
        assert [y.dtype for y in found] == [torch.int64, torch.float32, torch.int64, torch.float32, torch.float32]
        assert found[2].tolist() == [0, 7, 14] and [y.signbit().any() for y in found[3:]] == [False, True]
    assert len(function.graphs) == 5


def test_inference_mode_around_a_launch_changes_nothing(runtime_of, recorded: bool) -> None:
    counter = Counter(runtime_of(recorded))
    for expected in ([2, 2, 2], [4, 4, 4]):
        with torch.inference_mode():
            assert counter(1, 1, 1).tolist() == expected
    assert counter(1, 1, 1).tolist() == [6, 6, 6]


def test_cuda_graphs_need_a_gpu() -> None:
    with pytest.raises(GraphError, match="CUDA graphs need a GPU; the tensors are on cpu"):
        Runtime(CompileConfig("step", "full"), torch.device("cpu"))
    with pytest.raises(GraphError, match="need a GPU"):
        CudaRecorder(torch.device("cpu"))


def test_a_graph_that_is_to_be_recorded_needs_a_recorder(runtime_of: Callable[..., Runtime]) -> None:
    graph, counter = bound(runtime_of(recorded=True))
    with pytest.raises(GraphError, match="a CUDA graph needs a recorder"):
        GraphLauncher(graph.captured, Inputs(buffer={"total": counter.total}, user={"x": torch.ones(3)}))


def test_garbage_has_every_kind_of_value() -> None:
    outputs = [torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.bool)]
    recorder = FakeRecorder()
    recording = recorder.record(lambda arguments: outputs, [])
    recorder.poison()
    floats, integers, flags = recording.outputs
    assert floats.isnan().all() and (integers == torch.iinfo(torch.int32).min).all() and flags.all()


def test_what_lies_in_the_pool_is_counted_kept_and_overwritten() -> None:
    recorder = FakeRecorder()
    (loose,) = recorder.run(lambda tensors: [tensors[0] + 1], [torch.zeros(4)])
    assert loose.tolist() == [1] * 4 and recorder.reserved_bytes() == 16
    recording = recorder.record(lambda tensors: [tensors[0] * 2], [loose], keep=[loose])
    assert recording.outputs[0].tolist() == [2] * 4 and recorder.reserved_bytes() == 32
    loose.fill_(3)
    recording.replay()
    assert loose.tolist() == [3] * 4 and recording.outputs[0].tolist() == [6] * 4
    assert recorder.weak_ref_tensor(loose).data_ptr() == loose.data_ptr()
    recorder.record(lambda tensors: [], [])
    assert loose.isnan().all() and recording.outputs[0].isnan().all()
    del loose
    recording.close()
    assert recorder.reserved_bytes() == 0
