"""A way to capture from outside the package: a function like `graph.capture`, entered in the table of the ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import generate, make_model, requests

from lockstep.config import CAPTURES, CompileConfig, GeneratorConfig, Plugin, resolve_compile
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Captured, FakeRecorder, Runtime, Store, capture, check_against_eager

CPU = torch.device("cpu")


def capture_and_tell(name: str, *function: Any, **about: Any) -> Captured:
    """As `step` captures, with a line in the report."""
    captured = capture(name, *function, **about)
    return replace(captured, log=(f"capture: toy; {len(captured.graph.nodes)} nodes",))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(CAPTURES, "toy", Plugin(f"{__name__}:capture_and_tell"))
    yield "toy"


@pytest.mark.parametrize("mode", ["none", "full_and_piecewise"])
def test_a_model_decodes_by_it_with_the_bits_of_eager(toy: str, mode: str, tmp_path: Path) -> None:
    config = CompileConfig(toy, mode)  # type: ignore[arg-type]
    runtime = Runtime(config, CPU, recorder=FakeRecorder(), store=Store(tmp_path))
    engines = [
        Engine(SharedWeights(make_model(torch.float32)), GeneratorConfig(), 4096, runtime=r) for r in (runtime, EAGER)
    ]
    captured, eager = ([(c.token_ids, c.logprobs) for g in generate(e, *requests(4)) for c in g] for e in engines)
    assert captured == eager
    assert all(log[0].startswith("capture: toy; ") for log in runtime.builder.nodes.values())
    assert (
        runtime.captures >= 2
        and runtime.launches["decode"] > 4
        and bool(runtime.replays)
        and not list(tmp_path.iterdir())
    )
    assert {v.faults for v in check_against_eager(runtime, engines[0].trust_cases(), "strict")} == {()}


def test_what_is_in_no_table_is_refused_with_what_is(toy: str) -> None:
    with pytest.raises(
        InputError, match=r"compile\.capture is 'toys'; it must be one of none, step, joint, layer, toy$"
    ):
        resolve_compile(CompileConfig("toys"), on_gpu=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"compile\.backend is 'xla'; it must be one of none, eager, inductor$"):
        resolve_compile(CompileConfig(toy, backend="xla"), on_gpu=False)  # type: ignore[arg-type]
