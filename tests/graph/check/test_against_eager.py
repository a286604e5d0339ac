"""Replay that can be trusted: equal ways pass and leave no trace, and a planted fault is found and named."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from torch import Tensor, nn

from lockstep import ops
from lockstep.config import CompileConfig
from lockstep.graph import (
    Case,
    GraphError,
    Inputs,
    Pass,
    PassedChecks,
    Program,
    Runtime,
    backward,
    check_against_eager,
    module_inputs,
    substitute_inputs,
)
from lockstep.graph.check import fingerprints as check_fingerprints
from lockstep.graph.check import snapshot
from lockstep.graph.check.fingerprints import fingerprint, fingerprints, first_difference
from lockstep.graph.check.snapshot import Snapshot
from lockstep.graph.ir.captured import op_name
from lockstep.graph.passes.rewrite import rewritten
from lockstep.graph.torch_private import trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.weight = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x + ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.weight)


class Step:
    """Two blocks forward and backward, gradients that add up, one row of a large table, a counter."""

    def __init__(self, runtime: Runtime) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(Block(), Block())
        self.factor = 2.0
        own = module_inputs(self.module)
        self.grad = {name: torch.randn_like(p) for name, p in own.param.items()}
        self.table, self.row = torch.randn(9, 6), torch.zeros(1, dtype=torch.int64)
        buffers = {**own.buffer, "row": self.row}
        inputs = Inputs(own.param, self.grad, buffers, kv={"table": self.table})
        self.function = runtime.program("step", self.body, inputs, {"grad", "kv", "buffer"})

    def body(self, t: Inputs) -> dict[str, Tensor]:
        with substitute_inputs(self.module, t), torch.enable_grad():
            hidden = self.module(t.user["x"] * self.factor)
            with backward():
                grads = torch.autograd.grad(hidden.square().sum(), list(t.param.values()))
        for total, grad in zip(t.grad.values(), grads, strict=True):
            total.add_(grad)
        t.kv["table"].index_copy_(0, t.buffer["row"], hidden.detach().sum(0, keepdim=True))
        t.buffer["row"].add_(1)
        return {"hidden": hidden.detach() * 1}

    def case(self, name: str, rows: int = 3, row: int = 4) -> Case:
        generator = torch.Generator().manual_seed(row)
        x = torch.randn(rows, 6, generator=generator)
        return Case(name, {"x": x}, load=lambda: self.row.fill_(row), touches={"kv table": [self.table[row : row + 1]]})

    def cases(self) -> list[Case]:
        return [self.case("one"), self.case("other", row=7), self.case("short", rows=1)]

    def state(self) -> list[Tensor]:
        return [t.clone() for t in (*self.module.parameters(), *self.grad.values(), self.table, self.row)]


def runtime_at(mode: str, recorder: FakeRecorder | None = None, *passes: Pass) -> Runtime:
    runtime = Runtime(CompileConfig("step", mode), torch.device("cpu"), recorder=recorder or FakeRecorder())
    runtime.builder.passes += passes
    return runtime


@pytest.mark.parametrize("mode", ["none", "full", "piecewise", "full_and_piecewise"])
def test_equal_ways_pass_and_leave_every_bit_as_it_was(mode: str) -> None:
    runtime = runtime_at(mode)
    step = Step(runtime)
    before = step.state()
    (verdict,) = check_against_eager(runtime, [(step.function, step.cases())], "strict")
    assert all(map(torch.equal, step.state(), before))
    assert (verdict.function, verdict.cases, verdict.known, verdict.faults) == ("step", 3, 0, ())
    assert verdict.level == {"none": "captured", "full_and_piecewise": "full"}.get(mode, mode)
    assert runtime.timings.seconds["verify"] > 0 and verdict.seconds > 0
    step.function(step.case("one").user)
    assert not torch.equal(step.state()[-2], before[-2])  # and still computes


def swaps_an_operator(captured):
    """A pass with a fault: the second block's norm reads the first one's."""
    result = rewritten(captured)
    first, second = [n for n in result.graph.nodes if op_name(n) == "lockstep.rms_norm"][:2]
    second.update_arg(1, first.args[1])
    result.module.recompile()
    return result, "fewer weights"


def loses_a_write(captured):
    result = rewritten(captured)
    write = next(n for n in result.graph.nodes if op_name(n) == "aten.index_copy_")
    result.graph.erase_node(write)
    result.module.recompile()
    return result, "less memory traffic"


@pytest.mark.parametrize(
    ("apply", "message"),
    [
        (swaps_an_operator, r"first at node rms_norm_1 \(lockstep.rms_norm\) of 1"),
        (loses_a_write, r"in kv table, first at node index_copy_ \(aten.index_copy_\)"),
    ],
)
def test_a_pass_with_a_fault_is_named_with_its_node(apply: Callable, message: str) -> None:
    runtime = runtime_at("full", None, Pass("shrink", True, apply), Pass("idle", True, lambda c: (rewritten(c), "")))
    step = Step(runtime)
    before = step.state()
    with pytest.raises(GraphError, match=rf"step\(\), case 'one': shrink differs from the step before .*{message}"):
        check_against_eager(runtime, [(step.function, step.cases())], "strict")
    assert all(map(torch.equal, step.state(), before))


def test_a_number_that_became_a_constant_is_named() -> None:
    runtime = runtime_at("full")
    step = Step(runtime)
    step.function(step.case("warm-up").user)
    step.factor = 3.0
    with pytest.raises(
        GraphError, match=r"capture differs from eager in output hidden, first at node mul \(aten.mul\)"
    ):
        check_against_eager(runtime, [(step.function, step.cases())], "strict")


def test_an_operator_that_eager_would_not_call_is_named() -> None:
    class Branching(Step):
        def body(self, t: Inputs) -> dict[str, Tensor]:
            x = t.user["x"]
            return {"y": x.relu() if self.factor > 2 else x.exp()}

    runtime = runtime_at("none")
    step = Branching(runtime)
    step.function(step.case("warm-up").user)
    step.factor = 3.0
    with pytest.raises(GraphError, match=r"first at node exp \(aten.exp\), where eager calls aten.relu"):
        check_against_eager(runtime, [(step.function, step.cases())], "strict")


class Region:
    """A call that may have bits of its own, of what `Step` returns; each is further from its operators by `drift`."""

    exact = False
    __name__ = __qualname__ = "region"
    __module__ = __name__

    def __init__(self, drift: float) -> None:
        self.module, self._drift, self._calls = self, drift, 0

    def forward(self, x: Tensor) -> Tensor:
        return x * 1

    def __call__(self, x: Tensor) -> Tensor:
        self._calls += 1
        return x * (1 + self._drift * self._calls)

    def put_in(self, captured):
        result = rewritten(captured)
        (returned,) = result.graph.output_node().args[0]
        returned.target, returned.args = self, returned.args[:1]
        result.module.recompile()
        return result, "one region"


def nudges_a_bit(captured):
    """A pass with a fault so small that a region may have it."""
    result = rewritten(captured)
    returned = result.graph.output_node().args[0][0]
    returned.update_arg(1, 1 + 2**-20)
    result.module.recompile()
    return result, "the same, nearly"


class OwnCall(Region):
    """A function of one's own, which may compile itself when it is first called."""

    exact = True


