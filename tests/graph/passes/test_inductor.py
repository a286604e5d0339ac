"""Compiled regions: what becomes one, that it is compiled once, stored, and held to what is under contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from two_roles import TwoRoles, batch, needs_inductor, quick_inductor, results, runtime_of

from lockstep.config import CompileConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig, validate
from lockstep.errors import InputError
from lockstep.graph import (
    GraphError,
    Inputs,
    Pass,
    PassedChecks,
    backward,
    capture,
    check_against_eager,
    digest,
    dump,
    dumps,
    in_module,
    loads,
    run_passes,
)
from lockstep.graph.ir.captured import inexact_results, is_backward, op_name
from lockstep.graph.ir.sizes import Sizes, rename_conditions
from lockstep.graph.passes.compiled_subgraph import CompiledSubgraph, Regions
from lockstep.graph.passes.inductor import stretches
from lockstep.graph.passes.recompute import UnknownPattern
from lockstep.graph.passes.subgraph import outline
from lockstep.graph.torch_private.inductor import Signature
from lockstep.models.init import ARCHITECTURES
from lockstep.rl.loop import Loop
from lockstep.session import build as build_room
from lockstep.session import warm_up
from lockstep.session.build import resolve
from lockstep.session.precompile import precompile
from lockstep.timings import Timings


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    with quick_inductor():
        yield Regions(Timings())


def called(captured: Any) -> list[Any]:
    return [n.target for n in captured.graph.nodes if isinstance(n.target, CompiledSubgraph)]


def flat(captured: Any, inputs: Inputs) -> list[Tensor]:
    with torch.no_grad():
        return [t.clone() for t in captured.module.forward(*(t for _, _, t in inputs.flat()))]


def test_a_stretch_ends_at_our_operators_writes_and_sums_in_any_order() -> None:
    from lockstep import ops

    def body(t: Inputs) -> dict[str, Tensor]:
        x, rows = t.user["x"], t.user["rows"]
        a = (x * 2).exp()  # two calls
        b = ops.silu_mul(a)
        c = (b + 1).cos().view(-1)  # two, and a view that is read outside
        t.buffer["sum"].add_(c.sum())  # one more
        d = torch.zeros_like(x)
        d.add_(a)  # what is overwritten is not part of any
        e = (d - 1).neg().index_add(0, rows, x)
        return {"c": c * 1, "e": e.abs().sqrt() * 1, "drawn": torch.rand_like(x).exp() * 1}

    inputs = Inputs(buffer={"sum": torch.zeros(())}, user={"x": torch.randn(3, 4), "rows": torch.tensor([2, 0, 2])})
    captured = capture("f", body, inputs, writes={"buffer"})
    for node in captured.graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"module": "m"}
    found = list(stretches(captured, ("all",)))
    names = [[op_name(n).removeprefix("aten.") for n in s.calls] for s in found]
    last = ["mul", "abs", "sqrt", "mul"]
    assert names == [["mul", "exp"], ["add", "cos", "sum"], ["sub", "neg"], last, ["exp", "mul"]]
    assert not list(stretches(captured, ("backward",))) and not list(stretches(captured, ("other.*",)))
    calls = {s: _named(s.module.forward, f"stretch_{i}") for i, s in enumerate(found)}
    result = replace(captured, module=outline(captured, calls))
    run_passes(result, [])  # it verifies
    assert [op_name(n) for n in result.graph.nodes].count("aten.view") == 1
    for c in (captured, result):
        torch.manual_seed(0)
        inputs.buffer["sum"].zero_()
        outcome = [*flat(c, inputs), inputs.buffer["sum"].clone()]
        expected = outcome if c is captured else expected  # noqa: F821
    assert all(map(torch.equal, outcome, expected))


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = name
    return call


@needs_inductor
def test_a_thread_may_compile_a_region_while_another_traces(regions: Regions) -> None:
    traces, compiles, traced = Event(), Event(), Event()

    class Region(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            compiles.set()
            traced.wait(9)
            return [x * 2]

    def body(t: Inputs) -> dict[str, Tensor]:
        traces.set()
        compiles.wait(0.5)
        return {"y": t.user["x"] + 1}

    def compiled() -> Any:
        traces.wait(9)
        with FakeTensorMode() as mode:
            signature = Signature([mode.from_tensor(torch.ones(3))])
        return signature.compile(Region())[0]

    with ThreadPoolExecutor() as pool:
        found = pool.submit(compiled)
        capture("f", body, Inputs(user={"x": torch.ones(3)}))
        traced.set()
        assert found.result()(torch.ones(3))[0].tolist() == [2, 2, 2]


def test_what_reads_an_input_that_is_overwritten_is_not_computed_again_behind_that() -> None:
    def body(t: Inputs) -> dict[str, Tensor]:
        x = t.buffer["x"]
        with in_module("layer"):
            a = x * 2
            b = a.exp()
        x.add_(1)
        with backward():  # which alone reads `a`
            c = a.cos() * b
        return {"c": c * 1}

    inputs = Inputs(buffer={"x": torch.randn(3, 4)})
    captured = capture("f", body, inputs, writes={"buffer"})
    forward = [stretch for stretch in stretches(captured, ("all",)) if not stretch.backward]
    module = outline(captured, {s: _named(s.module.forward, "stretch") for s in forward})
    expected = {name: x.clone() for name, x in body(replace(inputs, buffer={"x": inputs.buffer["x"].clone()})).items()}
    with torch.no_grad():
        assert torch.equal(module.forward(*(t for _, _, t in inputs.flat()))[0], expected["c"])


def test_conditions_are_told_in_the_names_of_the_graph() -> None:
    import sympy

    rows, more = sympy.symbols("s0 s1", integer=True, positive=True)
    sizes = Sizes(("T", "S"), (), {rows: "T", more: "S"})
    (condition,) = rename_conditions([(["<=", "d0", 4096], "there")], {"d0": rows + 2 * more}, sizes)
    both = sizes.with_conditions([condition, condition])
    assert both.broken_conditions({"T": 4000, "S": 10}) == [] and len(both.conditions) == 1
    assert both.broken_conditions({"T": 4000, "S": 50}) == ["(T + (2 * S)) <= 4096 (there)"]


@needs_inductor
def test_one_region_serves_every_shape_and_graph_and_the_pass_says_what_it_did(regions: Regions) -> None:
    runtime = runtime_of("step", "inductor", regions=regions)
    roles = TwoRoles(runtime)
    results(roles)
    log = next(log for title, log in runtime.builder.logs.items() if title.startswith("train"))
    made = len(regions._made)
    assert made and f"in {made} regions, {made} different" in log[-1] and log[-1].startswith("inductor: ")
    assert "nothing to compile" in runtime.builder.logs["generate()"][-1]
    again = runtime_of("step", "inductor", "full", regions=regions)
    results(TwoRoles(again))
    assert len(regions._made) == made and runtime.captures == again.captures == 2
    captured = roles.train.graph({"x": batch(6)}, {}).captured
    assert all(is_backward(n) for n in captured.graph.nodes if isinstance(n.target, CompiledSubgraph))
    assert inexact_results(captured) == {f"grad {name}" for name in roles.grad}
    text = dump(captured)
    assert all(region.__name__ in text and f"    {region.body[-1]}" in text for region in called(captured))


@needs_inductor
def test_a_graph_with_regions_is_stored_and_loaded(regions: Regions) -> None:
    roles = TwoRoles(runtime_of("step", "inductor", regions=regions))
    results(roles)
    captured = roles.train.graph({"x": batch(6)}, {}).captured
    loaded = loads(dumps(captured))
    assert digest(loaded) == digest(captured) and dump(loaded) == dump(captured)
    assert all(a is not b for a, b in zip(called(loaded), called(captured), strict=True))
    inputs = replace(roles._eager["train"][1], user={"x": batch(6)})
    runs = []
    for graph in (captured, loaded):
        for total in roles.grad.values():
            total.fill_(0.5)
        runs.append([*flat(graph, inputs), *(g.clone() for g in roles.grad.values())])
    assert all(map(torch.equal, *runs))


@needs_inductor
@pytest.mark.parametrize(("capture_", "mode"), [("step", "full"), ("joint", "none")])
def test_what_is_under_contract_is_checked_bit_for_bit_and_the_rest_within_a_bound(
    capture_: str, mode: str, regions: Regions, tmp_path: Path
) -> None:
    runtime = runtime_of(capture_, "inductor", mode, regions)
    roles = TwoRoles(runtime)
    before = roles.state()
    for known in (0, 2):
        found = check_against_eager(runtime, roles.work(), "strict", PassedChecks(tmp_path))
        assert [(v.function, v.faults, v.known) for v in found] == [("train", (), known), ("generate", (), known)]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), roles.state().values(), strict=True))


class Wrong(CompiledSubgraph):
    """A region whose compiled code has a fault."""

    def __init__(self, region: CompiledSubgraph, fault: Callable[[Any], Any]) -> None:
        super().__init__(region.body, region.module, region._artifact, region.conditions)
        self._fault = fault

    def __call__(self, *args: Any) -> Any:
        return [self._fault(result) for result in super().__call__(*args)]


@needs_inductor
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda r: r * 1.01,
            r"inductor differs from the step before in grad .* by more than 0\.0001 of it, first at node ",
        ),
        (lambda r: r + torch.rand(()) * 1e-7, "two runs of the graph differ in grad"),
    ],
    ids=["other values", "other bits each time"],
)
def test_a_region_with_a_fault_is_named(fault: Callable[[Any], Any], message: str, regions: Regions) -> None:
    results(TwoRoles(runtime_of("step", "inductor", regions=regions)))
    wrong = Regions(Timings())
    wrong._made = {key: Wrong(region, fault) for key, region in regions._made.items()}
    runtime = runtime_of("step", "inductor", "full", wrong)
    with pytest.raises(GraphError, match=rf"train\(\), case 'six': {message}") as caught:
        check_against_eager(runtime, TwoRoles(runtime).work(), "strict")
    if "inductor differs" in message:
        assert any(f"node {region.__name__}" in str(caught.value) for region in wrong._made.values())
        assert "which is 0.01 from its operators" in str(caught.value)


@needs_inductor
def test_a_pass_that_hides_a_region_is_refused(regions: Regions) -> None:
    results(TwoRoles(runtime_of("step", "inductor", regions=regions)))
    runtime = runtime_of("step", "inductor", regions=regions)
    runtime.builder.passes[-1] = Pass("tidy", True, runtime.builder.passes[-1].apply)
    with pytest.raises(GraphError, match="tidy says that it changes no bits, and may change grad 0.down"):
        results(TwoRoles(runtime))


@needs_inductor
def test_forward_regions_are_compiled_when_every_graph_of_both_roles_has_them(regions: Regions) -> None:
    runtime = runtime_of("step", "inductor", regions=regions, inductor=("0",))
    roles = TwoRoles(runtime)
    eager = results(roles)
    assert not any(called(g.captured) for f in runtime.programs for g in f.graphs.values())
    assert "1 left as they are: not in the forward passes of both roles" in runtime.builder.logs["generate()"][-1]
    assert runtime.share_regions() and not roles.train.graphs
    found = results(roles)
    a, b = (called(f.graph({"x": batch(6)}, {}).captured) for f in (roles.train, roles.generate))
    assert a == b and len(a) == 1 and runtime.captures == 2
    assert all(torch.equal(found[f"train {i}"], found[f"generate {i}"]) for i in range(3))
    assert all((found[f"train {i}"] - eager[f"train {i}"]).abs().max() < 1e-5 for i in range(3))
    assert {v.faults for v in check_against_eager(runtime, roles.work(), "strict")} == {()}
    with pytest.raises(
        GraphError, match=r"generate\(\): at these sizes the graph lacks compiled regions of the others"
    ):
        roles.generate({"x": batch(1)})  # one row is another function
    regions.shared = frozenset()


@needs_inductor
def test_a_path_that_matches_no_module_lists_them(regions: Regions) -> None:
    runtime = runtime_of("step", "inductor", regions=regions, inductor=("backward", "layers.*"))
    with pytest.raises(UnknownPattern, match=r"compile\.inductor: train\(\): 'layers\.\*' matches no module; .* of 0$"):
        results(TwoRoles(runtime))


@needs_inductor
def test_a_run_with_forward_regions_keeps_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model with latent attention, whose layers gather rotated parts between our operators."""
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    config = RunConfig(
        arch="tiny-deepseek-v3",
        device="cpu",
        compile=CompileConfig("step", "none", backend="inductor", inductor=("layers.*",), verify="off"),
        task=TaskConfig(easy=True, validation_prompts=2),
        sampling=SamplingConfig(num_generations=2, max_completion_length=6),
        trainer=TrainerConfig(prompts_per_step=2, skip_zero_variance=False),
    )
    monkeypatch.setitem(ARCHITECTURES, config.arch, replace(ARCHITECTURES[config.arch], num_layers=1))
    with quick_inductor():
        run = build_room.build(validate(config))
        warm_up.warm_up(run)
        metrics, _ = Loop(config, run).step(0)
    assert (metrics["parity/tokens_different"], metrics["recompiles"], metrics["updates"]) == (0, 0, 1)
    assert metrics["parity/tokens_checked"] > 0
    with_regions = {f.name for f in run.runtime.programs for g in f.graphs.values() if called(g.captured)}
    assert with_regions == {"forward_backward", "decode", "mixed"}
    assert len(run.runtime.builder.backend.regions._made) == 1


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CompileConfig("step", "none", backend="inductor")
    monkeypatch.setattr(
        "lockstep.graph.torch_private.inductor.missing_compiler", lambda _: "a C++ compiler such as g++"
    )
    with pytest.raises(InputError, match="compile.backend is inductor, which needs a C.. compiler such as g.. on this"):
        resolve(RunConfig(device="cpu", compile=config))
    assert resolve(RunConfig(device="cpu", compile=replace(config, backend="eager"))) is not None


