"""Code from outside the package that graphs, and checks that passed, depend on: none of either is another start's."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.algorithms import ALGORITHMS, TokenValues, grpo, policy_terms
from lockstep.algorithms.grpo import GRPO
from lockstep.cache import fingerprint, loaded_code
from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.distributed import ONE_PROCESS
from lockstep.environments.remote import RemoteEnvironment
from lockstep.graph import EAGER, Runtime, Store
from lockstep.graph.store.key import is_covered
from lockstep.graph.torch_private import trace as torch_trace
from lockstep.models import Decoder, ModelConfig
from lockstep.models.blocks.attributes import Attributes
from lockstep.models.blocks.layer import Layer
from lockstep.models.blocks.weights import WeightFactory
from lockstep.models.families import FAMILIES
from lockstep.models.families.qwen3 import QKNormLayer
from lockstep.ops import rope
from lockstep.ops.attention import reference as attention_reference
from lockstep.ops.machine_check import check as machine_check
from lockstep.ops.operator import like, operator
from lockstep.session.text.policy import Policy
from lockstep.trainer import Trainer, pack
from lockstep.trainer.parameters import Layout

CPU = torch.device("cpu")
OWN = loaded_code.PACKAGE.resolve()
Gradient = Callable[..., tuple[torch.Tensor, bool]]


@pytest.fixture
def gradient(decoder: Callable[..., Decoder], rollout: Callable[..., Any], tmp_path: Path) -> Iterator[Gradient]:
    """As other starts over one folder have it."""
    yield gradient_over(tmp_path, decoder, rollout)
    fingerprint.recheck_code()


@pytest.fixture(scope="module")
def stored(
    decoder: Callable[..., Decoder], rollout: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder that one start has kept its graph in, to be left as it is."""
    folder = tmp_path_factory.mktemp("stored")
    fingerprint.recheck_code()
    assert not gradient_over(folder, decoder, rollout)()[1]
    return folder


@pytest.fixture
def kept(stored: Path, tmp_path: Path, gradient: Gradient) -> Gradient:
    """`gradient`, whose graph is stored."""
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    assert gradient()[1]
    return gradient


def gradient_over(folder: Path, decoder: Callable[..., Decoder], rollout: Callable[..., Any]) -> Gradient:
    """Of one batch, as another start over a folder has it, and eager; and whether its graph was a stored one."""

    def of(runtime: Runtime) -> torch.Tensor:
        model = decoder(layers=1)
        (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=runtime)
        trainer.forward_backward(batch)
        return trainer.flat.grad.clone()

    def found(peers: Any = ONE_PROCESS) -> tuple[torch.Tensor, bool]:
        runtime = Runtime(CompileConfig("step"), CPU, store=Store(folder), peers=peers)
        captured = of(runtime)
        assert torch.equal(captured, of(EAGER))
        return captured, runtime.loaded == 1

    return found


def test_attributes_that_a_family_gives_its_layers(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(config: ModelConfig, index: int, weight: WeightFactory) -> Layer:
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
    def made(config: ModelConfig, index: int, weight: WeightFactory) -> Layer:
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


def test_an_object_whose_state_no_key_has() -> None:
    module = torch.nn.Module()
    assert object not in Attributes([module]).classes
    module.held = loaded_code.RecordingFinder()  # type: ignore[assignment]
    assert object in Attributes([module]).classes


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


def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **named: own(*given, **named)


class Callable_:
    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.own(*given, **named)

    def method(self, *given: Any, **named: Any) -> Any:
        return self.own(*given, **named)


REPLACED: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    "a function": (grpo, "clipped_surrogate", wrapped, "algorithms.grpo.clipped_surrogate"),
    "a bound method": (grpo, "clipped_surrogate", lambda own: Callable_(own).method, "grpo.clipped_surrogate"),
    "an object": (grpo, "clipped_surrogate", Callable_, "algorithms.grpo.clipped_surrogate"),
    "a method": (QKNormLayer, "attention", wrapped, "blocks.layer.QKNormLayer.attention"),
    "an operator": (rope.operator, "qk_norm_rope", wrapped, "ops.rope.operator.qk_norm_rope"),
    "a constant of a class": (Layer, "activation", lambda _: "gelu_tanh", "layer.Layer.activation"),
    "a module": (policy_terms, "torch", lambda own: SimpleNamespace(**vars(own)), "policy_terms.torch"),
}