@pytest.mark.parametrize(
    ("mode", "call", "launches"),
    [("full", None, 0), ("full", Region(0.0), 1), ("full", OwnCall(0.0), 1), ("piecewise", None, 0)],
)
def test_without_a_run_only_whole_graphs_of_known_operators_are_recorded(
    mode: str, call: Region | None, launches: int
) -> None:
    runtime = runtime_at(mode, None, *([] if call is None else [Pass("call", False, call.put_in)]))
    runtime.warm_up.kernels_loaded = True
    step = Step(runtime)
    with runtime.warm_up.make_graphs():
        step.function(step.case("one").user)
    assert runtime.launches["step"] == step.row.item() == launches


@pytest.mark.parametrize(("mode", "ahead", "launches"), [("none", False, 3), ("full", True, 3), ("full", False, 5)])
def test_each_case_is_launched_once_and_once_more_where_that_records(mode: str, ahead: bool, launches: int) -> None:
    runtime = runtime_at(mode)
    runtime.warm_up.kernels_loaded = True
    step = Step(runtime)
    if ahead:
        with runtime.warm_up.make_graphs():
            for rows in (3, 1):
                step.function(step.case("one", rows).user)
    check_against_eager(runtime, [(step.function, step.cases())], "strict")  # of two numbers of rows
    assert runtime.launches["step"] == launches
    assert runtime.replays["step"] == (3 if mode == "full" else 0)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_is_before_a_region_has_eagers_bits_all_the_same(mode: str) -> None:
    region = Pass("region", False, Region(1e-6).put_in)
    runtime = runtime_at(mode, None, region)
    with pytest.raises(GraphError, match=r"case 'one': two runs of the graph differ in output hidden"):
        check_against_eager(runtime, [((step := Step(runtime)).function, step.cases())], "strict")
    steady = Pass("region", False, Region(0.0).put_in)
    runtime = runtime_at(mode, None, steady)
    step = Step(runtime)
    check_against_eager(runtime, [(step.function, step.cases())], "strict")
    runtime = runtime_at(mode, None, Pass("nudge", True, nudges_a_bit), steady)
    with pytest.raises(GraphError, match=r"case 'one': nudge differs from the step before in output hidden"):
        check_against_eager(runtime, [((step := Step(runtime)).function, step.cases())], "strict")


