"""Passes: what each changes, that no bit moves, and that a bad one is caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from lockstep import ops
from lockstep.config import PASSES, CompileConfig
from lockstep.distributed.collectives import all_gather_columns, local_columns
from lockstep.distributed.mesh import Axis, Mesh
from lockstep.graph import (
    GraphError,
    Inputs,
    Pass,
    backward,
    capture,
    diff,
    digest,
    dump,
    module_inputs,
    passes,
    run_passes,
    substitute_inputs,
)
from lockstep.graph.ir.captured import Captured, op_name
from lockstep.graph.ir.text import write_stages
from lockstep.graph.passes import saved_bytes
from lockstep.graph.passes.canonicalize import PLACE
from lockstep.graph.passes.rewrite import rewritten
from lockstep.models import Decoder
from lockstep.models.init import architecture


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.rand(8))
        self.up, self.down = nn.Parameter(torch.randn(32, 8)), nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + ops.linear(ops.silu_mul(ops.linear(ops.rms_norm(x, self.norm, 1e-6), self.up)), self.down)


class NormAfter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x + ops.linear(ops.silu_mul(ops.linear(x, self.up)), self.down), self.norm, 1e-6)


class Step:
    """Forward, backward and accumulation of three layers, with a statistic that is read and then overwritten."""

    def __init__(self, dtype: torch.dtype = torch.float32, layer: type[Layer] = Layer) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(layer(), layer(), layer()).to(dtype)
        own = module_inputs(self.module)
        grads = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in own.param.items()}
        self.inputs = Inputs(own.param, grads, {"scale": torch.ones(())}, user={"x": torch.randn(6, 8).to(dtype)})

    def body(self, t: Inputs, overwrite: bool) -> dict[str, Tensor]:
        with substitute_inputs(self.module, t), torch.enable_grad():
            scaled = t.user["x"] * t.buffer["scale"].to(t.user["x"].dtype)
            t.user["x"].cos()  # nobody's
            loss = (self.module(scaled) * scaled).sum()
            if overwrite:
                t.buffer["scale"].mul_(3)
            with backward():
                grads = torch.autograd.grad(loss, list(t.param.values()))
        for total, grad in zip(t.grad.values(), grads, strict=True):
            total.add_(grad)
        return {"loss": loss.detach()}

    def capture(self, overwrite: bool = True):
        statics = {"overwrite": overwrite}
        return capture("step", self.body, self.inputs, statics=statics, writes={"grad", "buffer"})

    def results(self, captured=None) -> list[Tensor]:
        """Loss, gradients and statistic of one run from the same start; eager without a capture."""
        for tensor in self.inputs.grad.values():
            tensor.zero_()
        self.inputs.buffer["scale"].fill_(1)
        with torch.no_grad():
            if captured is None:
                (loss,) = self.body(self.inputs, overwrite=True).values()
            else:
                (loss,) = captured.module.forward(*(t for _, _, t in self.inputs.flat()))
        return [loss.clone(), *(g.clone() for g in self.inputs.grad.values()), self.inputs.buffer["scale"].clone()]


def count(captured, name: str) -> int:
    return sum(op_name(n) == name for n in captured.graph.nodes)


def pipeline(
    canonical: bool = True, patterns: tuple[str, ...] = (), record: bool = False, saved_gib: float = 0.0
) -> list[Pass]:
    names = tuple(name for name in PASSES if name != "keep_logits")  # these steps have no head
    config = CompileConfig(canonicalize=canonical, recompute=patterns, activation_memory_gib=saved_gib, passes=names)
    return passes.pipeline(config) + [passes.cudagraph_pass()] * record


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


KIND = "elementwise", "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patterns", [(), ("full",), ("1",), ("silu_mul", "lockstep.rms*"), ("[02]", "aten.add"), KIND])
@pytest.mark.parametrize("canonical", [True, False])
def test_no_pass_changes_a_bit(dtype: torch.dtype, patterns: tuple[str, ...], canonical: bool) -> None:
    step = Step(dtype)
    before = step.capture()
    after = run_passes(before, pipeline(canonical, patterns))
    assert all(p.preserves_numerics for p in pipeline(canonical, patterns, record=True))
    assert same(step.results(), step.results(before)) and same(step.results(), step.results(after))
    assert (saved_bytes(after) < saved_bytes(before)) == bool(patterns)


def test_a_pass_that_uses_a_value_before_it_is_there_is_named() -> None:
    def misplace(captured: Captured) -> tuple[Captured, str]:
        result = rewritten(captured)
        first, *_, last = (node for node in result.graph.nodes if node.op == "call_function")
        last.append(first)
        return result, "one"

    with pytest.raises(GraphError, match=r"step\(.*\): misplace returned a graph that cannot run: .* before it"):
        run_passes(Step().capture(), [passes.Pass("misplace", True, misplace)])


def test_canonicalize_drops_the_dead_and_keeps_writes_and_order() -> None:
    before = Step().capture()
    once = run_passes(before, pipeline())
    assert (count(before, "aten.cos"), count(once, "aten.cos"), count(once, "aten.detach")) == (1, 0, 0)
    assert count(once, "aten.add_") == count(before, "aten.add_") and count(once, "aten.mul_") == 1
    names = [n.name for n in before.graph.nodes]
    kept = [n.name for n in once.graph.nodes]
    assert kept == [name for name in names if name in set(kept)]
    dead = len(names) - len(kept) - 1
    twice = run_passes(once, pipeline())
    assert digest(twice) == digest(once) != digest(before) and diff(once, twice) == ""
    assert "-cos: float32[6, 8] = aten.cos.default(arg" in diff(before, once)
    assert once.log == (f"canonicalize: {len(names)} -> {len(kept)} nodes; {dead} dead, 1 aliases removed",)


def drawn_and_asserted(t: Inputs) -> dict[str, Tensor]:
    torch._assert_async((t.user["x"] > 0).all(), "positive")
    torch._assert_async((t.user["x"] < 9).all())
    torch.rand(3)  # nobody's, but the next numbers follow from it
    late = torch.rand(3)
    (whole,) = all_gather_columns((torch.rand(4, 3),), Axis("tp", 2, 1, pushes=False))
    return {"y": t.user["x"] * torch.rand(3), "late": late, "whole": whole}


def test_what_nobody_reads_stays_in_its_place_where_it_asserts_or_draws_random_numbers() -> None:
    before = capture("f", drawn_and_asserted, Inputs(user={"x": torch.ones(3)}))
    after = run_passes(before, passes.pipeline(CompileConfig(), sharded=True))
    for graph in (before, after):
        assert count(graph, "aten._assert_async") == 2
    kept = [[n.name for n in c.graph.nodes if op_name(n) == "aten.rand"] for c in (before, after)]
    assert kept[0] == kept[1] and len(kept[0]) == 4


def own_after_push(t: Inputs, late: str = "") -> dict[str, Tensor]:
    """A layer's sum, pushed, of which the next layer takes this rank's columns again."""
    axis, place = Axis("tp", 2, 1, pushes=True), t.buffer["spread.index"]
    found = t.user["x"] * 2
    if late == "a view":
        found = found[:, :2]
    if late == "turned":
        found = (t.user["x"].t() * 2).t()
    (whole,) = all_gather_columns((t.user["x"] if late == "an input" else found,), axis)
    chosen = {"of a user": t.user["rows"], "of another": t.buffer["other.index"]}.get(late, place)
    own = local_columns(whole, chosen, axis)
    if late == "written":
        t.buffer["total"].copy_(found.mul_(3))
    return {"own": own + 1, "whole": whole * 3}


@pytest.mark.parametrize(
    ("late", "copied"),
    [("", 0), *((odd, 1) for odd in ("written", "a view", "turned", "an input", "of a user", "of another"))],
)
def test_own_columns_are_not_copied_out_of_what_was_pushed(late: str, copied: int) -> None:
    buffers = {"spread.index": torch.tensor([1]), "other.index": torch.tensor([1]), "total": torch.zeros(4, 3)}
    inputs = Inputs(user={"x": torch.randn(4, 3), "rows": torch.tensor([1])}, buffer=buffers)
    before = capture("f", own_after_push, inputs, statics={"late": late}, writes={"buffer"})
    after = run_passes(before, pipeline())
    assert (count(before, "aten.index_select"), count(after, "aten.index_select")) == (1, copied)
    assert ("1 own columns not copied" in after.log[-1]) == (not copied)
    if not copied:
        (add,) = (node for node in after.graph.nodes if op_name(node) == "aten.add")
        assert op_name(add.args[0]) == "aten.mul" and count(after, "lockstep.push_columns") == 1


def test_a_ranks_place_is_known_by_its_name_among_a_models_inputs() -> None:
    model = Decoder(architecture("tiny"), torch.float32, mesh=Mesh(tp=Axis("tp", 2, 1, pushes=True)))
    places = {name: tensor for name, tensor in module_inputs(model).buffer.items() if name.endswith(PLACE)}
    assert places and all(tensor is model.spread.index for tensor in places.values())


def test_recompute_keeps_what_leaves_a_layer_and_frees_what_does_not() -> None:
    captured = run_passes(Step().capture(), pipeline())
    layers = run_passes(captured, pipeline(False, ("full",)))
    assert count(layers, "lockstep.silu_mul") == 2 * count(captured, "lockstep.silu_mul") == 6
    rows, loss = 6 * 8 * 4, 4
    assert saved_bytes(layers) == 3 * rows + loss  # the input and two layers' outputs
    one = run_passes(captured, pipeline(False, ("1",)))
    assert count(one, "lockstep.silu_mul") == 4
    elementwise = run_passes(captured, pipeline(False, ("elementwise",)))
    assert count(elementwise, "lockstep.silu_mul") == count(elementwise, "lockstep.rms_norm") == 6
    assert count(elementwise, "lockstep.linear") == count(captured, "lockstep.linear")
    assert saved_bytes(captured) - saved_bytes(elementwise) == 3 * 6 * (8 + 16) * 4
    leaving = run_passes(Step(layer=NormAfter).capture(), pipeline(True, ("elementwise",)))
    assert (count(leaving, "lockstep.silu_mul"), count(leaving, "lockstep.rms_norm")) == (6, 3)


def test_a_memory_budget_computes_as_few_layers_again_as_fit() -> None:
    step = Step()
    captured = run_passes(step.capture(), pipeline())
    ways = (), ("elementwise",), ("elementwise", "0"), ("elementwise", "[01]"), ("full",)
    kept = [saved_bytes(run_passes(captured, pipeline(False, names))) for names in ways]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 5
    for way, size in enumerate(kept):
        for budget in {size, kept[way - 1] - 1 if way else 2 * size}:
            fitted = run_passes(captured, pipeline(False, saved_gib=budget / 2**30))
            assert saved_bytes(fitted) == size and same(step.results(fitted), step.results())
            again = f"what is elementwise and {way - 1} of 3 modules" if way else "nothing"
            assert f"; {again} computed again" in fitted.log[-1]
    with pytest.raises(GraphError, match=r"0\.000 GiB are kept for the backward pass .* are allowed: raise compile"):
        run_passes(captured, pipeline(False, saved_gib=(kept[-1] - 1) / 2**30))


def test_every_stage_is_kept_and_written(tmp_path: Path) -> None:
    captured = run_passes(Step().capture(), pipeline(True, ("1",), True))
    assert [name for name, _ in captured.stages()] == ["capture", "canonicalize", "recompute", "cudagraph"]
    assert captured.stages()[-1][1] is captured and captured.stages()[0][1].log == ()
    write_stages(captured, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"step-full-{digest(captured)}"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("0-capture.txt", "1-canonicalize.diff", "2-recompute.diff", "3-cudagraph.diff", "final.txt"),
    ]
    assert (folder / "final.txt").read_text() == dump(captured) + "\n"
    removed = (folder / "1-canonicalize.diff").read_text()
    assert "-cos: " in removed and not any(line.startswith("+silu_mul") for line in removed.splitlines())
    assert any(line.startswith("+silu_mul") for line in (folder / "2-recompute.diff").read_text().splitlines())
    (tmp_path / "taken").touch()
    with pytest.raises(GraphError, match=r"compile\.dump .*taken: cannot be written \(Not a directory\)"):
        write_stages(captured, tmp_path / "taken")


def test_a_pass_may_have_the_name_of_a_stage() -> None:
    captured = run_passes(Step().capture(), [Pass("capture", True, lambda c: (c, "")), *pipeline(True)])
    assert [name for name, _ in captured.stages()] == ["capture", "capture", "canonicalize"]


def test_what_is_overwritten_before_the_backward_pass_is_not_computed_again() -> None:
    step = Step()
    plain = run_passes(step.capture(overwrite=False), pipeline())
    assert count(run_passes(plain, pipeline(False, ("aten.mul",))), "aten.mul") == count(plain, "aten.mul") + 1
    with pytest.raises(GraphError, match="recompute pattern 'aten.mul' matches nothing"):
        run_passes(step.capture(overwrite=True), pipeline(True, ("aten.mul",)))


def test_a_pattern_that_matches_nothing_says_so() -> None:
    with pytest.raises(
        GraphError, match=r"'layers\.\*' matches nothing\. Modules: 0, 1, 2\. Operators: .*lockstep\.lin"
    ):
        run_passes(Step().capture(), pipeline(True, ("full", "layers.*")))


def test_without_a_backward_pass_there_is_nothing_to_compute_again() -> None:
    captured = capture("f", lambda t: {"y": t.user["x"] * 2}, Inputs(user={"x": torch.ones(2)}))
    result = run_passes(captured, pipeline(False, ("full",)))
    assert digest(result) == digest(captured) and "no backward pass" in result.log[0]


def test_passes_are_switched_one_by_one() -> None:
    def names(*options) -> list[str]:
        return [p.name for p in pipeline(*options)]

    assert [p.name for p in pipeline(saved_gib=1.0)] == ["canonicalize", "fit"]
    assert names() == ["canonicalize"] and names(False) == [] and names(False, (), True) == ["cudagraph"]
    assert names(True, ("full",), True) == ["canonicalize", "recompute", "cudagraph"]
    kept = [
        *((CompileConfig(), True), (CompileConfig(recompute=("silu_mul",)), True)),
        *((CompileConfig(recompute=again), False) for again in (("full",), ("logits",), ("layers.0", "logits"))),
        (CompileConfig(activation_memory_gib=1.0), False),
    ]
    for config, there in kept:
        found = {p.name: p.options for p in passes.pipeline(config)}
        assert ("keep_logits" in found) == there and "logits" not in found.get("recompute", {}).get("patterns", ())
    captured = Step().capture()
    assert run_passes(captured, pipeline(record=True), check=lambda c: c).recorded and not captured.recorded


def test_a_pass_that_breaks_the_graph_is_caught() -> None:
    def swaps_an_operator(captured):
        result = rewritten(captured)
        norm = next(n for n in result.graph.nodes if op_name(n) == "lockstep.linear")
        norm.target = torch.ops.aten.mm.default
        return result, "faster"

    def writes_a_weight(captured):
        result = rewritten(captured)
        weight, *_ = result.graph.nodes
        with result.graph.inserting_before(next(n for n in result.graph.nodes if n.op == "output")):
            result.graph.call_function(torch.ops.aten.zero_.default, (weight,))
        return result, "cleaner"

    def drops_an_output(captured):
        result = rewritten(captured)
        result.graph.output_node().args = ([],)
        return replace(result, outputs=()), "smaller"

    def may_write_more(captured):
        return replace(captured, writes=frozenset(("grad", "buffer", "param"))), "bolder"

    for apply, message in (
        (swaps_an_operator, "must use ops.linear"),
        (writes_a_weight, "writes param '0.norm' in place"),
        (drops_an_output, "bad changes the graph's outputs; a pass keeps its signature"),
        (may_write_more, "bad changes the graph's writes"),
    ):
        with pytest.raises(GraphError, match=message):
            run_passes(Step().capture(), [Pass("bad", True, apply)])


def test_a_digest_sees_targets_constants_shapes_and_order_but_not_names() -> None:
    def of(body, size: int = 3, **statics) -> str:
        return digest(capture("f", body, Inputs(user={"x": torch.ones(size)}), statics=statics))

    base = of(lambda t: {"y": t.user["x"] * 2 + 1})
    assert base == of(lambda t: {"y": t.user["x"] * 2 + 1})
    others = [
        of(lambda t: {"y": t.user["x"] * 3 + 1}),
        of(lambda t: {"y": t.user["x"] / 2 + 1}),
        of(lambda t: {"y": t.user["x"] + 1 * 2}),
        of(lambda t: {"z": t.user["x"] * 2 + 1}),
        of(lambda t: {"y": t.user["x"] * 2 + 1}, 4),
        of(lambda t, k: {"y": t.user["x"] * 2 + 1}, k=1),
    ]
    assert base not in others and len(set(others)) == len(others)
    renamed = rewritten(capture("f", lambda t: {"y": t.user["x"] * 2 + 1}, Inputs(user={"x": torch.ones(3)})))
    graph = fx.Graph()
    for node in renamed.graph.nodes:
        node.name = f"{node.name}_renamed"
    assert digest(renamed) == base and "mul_renamed" in dump(renamed) and len(graph.nodes) == 0


def test_a_trace_of_several_programs_is_rewritten_once(runtime_of, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, given, rewrites = runtime_of(), list[int](), list[str]()

    def tripled(inputs: Inputs) -> dict[str, Tensor]:
        return {"y": inputs.buffer["x"] * 3}

    function = runtime.program("tripled", tripled, Inputs(buffer={"x": torch.ones(3)}))
    other = function.bind_to(Inputs(buffer={"x": torch.zeros(3)}))
    assert [program()["y"].sum() for program in (function, other)] == [9, 0]
    monkeypatch.setattr(runtime.builder.backend, "share", lambda traces: given.append(len(traces)) or True)
    monkeypatch.setattr(runtime.builder, "run_common_passes", lambda trace: rewrites.append(trace.name) or trace)
    assert (
        runtime.share_regions()
        and given == [1]
        and rewrites == ["tripled"]
        and not function.graphs
        and not other.graphs
    )
    assert [program()["y"].sum() for program in (function, other)] == [9, 0] and runtime.captures == 1
