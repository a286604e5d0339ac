"""Graphs recorded in pieces around attention: how they are split, and that replays compute what the whole does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor
from torch._library.custom_ops import OPDEFS

from lockstep import ops
from lockstep.config import CompileConfig
from lockstep.graph import GraphError, Inputs, capture, pipeline, run_passes, verify
from lockstep.graph.ir.captured import Captured, can_record_without_launch, op_name
from lockstep.graph.launch.piecewise import ATTENTION, Piecewise, split
from lockstep.graph.passes import cudagraph_pass
from lockstep.graph.torch_private import trace as torch_trace

BETWEEN = frozenset({"lockstep.rms_norm"})  # stands for attention where a model would be in the way


class Toy:
    """Crossing values of every kind around two calls: views, an in-place write, several results, a size, a cache."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inputs = Inputs(
            param={"w": torch.randn(6)}, kv={"cache": torch.zeros(2, 4, 6)}, user={"x": torch.randn(4, 6)}
        )

    @staticmethod
    def body(t: Inputs) -> dict[str, Tensor]:
        x, layer = t.user["x"], t.kv["cache"][1]
        kept = x * 2
        head, tail = torch.split(x + 1, 2)
        layer.copy_(kept)
        first = ops.rms_norm(kept.view(-1, 6), t.param["w"], 1e-6)
        kept.add_(first)  # written here, read by the last piece through a view that the first piece made
        layer.mul_(2)
        second = ops.rms_norm(first.t().contiguous().t() + layer, t.param["w"], 1e-6)
        sums = second.sum(0) + torch.cat((head, tail)).sum(0) + kept.view(-1, 6).sum(0)
        return {"sums": sums, "view": second[1:], "kept": kept}

    def captured(self) -> Captured:
        captured = capture("toy", self.body, self.inputs, writes={"kv"})
        return run_passes(captured, [*pipeline(CompileConfig()), cudagraph_pass(BETWEEN)])

    def arguments(self) -> list[Tensor]:
        return [tensor for _, _, tensor in self.inputs.flat()]

    def eager(self, x: Tensor) -> list[Tensor]:
        cache = torch.zeros(2, 4, 6)
        outputs = self.body(replace(self.inputs, kv={"cache": cache}, user={"x": x}))
        return [*(t.clone() for t in outputs.values()), cache]


def test_a_graph_is_split_at_the_calls_and_only_tensors_cross() -> None:
    captured = Toy().captured()
    parts = split(captured)
    assert [part.recorded for part in parts] == [True, False, True, False, True, False]
    names = [[op_name(n) for n in part.module.graph.nodes if n.op == "call_function"] for part in parts]
    assert [sum(name in BETWEEN for name in part) for part in names] == [0, 1, 0, 1, 0, 0]
    assert [sum("copy_" in name or "add_" in name or "mul_" in name for name in part) for part in names[::2]] == [
        1,
        2,
        0,
    ]
    assert names[-1] == ["aten.slice"]  # only gathers outputs
    assert all(op_name(node) not in ("aten.view", "aten.select") for part in parts for node in part.results)
    whole = replace(captured, split_at=frozenset())
    assert can_record_without_launch(whole) and not can_record_without_launch(
        captured
    )  # the calls between pieces run when these are recorded


def test_replays_see_each_others_values_and_new_inputs() -> None:
    toy, recorder = Toy(), FakeRecorder()
    captured, x, cache = toy.captured(), toy.inputs.user["x"], toy.inputs.kv["cache"]
    with torch.no_grad():
        pieces = Piecewise(captured, recorder, toy.arguments())
        assert all(map(torch.equal, [*pieces.outputs, cache], toy.eager(x))) and len(pieces._recordings) == 3
        other = recorder.record(lambda tensors: [tensors[0] + 1], [torch.zeros(3)])
        for _ in range(3):
            x.copy_(torch.randn(4, 6))
            cache.zero_()
            other.replay()
            assert pieces.outputs[0].isnan().all()
            pieces.replay()
            assert all(map(torch.equal, [*pieces.outputs, cache], toy.eager(x)))
        pieces.replay()
        other.replay()
        assert other.outputs[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("forgotten", range(3))
def test_a_value_that_was_not_kept_would_be_noticed(monkeypatch: pytest.MonkeyPatch, forgotten: int) -> None:
    """The mutant: pieces that do not say what later ones read."""
    toy, recorder = Toy(), FakeRecorder()
    record = recorder.record
    calls = iter(range(3))

    def careless(run, arguments, keep=()):
        return record(run, arguments, () if next(calls) == forgotten else keep)

    monkeypatch.setattr(recorder, "record", careless)
    with torch.no_grad():
        pieces = Piecewise(toy.captured(), recorder, toy.arguments())
        toy.inputs.kv["cache"].zero_()
        pieces.replay()
    equal = all(map(torch.equal, pieces.outputs, toy.eager(toy.inputs.user["x"])))
    assert equal == (forgotten == 0)  # nothing crosses into the first


def test_what_is_dead_may_be_overwritten_within_a_launch() -> None:
    toy, recorder = Toy(), FakeRecorder()
    with torch.no_grad():
        pieces = Piecewise(toy.captured(), recorder, toy.arguments())
        pieces.replay()
    first, second, _ = pieces._recordings  # what the second computes is read by the call after it alone
    assert not any(tensor.isnan().any() for tensor in first.outputs)
    assert len(second.outputs) == 1 and second.outputs[0].isnan().all()


def test_without_the_operators_a_graph_is_recorded_whole() -> None:
    captured = capture("f", lambda t: {"y": t.user["x"] * 2}, Inputs(user={"x": torch.ones(2)}))
    result = run_passes(captured, [*pipeline(CompileConfig()), cudagraph_pass(ATTENTION)])
    assert result.recorded and not result.split_at
    assert result.log[-1] == "cudagraph: 3 -> 3 nodes; whole; 0 static inputs, 1 copied in"
    assert (
        Toy().captured().log[-1].endswith("in pieces around 2 calls of lockstep.rms_norm; 2 static inputs, 1 copied in")
    )


def test_calls_between_pieces_may_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = {"lockstep.rms_norm": "it reads lengths on the host"}
    monkeypatch.setattr("lockstep.graph.ir.verify._why_not_recordable", lambda _, node: unsafe.get(op_name(node)))
    captured = Toy().captured()
    assert verify(captured) is captured
    with pytest.raises(GraphError, match="it reads lengths on the host"):
        verify(replace(captured, split_at=frozenset()))


def test_close_lets_go_of_everything() -> None:
    toy, recorder = Toy(), FakeRecorder()
    with torch.no_grad():
        pieces = Piecewise(toy.captured(), recorder, toy.arguments())
    assert recorder.reserved_bytes() > 0
    pieces.close()
    assert recorder.reserved_bytes() == 0 and not pieces.outputs


def test_attention_is_every_operator_that_reads_keys() -> None:
    """One that were left out would be recorded with the pieces around it."""
    for name in ATTENTION:
        assert torch_trace.operator_named(f"{name}.default")
    ours = {name.replace("::", ".") for name in OPDEFS if name.startswith("lockstep::")}
    prepares = {"lockstep.flex_tiles_packed", "lockstep.flex_tiles_paged", "lockstep.mla_write"}
    assert {name for name in ours if re.search("attention|flex|mla", name)} - prepares == ATTENTION