class Stale(FakeRecorder):
    """Replays read a copy of one argument: the fault of a recorder that lets an input move."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = shape

    def record(self, run, arguments, keep=(), lasting=()):
        recording = super().record(run, arguments, keep, lasting)
        recording._memory = [m.clone() if m.shape == self._shape else m for m in recording._memory]
        return recording


def test_a_replay_that_reads_a_stale_buffer_is_named() -> None:
    runtime = runtime_at("full", Stale((3, 6)))
    step = Step(runtime)
    before = step.state()
    message = r"case 'other': replay differs from the step before in output hidden, first at node mul \(aten.mul\)"
    with pytest.raises(GraphError, match=message):
        check_against_eager(runtime, [(step.function, [step.case("one"), step.case("other", row=7)])], "strict")
    assert all(map(torch.equal, step.state(), before))


@pytest.mark.parametrize(
    ("recorder", "factor", "levels"),
    [
        (FakeRecorder(), 2.0, ["full"]),
        (Stale((3, 6)), 2.0, ["full", "piecewise", "captured"]),
        (FakeRecorder(), 3.0, ["full", "piecewise", "captured", "eager"]),
    ],
    ids=["sound", "stale replay", "constant"],
)
def test_warn_goes_down_as_far_as_it_must(recorder, factor: float, levels: list[str], caplog) -> None:
    runtime = runtime_at("full", recorder)
    step = Step(runtime)
    step.function(step.case("warm-up").user)
    step.factor = factor  # the graphs hold 2
    (verdict,) = check_against_eager(runtime, [(step.function, [step.case("one"), step.case("other", row=7)])], "warn")
    assert (verdict.level, len(verdict.faults)) == (levels[-1], len(levels) - 1)
    assert [record.message.rpartition(" ")[2] for record in caplog.records] == levels[1:]
    user = step.case("again", row=2).user
    for _ in range(2):
        assert torch.equal(step.function(user)["hidden"], step.module(user["x"] * factor))


def test_a_case_that_hides_what_it_writes_is_an_error_each_time(tmp_path: Path) -> None:
    for _ in range(2):
        runtime = runtime_at("none")
        step = Step(runtime)
        case = step.case("hidden", row=4)
        wrong = Case("hidden", case.user, load=case.load, touches={"kv table": [step.table[5:6]]})
        with pytest.raises(GraphError, match=r"left kv 'table' of step \(0\) changed: a case must declare"):
            check_against_eager(runtime, [(step.function, [wrong])], "warn", PassedChecks(tmp_path))
        assert not list(tmp_path.iterdir())


def test_scratch_is_put_back_and_not_compared() -> None:
    runtime = runtime_at("none")
    step = Step(runtime)
    body, rows = step.function.body, iter(torch.arange(9.0))

    def untidy(t: Inputs) -> dict[str, Tensor]:
        result = body(t)
        if type(t.kv["table"]) is Tensor:  # not in the trace
            t.kv["table"][8] = next(rows)  # another value in every eager run
        return result

    step.function.body = untidy
    before = step.state()
    case = step.case("row", row=4)
    with pytest.raises(GraphError, match="left kv 'table'"):
        check_against_eager(runtime, [(step.function, [case])], "strict")
    step.table[8] = before[-2][8]
    scratch = Case("row", case.user, {}, case.load, case.touches, scratch=[step.table[8:]])
    check_against_eager(runtime, [(step.function, [scratch])], "strict")
    assert all(map(torch.equal, step.state(), before))


def test_what_passed_is_not_run_again_until_something_changes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)  # of what is replaced below

    def check(factor: float = 2.0, mode: str = "full", **case) -> int:
        runtime = runtime_at(mode)
        step = Step(runtime)
        step.factor = factor
        (verdict,) = check_against_eager(
            runtime, [(step.function, [step.case("one", **case)])], "strict", PassedChecks(tmp_path)
        )
        return verdict.known

    folder = tmp_path / "verdicts"
    assert [check(), check()] == [0, 1]
    assert folder.stat().st_mode & 0o777 == 0o700
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["case"] == "one" and file.stat().st_mode & 0o777 == 0o600
    assert [check(factor=2.5), check(mode="piecewise"), check(rows=5)] == [0, 0, 0] and len(list(folder.iterdir())) == 4
    file.write_text("{broken")
    assert [check(), check()] == [0, 1]
    folder.chmod(0o770)  # someone else could write there
    assert check() == 0
    folder.chmod(0o700)
    monkeypatch.setattr("lockstep.graph.check.against_eager.cpu_build", lambda: "another compiler's")
    assert [check(), check()] == [0, 1]
    monkeypatch.setattr("lockstep.graph.passes.backend.Backend.settings", lambda _: {"threads": 3})
    assert [check(), check()] == [0, 1]
    monkeypatch.setattr("lockstep.cache.fingerprint.origin", lambda _: {"sources": "edited"})
    assert check() == 0


def test_what_passed_with_an_operator_from_outside_is_run_again(tmp_path: Path) -> None:
    """Its code is in no key."""
    with torch.library._scoped_library("outside", "DEF") as library:
        library.define("bonus(Tensor x) -> Tensor")
        library.impl("bonus", lambda x: 2 * x, "CPU")
        library.impl("bonus", torch.empty_like, "Meta")

        def check() -> int:
            runtime = runtime_at("none")
            program = runtime.program("bonus", lambda t: {"y": torch.ops.outside.bonus(t.user["x"])}, Inputs(), set())
            case = Case("one", {"x": torch.ones(3)})
            (verdict,) = check_against_eager(runtime, [(program, [case])], "strict", PassedChecks(tmp_path))
            return verdict.known

        assert [check(), check()] == [0, 0]
        library.impl("bonus", torch.rand_like, "CPU", allow_override=True)
        with pytest.raises(GraphError, match="differs from eager in output y"):
            check()


@dataclass
class Scaled:
    """One function of a number that a graph holds; two of them differ in it alone."""

    runtime: Runtime

    def __post_init__(self) -> None:
        self.function = self.runtime.program("scaled", self.body, Inputs(), set())

    @staticmethod
    def body(t: Inputs, factor: float) -> dict[str, Tensor]:
        return {"y": t.user["x"] * factor}

    def case(self, factor: float) -> Case:
        return Case("one", {"x": torch.ones(3)}, {"factor": factor})


def test_a_graph_that_passed_for_one_function_has_not_passed_for_another(tmp_path: Path) -> None:
    runtime, verdicts = runtime_at("none"), PassedChecks(tmp_path)
    asked = Scaled(runtime)
    check_against_eager(runtime, [(asked.function, [asked.case(2.0)])], "strict", verdicts)
    other = Scaled(runtime_at("none"))
    other.function.cache.ready = {  # as if a stored graph had been taken for another
        ((repr(("factor", 3.0)), *key[1:]), level): graph for (key, level), graph in asked.function.cache.ready.items()
    }
    with pytest.raises(GraphError, match="differs from eager in output y"):
        check_against_eager(other.runtime, [(other.function, [other.case(3.0)])], "strict", verdicts)


def test_a_failed_check_leaves_no_verdict(tmp_path: Path) -> None:
    runtime = runtime_at("full", None, Pass("shrink", True, swaps_an_operator))
    step = Step(runtime)
    with pytest.raises(GraphError, match="shrink"):
        check_against_eager(runtime, [(step.function, step.cases())], "strict", PassedChecks(tmp_path))
    assert not (tmp_path / "verdicts").exists()


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "own"))
    PassedChecks().add("k", {})
    assert (tmp_path / "own" / "verdicts" / "k.json").exists() and PassedChecks().passed("k")
    monkeypatch.delenv("LOCKSTEP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    PassedChecks().add("k", {})
    assert (tmp_path / "xdg" / "lockstep" / "verdicts" / "k.json").exists() and not PassedChecks().passed("other")
    monkeypatch.setenv("LOCKSTEP_CACHE", os.devnull)  # nothing can be written there
    PassedChecks().add("k", {})
    assert not PassedChecks().passed("k")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float64])
def test_a_hash_sees_one_bit_its_place_and_nothing_else(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (1, 7, 8, 33):
        x = torch.randn(size).mul(3).to(dtype)
        base = int(fingerprint(x))
        wide = torch.zeros(3, size + 3).to(dtype)
        wide[1, 3:] = x
        assert int(fingerprint(wide[1, 3:])) == int(fingerprint(wide.t()[3:, 1])) == base
        for i in range(size):
            y = x.clone()
            y.view(torch.uint8)[i * x.element_size()] ^= 1
            assert int(fingerprint(y)) != base
        assert size == 1 or x[0] == x[-1] or int(fingerprint(x.flip(0))) != base
    assert int(fingerprint(torch.zeros(3))) != int(fingerprint(-torch.zeros(3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hash_sees_two_signs(dtype: torch.dtype) -> None:
    """A sign may be the highest bit of a word, which any factor leaves where it is."""
    torch.manual_seed(0)
    x = torch.randn(24).to(dtype)
    hashes = {int(fingerprint(x))}
    for i in range(24):
        for j in range(i):
            y = x.clone()
            y[[i, j]] *= -1
            hashes.add(int(fingerprint(y)))
    assert len(hashes) == 1 + 24 * 23 // 2


def test_hashes_go_on_over_chunks_and_tell_names_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(50, dtype=torch.float32)
    whole = int(fingerprint(x))
    monkeypatch.setattr("lockstep.graph.check.fingerprints.CHUNK", 7)
    assert int(fingerprint(x)) == whole
    a, b = fingerprints({"x": [x, x + 1], "y": [x]}), fingerprints({"x": [x + 1, x], "y": [x]})
    assert first_difference(a, b) == "x" and first_difference(a, {"y": b["y"]}) is None
    assert first_difference({}, a) is None


def test_pages_of_a_cache_are_hashed_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_fingerprints, "ROW", 64)
    cache, laid_out = torch.randn(3, 9, 4, 8).bfloat16(), list[int]()
    used = cache[:, 2:7]

    def seen(op: Any, _: Any, __: Any, result: Any) -> None:
        if op is torch.ops.aten.clone.default:
            laid_out.append(result.nbytes)

    found = trace.run_observed(lambda: fingerprint(used), seen)
    assert not laid_out and int(found) == int(fingerprint(used.clone(memory_format=torch.contiguous_format)))
    cache[1, 6, 3, 7] += 1
    assert int(fingerprint(used)) != int(found)


def test_a_snapshot_is_put_back() -> None:
    x = torch.arange(6.0).view(2, 3)
    kept = Snapshot([x[:, 1], x[1:]])
    x.zero_()
    kept.restore()
    assert x.tolist() == [[0, 1, 0], [3, 4, 5]]


def test_a_snapshot_keeps_nothing_of_what_is_zero() -> None:
    start = torch.tensor([1.5, -0.0, math.nan, 3e38])
    rounded = start.bfloat16().float()
    rounded[2:].view(torch.int32)[0] = 0x7FC10000  # a NaN of bits of its own
    tensors = [start.clone(), rounded, torch.zeros(4), -torch.zeros(4), torch.zeros(4, dtype=torch.float64), start > 2]
    before, kept = [x.clone() for x in tensors], Snapshot(tensors)
    assert kept.nbytes == 16 + 8 + 0 + 8 + 0 + 4
    for x in tensors:
        x.fill_(1)
    kept.restore()
    assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(tensors, before, strict=True))


def test_a_snapshot_lies_in_spare_memory_that_is_zero_again() -> None:
    odd, halves, more = torch.arange(3, dtype=torch.bfloat16), torch.tensor([1.5, -2.0]), torch.arange(5.0) + 0.1
    spare = [torch.zeros(2, 2), torch.zeros(16, dtype=torch.int16)]
    before, kept = [x.clone() for x in (odd, halves, more)], Snapshot([odd, halves, more], spare)
    assert spare[0].any() and spare[1].any() and kept.nbytes == 6 + 4 + 20
    for x in (odd, halves, more):
        x.fill_(7)
    kept.restore()
    assert all(torch.equal(x, y) for x, y in zip((odd, halves, more), before, strict=True))
    assert not any(memory.any() for memory in spare)


def test_what_goes_from_one_device_to_another_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies apart is laid out on its device for it, which may have no room for all."""
    monkeypatch.setattr(snapshot, "PART", 64)
    halves, moved = torch.arange(401, dtype=torch.int32).view(torch.int16).view(-1, 2)[:, 0], list[int]()

    def seen(op: Any, arguments: Sequence[Any], *_: Any) -> None:
        if op is torch.ops.aten.copy_.default:
            moved.append(arguments[1].nbytes)

    trace.run_observed(lambda: snapshot.copy_in_rows(torch.empty(401, dtype=torch.int16, device="meta"), halves), seen)
    assert sum(moved) == halves.nbytes and max(moved) <= 64
    pairs = [(torch.zeros_like(x), x) for x in (halves, torch.tensor(3), torch.rand(5, 3)[:, 1])]
    for target, source in pairs:
        snapshot.copy_in_rows(target, source)
    assert all(torch.equal(*pair) for pair in pairs)


def test_programs_of_one_runtime_are_checked_together() -> None:
    runtime = runtime_at("full")
    steps = [Step(runtime), Step(runtime)]
    work: list[tuple[Program, list[Case]]] = [(step.function, step.cases()) for step in steps]
    (verdict,) = check_against_eager(runtime, work, "strict")
    assert (verdict.level, verdict.cases) == ("full", 6)
    runtime.lower_level("step")
    assert not steps[0].function.graphs and check_against_eager(runtime, work, "strict")[0].level == "piecewise"
