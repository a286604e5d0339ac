"""Code from outside the package that graphs, and checks that passed, depend on: none of either is another start's."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.algorithms import ALGORITHMS, TokenValues, grpo
from lockstep.algorithms.grpo import GRPO
from lockstep.cache import fingerprint, loaded_code
from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import EAGER, Runtime, Store
from lockstep.graph.store.key import covered
from lockstep.models import Decoder, ModelConfig
from lockstep.models.blocks.layer import Layer
from lockstep.models.blocks.weights import Weight
from lockstep.models.families import FAMILIES
from lockstep.models.families.qwen3 import QKNormLayer
from lockstep.ops import rope
from lockstep.ops.machine_check import check as machine_check
from lockstep.trainer import Trainer, pack

CPU = torch.device("cpu")
Gradient = Callable[[], tuple[torch.Tensor, bool]]


@pytest.fixture
def gradient(decoder: Callable[..., Decoder], rollout: Callable[..., Any], tmp_path: Path) -> Iterator[Gradient]:
    """Of one batch, as another start over one folder has it, and eager; and whether its graph was a stored one."""

    def of(runtime: Runtime) -> torch.Tensor:
        model = decoder(layers=1)
        (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
        trainer.forward_backward(batch)
        return trainer.flat.grad.clone()

    def found() -> tuple[torch.Tensor, bool]:
        runtime = Runtime(CompileConfig("step"), CPU, store=Store(tmp_path))
        captured = of(runtime)
        assert torch.equal(captured, of(EAGER))
        return captured, runtime.loaded == 1

    yield found
    fingerprint.look_again()


def test_attributes_that_a_family_gives_its_layers(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(config: ModelConfig, index: int, weight: Weight) -> Layer:
        layer = QKNormLayer(config, index, weight)
        layer.activation = activation  # type: ignore[misc]
        return layer

    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], layer=made))
    found = []
    for activation in ("silu", "gelu_tanh", "silu", "gelu_tanh"):  # noqa: B007 (`made` has it)
        found.append(gradient())
    assert [stored for _, stored in found] == [False, False, True, True]
    assert torch.equal(found[0][0], found[2][0]) and not torch.equal(found[0][0], found[1][0])


def test_a_function_that_a_family_gives_its_layers(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(config: ModelConfig, index: int, weight: Weight) -> Layer:
        layer = QKNormLayer(config, index, weight)
        attention = layer.attention
        layer.attention = lambda *given: gain * attention(*given)  # type: ignore[method-assign]
        return layer

    monkeypatch.setitem(FAMILIES, "qwen3", replace(FAMILIES["qwen3"], layer=made))
    found = []
    for gain in (1.0, 2.0, 1.0):  # noqa: B007 (`made` has it)
        found.append(gradient())
    assert [stored for _, stored in found] == [False] * 3
    assert not torch.equal(found[0][0], found[1][0])


class Gained(GRPO):
    gain = 1.0

    def loss(self, values: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
        loss_C, clipped_C = super().loss(values)
        return self.gain * loss_C, clipped_C


def test_a_loss_that_passes_for_the_packages_own(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    functools.update_wrapper(Gained, GRPO, updated=())
    assert (Gained.__module__, Gained.__qualname__) == (GRPO.__module__, GRPO.__qualname__)
    monkeypatch.setitem(ALGORITHMS, "grpo", Gained)
    found = []
    for gain in (1.0, -2.0):
        monkeypatch.setattr(Gained, "gain", gain)
        found.append(gradient())
    assert [stored for _, stored in found] == [False, False] and not torch.equal(found[0][0], found[1][0])


@pytest.mark.parametrize(
    ("place", "name"),
    [(grpo, "clipped_surrogate"), (QKNormLayer, "attention"), (rope.operator, "qk_norm_rope")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_what_has_replaced_a_part_of_the_package_is_seen(
    place: Any, name: str, gradient: Gradient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = getattr(place, name)
    assert not gradient()[1] and gradient()[1], "its own graph is stored"

    def replaced(*given: Any, **named: Any) -> Any:
        return own(*given, **named)

    monkeypatch.setattr(place, name, replaced)
    for _ in range(2):
        assert not gradient()[1]
    of = f"{getattr(place, '__module__', place.__name__)}"
    assert any(of in r.message and f"{name} is of {__name__}: nothing" in r.message for r in caplog.records)
    assert fingerprint.changed() and fingerprint.key("one") != fingerprint.key("one")
    monkeypatch.undo()
    fingerprint.look_again()
    assert gradient()[1] and fingerprint.key("one") == fingerprint.key("one")


def test_a_file_that_was_written_after_the_import_is_seen(
    gradient: Gradient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(loaded_code, "PACKAGE", package)
    monkeypatch.setattr(lockstep, "IMPORTED_NS", time.time_ns() + 10**9)
    assert loaded_code.difference() is None
    monkeypatch.setattr(lockstep, "IMPORTED_NS", time.time_ns() - 10**9)
    os.utime(package / "a.py", (0, 0))  # a time of its own choice
    assert loaded_code.difference() == "package/a.py was written after it may have been imported"
    assert [gradient()[1], gradient()[1]] == [False, False]
    assert "nothing that other starts kept is used, and nothing is kept" in caplog.text


def test_the_package_as_it_is_has_nothing_replaced(caplog: pytest.LogCaptureFixture) -> None:
    assert len([name for name in sys.modules if name.startswith("lockstep.")]) > 100
    with caplog.at_level(logging.WARNING):
        assert loaded_code.difference() is None and not fingerprint.changed()


def test_what_is_covered() -> None:
    assert covered(GRPO) and covered(torch.nn.Linear) and covered(grpo.clipped_surrogate) and covered(GRPO.loss)
    for code in (Gained, len, dict, lambda: None, functools.partial(gradient), int.__add__, object):
        assert not covered(code)


def test_another_build_or_setting_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [machine_check.fingerprint(CPU, torch.float32)]
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    names.append(machine_check.fingerprint(CPU, torch.float32))
    monkeypatch.setattr(machine_check, "cpu_build", lambda: "another")
    names.append(machine_check.fingerprint(CPU, torch.float32))
    assert len({*names}) == 3
