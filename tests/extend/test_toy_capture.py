"""A way to capture from outside the package: a function like `graph.capture`, entered in the table of the ways."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder
from small import generate, make_model, requests, words

from lockstep import train
from lockstep.config import CAPTURES, CompileConfig, GeneratorConfig, Plugin, resolve_compile, yaml_file
from lockstep.config.recipes import sum_digits
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Captured, Case, GraphError, Inputs, Runtime, Store, capture, check_against_eager
from lockstep.graph.passes.rewrite import rewritten
from lockstep.graph.torch_private import trace

CPU = torch.device("cpu")


def capture_and_tell(name: str, *function: Any, **about: Any) -> Captured:
    """As `step` captures, with a line in the report."""
    captured = capture(name, *function, **about)
    return replace(captured, log=(f"capture: toy; {len(captured.graph.nodes)} nodes",))


def capture_a_row(name: str, *function: Any, **about: Any) -> Captured:
    """What a mistake looks like: the output, a vector, is a matrix of one row."""
    captured = rewritten(capture(name, *function, **about))
    output, graph = captured.graph.output_node(), captured.graph
    with graph.inserting_before(output):
        output.args = ([trace.call(graph, torch.ops.aten.unsqueeze.default, output.args[0][0], 0)],)  # type: ignore[index]
    return captured


def capture_less(name: str, *function: Any, **about: Any) -> Captured:
    """What a mistake looks like: the output is missing."""
    captured = rewritten(capture(name, *function, **about))
    captured.graph.output_node().args = ([],)
    return replace(captured, outputs=())


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(CAPTURES, "toy", Plugin(f"{__name__}:capture_and_tell"))
    yield "toy"


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_a_model_decodes_by_it_with_the_bits_of_eager(toy: str, mode: str, tmp_path: Path) -> None:
    config = CompileConfig(toy, mode)  # type: ignore[arg-type]
    runtime = Runtime(config, CPU, recorder=FakeRecorder(), store=Store(tmp_path))
    weights = SharedWeights(make_model(torch.float32))
    engine, eager = (Engine(weights, GeneratorConfig(), 4096, runtime=r) for r in (runtime, EAGER))
    assert words(generate(engine, *requests(4))) == words(generate(eager, *requests(4)))
    assert all(log[0].startswith("capture: toy; ") for log in runtime.builder.logs.values())
    assert runtime.captures >= 2 and runtime.launches["decode"] > 4
    assert (runtime.replays["decode"] > 0) == (mode != "none")
    assert not list(tmp_path.iterdir()), "at the next start nothing tells whether it is what it was"
    assert {v.faults for v in check_against_eager(runtime, engine.check_cases(), "strict")} == {()}


@pytest.mark.parametrize(("way", "what"), [(capture_a_row, "output y"), (capture_less, "output y, which only one")])
def test_outputs_of_another_form_are_found(way: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPTURES, "toy", Plugin(way))
    runtime = Runtime(CompileConfig("toy"), CPU)  # type: ignore[arg-type]
    program = runtime.program("f", lambda inputs: {"y": inputs.user["x"] + 1}, Inputs())
    with pytest.raises(GraphError, match=f"capture differs from eager in {what}"):
        check_against_eager(runtime, [(program, [Case("all", {"x": torch.ones(3)})])], "strict")


def test_a_run_trains_by_it_and_is_gone_on_with(toy: str, tmp_path: Path) -> None:
    config = sum_digits(None)
    trainer = replace(config.trainer, warmup_steps=0, prompts_per_step=2)
    parts = {"task": replace(config.task, validation_prompts=0), "trainer": trainer}
    config = replace(config, **parts, steps=1, checkpoint=replace(config.checkpoint, interval=1))
    found = train(replace(config, compile=CompileConfig(toy)), tmp_path / "run")  # type: ignore[arg-type]
    assert found["parity"]["identical"] and found["compile"]["traces"] >= 3
    assert yaml_file.load(tmp_path / "run" / "config.yaml").compile.capture == toy
    with pytest.raises(InputError, match="compile.capture is 'toys'; it must be one of none, step, joint, layer"):
        train(replace(config, compile=CompileConfig("toys")), tmp_path / "other")  # type: ignore[arg-type]


def test_what_is_in_no_table_is_refused_with_what_is(toy: str) -> None:
    known = "it must be one of none, step, joint, layer, toy$"
    with pytest.raises(InputError, match=rf"compile\.capture is 'toys'; {known}"):
        resolve_compile(CompileConfig("toys"), on_gpu=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"compile\.backend is 'xla'; it must be one of none, eager, inductor$"):
        resolve_compile(CompileConfig(toy, backend="xla"), on_gpu=False)  # type: ignore[arg-type]


def test_what_is_not_chosen_is_not_imported() -> None:
    source = "import sys; import lockstep.session.build; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.removeprefix("lockstep.graph.") for name in found}
    assert "capture.step" in ours
    assert ours.isdisjoint({"capture.joint", "capture.layers", "passes.inductor", "launch.piecewise"})