@pytest.mark.parametrize(("place", "name", "change", "told"), REPLACED.values(), ids=REPLACED)
def test_what_has_replaced_a_part_of_the_package_is_seen(
    place: Any,
    name: str,
    change: Callable[[Any], Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fingerprint.recheck_code()
    with monkeypatch.context() as patch:
        patch.setattr(place, name, change(getattr(place, name)))
        assert fingerprint.is_modified() and fingerprint.key("one") != fingerprint.key("one")
        assert f"{told} is not what was imported: nothing" in caplog.text
    fingerprint.recheck_code()
    assert not fingerprint.is_modified() and fingerprint.key("one") == fingerprint.key("one")


def test_where_a_part_is_replaced_no_stored_graph_is_taken(kept: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(grpo, "clipped_surrogate", wrapped(grpo.clipped_surrogate))
        assert [kept()[1], kept()[1]] == [False, False]
    assert kept()[1]


def test_an_entry_of_a_table_and_a_functions_own_code_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(policy_terms.KL_ESTIMATORS, "k3", policy_terms.KL_ESTIMATORS["k1"])
        assert "policy_terms.KL_ESTIMATORS['k3'] is not what was imported" in str(loaded_code.find_difference())
    with monkeypatch.context() as patch:
        patch.setitem(policy_terms.KL_ESTIMATORS, "mine", len)
        assert loaded_code.find_difference() is None, "what is new has a name of its own"
    with monkeypatch.context() as patch:
        patch.setattr(grpo.clipped_surrogate, "__code__", (lambda *given: given).__code__)
        assert "clipped_surrogate is not what was imported" in str(loaded_code.find_difference())
    with monkeypatch.context() as patch:
        patch.setattr(pack, "__kwdefaults__", {"share_prefix": False})
        assert "packing.pack is not what was imported" in str(loaded_code.find_difference())
    wrapped_functions = {
        "RemoteEnvironment.playing": vars(RemoteEnvironment)["playing"].__func__,
        "Layout.of": vars(Layout)["of"].__func__,
        "Layout.size": vars(Layout)["size"].fget,
        "Policy.tool_format": vars(Policy)["tool_format"].func,
        "reference._head_indices": attention_reference._head_indices.__wrapped__,
    }
    for name, function in wrapped_functions.items():
        with monkeypatch.context() as patch:
            patch.setattr(function, "__defaults__", (0,))
            assert f"{name} is not what was imported" in str(loaded_code.find_difference())
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert loaded_code.find_difference() == "torch.nn.modules.module._global_forward_hooks has a hook"
    hook.remove()
    assert loaded_code.find_difference() is None


def test_a_special_method_that_a_class_is_given_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "__call__" not in vars(Decoder)
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "__call__", lambda self, *given: None, raising=False)
        assert loaded_code.find_difference() == "lockstep.models.decoder.Decoder.__call__ is not what was imported"
    monkeypatch.setattr(Decoder, "__slotnames__", [], raising=False)  # as `copyreg` does
    assert loaded_code.find_difference() is None


def test_what_an_operator_is_registered_as_since_is_seen(kept: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    told, op = "operator lockstep::qk_norm_rope is not what was registered", rope.operator.qk_norm_rope._op
    with monkeypatch.context() as patch:
        patch.setattr(op, "_backward_fn", wrapped(op._backward_fn))  # as `torch.library.register_autograd` does
        assert loaded_code.find_difference() == told and not kept()[1]
    with torch.library._scoped_library("lockstep", "IMPL") as library:
        library.impl("qk_norm_rope", wrapped(op._backend_fns["cpu"]), "CPU", allow_override=True)
        assert loaded_code.find_difference() == told and not kept()[1]
    assert loaded_code.find_difference() is None and kept()[1]


def test_an_operator_made_outside_of_the_package_is_none_of_its_own() -> None:
    @operator(fake=like(0))
    def of_another(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    assert of_another._name == "lockstep_user::of_another"


@pytest.mark.parametrize("way", ["hook", "forward", "call_layer"])
def test_a_function_that_a_model_is_given(way: str, decoder: Callable[..., Decoder]) -> None:
    model = decoder(layers=1)
    assert object not in model.trace_constants()["blocks"]
    if way == "hook":
        model.register_forward_hook(lambda *_: None)
    else:
        setattr(model, way, lambda *given: None)
    assert object in model.trace_constants()["blocks"]


def test_what_was_replaced_since_is_not_stored(gradient: Gradient, monkeypatch: pytest.MonkeyPatch) -> None:
    late = torch_trace.import_tracer

    def patched() -> None:
        monkeypatch.setattr(grpo, "clipped_surrogate", wrapped(grpo.clipped_surrogate))
        late()

    with monkeypatch.context() as patch:
        patch.setattr(torch_trace, "import_tracer", patched)
        loaded_code.record_module(torch_trace)  # only what it does is to be seen
        assert not gradient()[1]
    loaded_code.record_module(torch_trace)
    monkeypatch.undo()
    assert not gradient()[1] and gradient()[1]


class Beside:
    """The first of two ranks, of which the other one runs what it runs."""

    size = 2

    def __init__(self, changed: bool) -> None:
        self.changed = changed

    def gather(self, value: Any, what: str = "") -> list[Any]:
        return [value, self.changed]

    def broadcast_serialized(self, make: Callable[[], Any], *_: Any) -> Any:
        return make()

    def require_same(self, *_: Any) -> None: ...

    def close_on_leave(self, _: Runtime) -> None: ...


def test_where_one_rank_runs_other_code_none_takes_a_stored_graph(kept: Gradient) -> None:
    assert [kept(Beside(changed))[1] for changed in (False, True, False)] == [True, False, True]


def test_a_file_that_was_written_after_the_import_is_seen(
    gradient: Gradient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(loaded_code, "PACKAGE", package)
    assert loaded_code.find_difference() == f"{package} is {package}, and was {OWN} when it was imported"
    monkeypatch.setattr(loaded_code, "_IMPORTED_FROM", package)
    assert loaded_code.find_difference() == f"{package} has no sources"
    (package / "a.py").write_text("x = 1\n")
    (package / ".#a.py").symlink_to("who@where")  # an editor's lock
    (package / "b.py").mkdir()
    monkeypatch.setattr(loaded_code, "IMPORTED_NS", time.time_ns() + 10**9)
    assert loaded_code.find_difference() is None
    monkeypatch.setattr(loaded_code, "IMPORTED_NS", time.time_ns() - 10**9)
    os.utime(package / "a.py", (0, 0))  # a time of its own choice
    assert loaded_code.find_difference() == "package/a.py was written after it may have been imported"
    assert [gradient()[1], gradient()[1]] == [False, False]
    assert "nothing that other starts kept is used, and nothing is kept" in caplog.text
    os.utime(package / "a.py", (time.time() + 3600,) * 2)
    assert loaded_code.find_difference() == "package/a.py is of the future"


def test_the_package_as_it_is_has_nothing_replaced(caplog: pytest.LogCaptureFixture) -> None:
    assert len([name for name in sys.modules if name.startswith("lockstep.")]) > 100
    with caplog.at_level(logging.WARNING):
        assert loaded_code.find_difference() is None and not fingerprint.is_modified()


def test_what_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss():\n    pass\n")
    spec = importlib.util.spec_from_file_location("lockstep.algorithms.mine", file)
    assert spec is not None and spec.loader is not None
    mine = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, mine)
    spec.loader.exec_module(mine)
    assert not is_covered(mine.loss), "whatever its module is called"
    assert (
        is_covered(GRPO)
        and is_covered(torch.nn.Linear)
        and is_covered(grpo.clipped_surrogate)
        and is_covered(GRPO.loss)
    )
    for code in (Gained, len, dict, lambda: None, functools.partial(gradient), int.__add__, object):
        assert not is_covered(code)


def test_another_build_or_setting_is_checked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [machine_check.fingerprint(CPU, torch.float32)]
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")
    names.append(machine_check.fingerprint(CPU, torch.float32))
    monkeypatch.setattr(machine_check, "cpu_build", lambda: "another")
    names.append(machine_check.fingerprint(CPU, torch.float32))
    assert len({*names}) == 3