FOR_ONE = [{"capture": "joint"}, {"capture": "layer"}, {"capture": "step", "inductor": ("all",)}]


@pytest.mark.parametrize("given", FOR_ONE)
def test_what_is_for_one_process_is_refused_for_several(given: dict[str, Any]) -> None:
    config = CompileConfig(cudagraph_mode="none", backend="inductor" if "inductor" in given else "auto", **given)
    with pytest.raises(InputError, match="several processes need step, and regions of the backward pass alone"):
        resolve(RunConfig(device="cpu", compile=config), 2)


def test_what_is_not_kept_is_not_precompiled() -> None:
    for given in (CompileConfig("layer"), CompileConfig("step", backend="inductor", inductor=("all",))):
        with pytest.raises(InputError, match="layers, and regions that both roles share, are compiled where they run"):
            precompile(RunConfig(device="cpu", compile=given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"capture": "step", "inductor": ("all",)},
            "compile.inductor chooses regions of captured graphs; set compile.back",
        ),
        (
            {"capture": "layer", "backend": "inductor", "inductor": ("all",)},
            "compile.inductor chooses regions of captured",
        ),
        ({"capture": "step", "backend": "inductor", "inductor": ()}, "compile.inductor is []; name what to compile"),
        (
            {"capture": "step", "backend": "inductor", "inductor": ("",)},
            "compile.inductor is ['']; name what to compile",
        ),
        ({"capture": "layer", "dump": "folder"}, "act on captured graphs; set compile.capture to step"),
        ({"capture": "layer", "recompute": ("full",)}, "act on captured graphs; set compile.capture to step or joint"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(RunConfig(device="cpu", compile=CompileConfig(**given)))
    assert message in str(caught.value)
