"""Every combination of capture, backend and CUDA graph mode: as eager where it may be used, refused with its reason."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from two_roles import TwoRoles, needs_inductor, quick_inductor, results, runtime_of

from lockstep import config as choices
from lockstep.config import CompileConfig, RunConfig, cudagraph_modes, resolve_compile, validate
from lockstep.errors import InputError
from lockstep.graph.capture.layers import layer_compiler
from lockstep.graph.check.tolerance import relative_error
from lockstep.graph.passes.compiled_subgraph import Regions
from lockstep.graph.torch_private.inductor import compile_module
from lockstep.timings import Timings

CAPTURES, BACKENDS = ("none", "step", "joint", "layer"), ("none", "eager", "inductor")
MODES = ("none", "piecewise", "full", "full_and_piecewise")
PRODUCT = list(itertools.product(CAPTURES, BACKENDS, MODES))
CUDAGRAPH_MODES = {pair: cudagraph_modes(*pair) for pair in itertools.product(choices.CAPTURES, choices.BACKENDS)}
ALLOWED = [c for c in PRODUCT if c[2] in CUDAGRAPH_MODES[c[:2]] and not isinstance(CUDAGRAPH_MODES[c[:2]], str)]
NEAR = 1e-5  # relative to eager's gradient, in norms; measured: under 1e-6


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    with quick_inductor():
        yield Regions(Timings())


@pytest.fixture(scope="module")
def eager() -> dict[str, torch.Tensor]:
    return results(TwoRoles(), eager=True)


def test_the_table_is_over_the_full_product() -> None:
    assert CUDAGRAPH_MODES.keys() == {c[:2] for c in PRODUCT} and len(ALLOWED) == 19


@pytest.mark.parametrize(("capture", "backend", "mode"), [c for c in PRODUCT if c not in ALLOWED])
def test_what_cannot_work_is_refused_with_its_reason(capture: str, backend: str, mode: str) -> None:
    reason = CUDAGRAPH_MODES[capture, backend]
    expected = reason if isinstance(reason, str) else f"compile.cudagraph_mode is {mode}: CUDA graphs are recorded from"
    config = CompileConfig(capture, mode, backend=backend)  # type: ignore[arg-type]
    for device in ("cpu", "cuda"):
        with pytest.raises(InputError, match=re.escape(expected)):
            validate(RunConfig(device=device, compile=config))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capture", "backend", "mode"),
    [pytest.param(*c, marks=needs_inductor if c[1] == "inductor" else ()) for c in ALLOWED],
)
def test_what_is_allowed_computes_what_eager_does(capture: str, backend: str, mode: str, eager, regions) -> None:
    assert resolve_compile(CompileConfig(capture, mode, backend=backend), on_gpu=False)  # type: ignore[arg-type]
    if capture in ("none", "layer"):
        compiled = layer_compiler(compile_module if backend == "inductor" else None) if capture == "layer" else None
        found = results(TwoRoles(call=compiled), eager=True)
    else:
        runtime = runtime_of(capture, backend, mode, regions)
        found = results(TwoRoles(runtime))
        assert (runtime.replays.total() > 0) == (mode != "none")
    own = {name for name in eager if backend == "inductor" and (name.startswith("grad") or capture == "layer")}
    assert not [name for name in eager if name not in own and not torch.equal(found[name], eager[name])]
    assert all(relative_error(found[name], eager[name]) < NEAR for name in own)
    if own:  # another run has the same bits
        again = results(TwoRoles(runtime_of(capture, backend, mode, regions))) if capture != "layer" else found
        assert all(torch.equal(found[name], again[name]) for name in found)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    assert [row[:2] for row in rows] == list(CUDAGRAPH_MODES)
    for capture, backend, modes, meaning in rows:
        allowed = CUDAGRAPH_MODES[capture, backend]
        refused = isinstance(allowed, str)
        assert modes == ("any" if refused else ", ".join(f"`{mode}`" for mode in allowed)), (capture, backend)
        assert (meaning == f"refused: {allowed}") == refused, (capture, backend)
