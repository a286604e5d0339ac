"""Graphs as bytes: what is loaded is what was captured, bit for bit, and nothing that was changed is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished
from torch import Tensor

from lockstep import ops
from lockstep.config import GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Captured, Inputs, Runtime, capture, digest, dump, verify
from lockstep.graph.ir.captured import is_backward, module_of
from lockstep.graph.store import artifact, framed_file
from lockstep.graph.store.artifact import Unstorable, dumps, loads
from lockstep.graph.store.framed_file import Damaged, unpack
from lockstep.trainer import Trainer, pack


def captured_of(runtime: Runtime) -> dict[str, Captured]:
    """One graph of each function."""
    return {f.name: g.captured for f in runtime.programs for g in f.graphs.values()}


@pytest.fixture
def made(decoder, rollout, runtime_of) -> Callable[..., Runtime]:
    """A runtime whose programs are a trainer's and a generator's, launched."""

    def make(dtype: torch.dtype, **options: Any) -> Runtime:
        runtime, model = runtime_of(**options), decoder(dtype)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=True, runtime=runtime)
        (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
        trainer.forward_backward(batch)
        trainer.check(batch)
        trainer.optim_step(1e-3)
        engine = Engine(SharedWeights(model), GeneratorConfig(), 1024, runtime=runtime)
        engine.warm_up(3, 64, rollout(model, 0)[0].sampling)
        return runtime

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_graph_is_the_captured_one(made, dtype: torch.dtype) -> None:
    runtime = made(dtype, recorded=True)
    for function in runtime.programs:
        for bound in function.graphs.values():
            fresh, loaded = bound.captured, loads(dumps(bound.captured))
            assert dumps(loaded) == dumps(fresh) and digest(loaded) == digest(fresh) and dump(loaded) == dump(fresh)
            fields = ("name", "inputs", "outputs", "statics", "writes", "recorded", "split_at", "sizes", "log")
            assert [getattr(loaded, f) for f in fields] == [getattr(fresh, f) for f in fields]
            tags = [[(module_of(n), is_backward(n)) for n in c.graph.nodes] for c in (fresh, verify(loaded))]
            assert tags[0] == tags[1] and list(loaded.statics) == list(fresh.statics)
            with torch.inference_mode(False), torch.no_grad():
                results = [_results(c, bound._arguments) for c in (fresh, loaded)]
            assert all(map(torch.equal, *results))


def _results(captured: Captured, arguments: list[Tensor]) -> list[Tensor]:
    """What a graph returns and what it leaves in copies of its inputs, as words."""
    torch.manual_seed(0)
    inputs = [a.clone() for a in arguments]
    found = [*captured.module.forward(*inputs), *inputs]
    return [t.contiguous().view(-1).view(torch.uint8) for t in found]


def body(t: Inputs) -> dict[str, Tensor]:
    x = t.user["x"]
    rows = x.new_zeros(2 * x.shape[0] + 1, 4, dtype=torch.float32)
    if x.shape[0] > 3:
        rows = rows.clamp(max=float("inf"))
    return {"y": ops.linear(x, t.param["w"]), "rows": rows.narrow(0, 0, x.shape[0])}


@pytest.fixture
def small() -> Captured:
    inputs = Inputs({"w": torch.ones(4, 4)}, user={"x": torch.ones(5, 4)})
    return capture("f", body, inputs, dynamic={"x": ("T", None)})


def test_sizes_numbers_and_what_a_trace_assumed_are_kept(small: Captured) -> None:
    loaded = loads(dumps(small))
    assert loaded.sizes.broken_conditions({"T": 5}) == [] and loaded.sizes == small.sizes
    (broken,) = loaded.sizes.broken_conditions({"T": 3})
    assert broken.startswith("T > 3 (") and "test_artifact.py" in broken
    y, rows = loaded.module.forward(torch.eye(4), torch.ones(9, 4))
    assert y.shape == rows.shape == (9, 4)
    assert b'{"float": "inf"}' in dumps(small)


def test_statics_of_every_kind_are_kept() -> None:
    kinds = {"on": True, "count": 1, "least": -0.0, "most": float("inf"), "none": None, "name": "x"}
    inputs = Inputs(user={"x": torch.ones(3)})
    made = capture("f", lambda t, **statics: {"y": t.user["x"].clamp(max=statics["most"])}, inputs, statics=kinds)
    assert repr(loads(dumps(made)).statics) == repr(kinds)


def test_loading_traces_nothing_and_needs_no_tracer(small: Captured, tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(dumps(small))
    program = (
        "import sys, torch, lockstep.ops\n"
        "from lockstep.graph.store.artifact import loads\n"
        f"graph = loads(open({str(tmp_path / 'graph')!r}, 'rb').read())\n"
        "print(len(graph.module.forward(torch.eye(4), torch.ones(9, 4))[0]))\n"
        "print([m for m in ('sympy', 'torch._dynamo', 'torch._inductor') if m in sys.modules])\n"
    )
    done = finished([sys.executable, "-c", program])
    assert done.stdout == "9\n[]\n", done.stderr


def test_damage_is_named_and_never_loaded(small: Captured) -> None:
    data = dumps(small)
    for wrong in (b"", b"garbage", data[:-1], data[: len(data) // 2], data + b" ", b"0" * 64 + data[64:]):
        with pytest.raises(Damaged, match="does not have the hash"):
            loads(wrong)
    for at in range(0, len(data), 97):
        with pytest.raises(Damaged):
            loads(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def _changed(data: bytes, old: bytes, new: bytes) -> bytes:
    """The container with other contents and a hash to match: what a fault in writing would leave."""
    graph = unpack(data)["graph"]
    assert old in graph
    return framed_file.pack({"graph": graph.replace(old, new, 1)})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"lockstep.linear.default", b"lockstep.absent.default", "AttributeError"),
        (b"aten.new_zeros.default", b"aten.new_empty.default", "not the one that was stored"),
        (b"aten.new_zeros.default", b"operator.system", "ValueError"),
        (b"aten.new_zeros.default", b"aten.new_zeros.overloads", "aten.new_zeros.overloads is no operator"),
        (b'["linear", ', b'["import os", ', "name 'import os'"),
        (b'"nodes"', b'"noodles"', "KeyError"),
    ],
)
def test_what_does_not_add_up_is_refused(small: Captured, old: bytes, new: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        loads(_changed(dumps(small), old, new))


def test_a_device_is_given_at_the_load(small: Captured) -> None:
    meta = loads(dumps(small), torch.device("meta"))
    assert {spec.device.type for spec in meta.inputs} == {"meta"} and "device='meta'" not in dump(small)
    y, _ = meta.module.forward(torch.empty(4, 4, device="meta"), torch.empty(9, 4, device="meta"))
    assert y.device.type == "meta" and loads(dumps(meta), torch.device("cpu")).inputs == small.inputs


def test_a_changed_graph_is_refused_on_another_device_too(small: Captured) -> None:
    changed = _changed(dumps(small), b"aten.new_zeros.default", b"aten.new_empty.default")
    with pytest.raises(Damaged, match="not the one that was stored"):
        loads(changed, torch.device("meta"))


def test_text_such_as_a_group_name_passes_through(small: Captured) -> None:
    node = next(n for n in small.graph.nodes if n.op == "output")
    with small.graph.inserting_before(node):
        small.graph.call_function(
            torch.ops._c10d_functional.all_gather_into_tensor.default, (node.args[0][0], 2, "@fsdp")
        )
    found = next(n for n in loads(dumps(small)).graph.nodes if "all_gather" in str(n.target))
    assert found.args[1:] == (2, "@fsdp")


class Doubled:
    """A region that stands for compiled code."""

    kind = __name__ = "doubled"

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def serialize(self) -> bytes:
        return bytes([self.factor])


def with_region(captured: Captured, region: object) -> Captured:
    graph = captured.graph
    (output,) = (n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        y = graph.call_function(region, (output.args[0][0],))
        y = graph.call_function(region, (y,))
    for n in (y, *y.all_input_nodes):
        n.meta["val"] = output.args[0][0].meta["val"]
    output.args = ([y, output.args[0][1]],)
    captured.module.recompile()
    return captured


def test_a_region_is_kept_beside_the_graph_once(small: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = with_region(small, Doubled(3))
    with pytest.raises(Unstorable, match=r"f\(\): node .*: call_function of .*Doubled object.* has no stored form"):
        dumps(captured)
    loaded_from: list[bytes] = []

    def deserialize(data: bytes) -> Doubled:
        loaded_from.append(data)
        return Doubled(data[0])

    monkeypatch.setattr(artifact, "_REGIONS", {})
    artifact.register_region("doubled", deserialize)
    loaded = loads(dumps(captured))
    assert loaded.module.forward(torch.eye(4), torch.ones(9, 4))[0].unique().tolist() == [9]
    assert loaded_from == [b"\x03"]
    monkeypatch.setattr(artifact, "_REGIONS", {})
    with pytest.raises(Damaged, match="region of kind 'doubled'"):
        loads(dumps_with(captured, deserialize))


def dumps_with(captured: Captured, deserialize: Callable[[bytes], Any]) -> bytes:
    artifact.register_region("doubled", deserialize)
    data = dumps(captured)
    artifact._REGIONS.clear()
    return data


def test_what_has_no_stored_form_is_named(small: Captured) -> None:
    node = next(n for n in small.graph.nodes if n.op == "call_function")
    node.kwargs = {"odd": 1j}
    with pytest.raises(Unstorable, match=rf"f\(\): node {node.name}: an argument is 1j, a complex"):
        dumps(replace(small))
