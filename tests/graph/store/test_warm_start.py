"""A second start loads the first one's graphs: nothing is traced, every bit is the same, and what changed is seen."""

from __future__ import annotations

import importlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_recorder import FakeRecorder

from lockstep.algorithms import ALGORITHMS, TokenValues
from lockstep.algorithms.grpo import GRPO
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Inputs, Runtime, Store, check_against_eager, compile_report, digest
from lockstep.graph import Case as TrustCase
from lockstep.graph.store import framed_file
from lockstep.graph.store.artifact import dumps, loads
from lockstep.models import Decoder
from lockstep.session.attention import set_attention
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.types import SampleIdentity, SamplingParams

CPU = torch.device("cpu")
Made = Callable[..., Runtime]


@pytest.fixture
def runtime(tmp_path: Path) -> Made:
    """`runtime(mode="none", **CompileConfig fields)`: each call as another process, over one folder."""

    def make(mode: str = "none", **options: Any) -> Runtime:
        config = CompileConfig("step", mode, **options)  # type: ignore[arg-type]
        recorder = FakeRecorder() if mode != "none" else None
        return Runtime(config, CPU, recorder=recorder, store=Store(tmp_path))

    return make


def work(model: Decoder, rollout: Callable[..., Any], runtime: Runtime, shapes: Sequence[BatchShape] = ()) -> list[Any]:
    """Two steps of training, one batch of them only checked, and completions of many lengths: all that they leave."""
    trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), LossConfig(), runtime=runtime)
    seen: list[Any] = []
    for step in range(2):
        batches = pack(rollout(model, step), max_tokens=44, check_parity=True, shapes=shapes)
        for batch in batches:
            trainer.forward_backward(batch)
        trainer.check(batches[0])
        seen += [trainer.flat.grad.clone(), trainer.optim_step(1e-2)]
    engine = Engine(SharedWeights(model), GeneratorConfig(), 1024, runtime=runtime)
    kinds = ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9})
    prompts = [[(11 * g + i) % 97 for i in range(1 + 13 * g)] for g in range(3)]
    sampling = [SamplingParams(**k, n=2, max_completion_length=5 + 3 * i) for i, k in enumerate(kinds)]  # type: ignore[arg-type]
    completions = engine.generate(prompts, sampling, [SampleIdentity(3, 0, 0, g) for g in range(3)])
    seen += [(c.token_ids, [x.hex() for x in c.logprobs]) for group in completions for c in group]
    return [*seen, trainer.flat.data.clone(), *(t.clone() for t in trainer.state()[0].values())]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("mode", "dtype", "recompute"),
    [
        ("none", torch.float32, ()),
        ("full", torch.bfloat16, ("full",)),
        ("piecewise", torch.float32, ()),
    ],
)
def test_the_second_start_traces_nothing_and_has_the_same_bits(
    decoder, rollout, runtime: Made, mode: str, dtype: torch.dtype, recompute: tuple[str, ...]
) -> None:
    cold, warm = (runtime(mode, recompute=recompute) for _ in range(2))
    shapes = () if mode == "none" else [BatchShape(44, 32, 16, 44)]  # graphs of several sizes, and of one
    before = work(decoder(dtype), rollout, cold, shapes)
    after = work(decoder(dtype), rollout, warm, shapes)
    assert same(before, after) and warm.captures == 0 < cold.captures and cold.loaded == 0
    graphs = [{f.name: [digest(g.captured) for g in f.graphs.values()] for f in c.programs} for c in (cold, warm)]
    assert graphs[0] == graphs[1] and warm.loaded >= cold.captures and warm.replays == cold.replays
    assert compile_report(warm)["passes"] == (passes := compile_report(cold)["passes"])
    assert mode == "none" or all(log[-1].startswith("cudagraph: ") for log in passes.values())
    assert {"load_graphs"} <= warm.timings.seconds.keys() and not {
        "trace",
        "import_tracer",
    } & warm.timings.seconds.keys()
    outcomes = [{lookup.outcome for lookup in c.store.lookups} for c in (cold, warm) if c.store]
    assert outcomes == [{"absent"}, {"loaded"}] and warm.recompiles == 0


def train_step(model: Decoder, rollout: Callable[..., Any], runtime: Runtime, **loss: Any) -> None:
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    Trainer(model, OptimizerConfig(), LossConfig(**loss), runtime=runtime).forward_backward(batch)


def test_what_changed_is_named_and_the_old_graph_stays(decoder, rollout, runtime: Made) -> None:
    train_step(decoder(layers=1), rollout, runtime())
    changed = runtime(recompute=("full",))
    train_step(decoder(layers=1), rollout, changed, epsilon=0.3)
    assert changed.captures == 1 and changed.store is not None
    (lookup,) = changed.store.lookups
    assert lookup.outcome == "refused" and lookup.title.startswith("forward_backward(max_len=")
    assert lookup.reasons[1] == "constants.loss.epsilon was '0.2' and is '0.3'"
    before, after = lookup.reasons[0].removeprefix("passes was ").split(" and is ")  # from where they differ on
    assert before == "...nicalize', '{}'], ['keep_logits', '{}']]" and after.startswith("... '{}'], ['recompute', ")
    for way in ({}, {"epsilon": 0.3}):
        again = runtime(recompute=("full",) if way else ())
        train_step(decoder(layers=1), rollout, again, **way)
        assert (again.captures, again.loaded) == (0, 1)


def test_what_is_weighed_by_sizes_is_made_for_these(decoder, rollout, runtime: Made) -> None:
    """A larger batch must not run what keeps its budget on a smaller one alone."""

    def fitted(budget_mib: float, max_tokens: int) -> tuple[Runtime, tuple[str, ...]]:
        own = runtime(activation_memory_gib=budget_mib / 1024)
        trainer = Trainer(model := decoder(), OptimizerConfig(), LossConfig(), runtime=own)
        trainer.forward_backward(pack(rollout(model, 0), max_tokens=max_tokens, check_parity=True)[0])
        return own, next(log for title, log in own.builder.logs.items() if title.startswith("forward_backward("))

    def kept_mib(log: tuple[str, ...]) -> tuple[float, float]:
        found = re.search(r"([\d.]+) -> ([\d.]+) MiB kept", log[-1])
        assert found
        return float(found[1]), float(found[2])

    small, large = (kept_mib(fitted(1024, tokens)[1])[0] for tokens in (44, 256))
    budget = (small + large) / 2
    assert small < budget < large and kept_mib(fitted(budget, 44)[1]) == (small, small)
    own, log = fitted(budget, 256)
    assert kept_mib(log)[1] <= budget and own.captures == 1 and own.store is not None
    assert all("sizes." in reason for lookup in own.store.lookups for reason in lookup.reasons)
    for tokens in (44, 256):
        again, _ = fitted(budget, tokens)
        assert (again.captures, again.loaded) == (0, 1)


def test_compiled_regions_are_for_a_number_of_threads(runtime: Made) -> None:
    constants, sizes = {"page_size": 16}, {"T": 5}
    eager, compiled = runtime(), runtime(backend="inductor")
    assert eager.builder.settings(constants, sizes).keys() == {"capture", "backend", "mesh", "constants.page_size"}
    found = compiled.builder.settings(constants, sizes)
    assert found["threads"] == torch.get_num_threads() and found["sizes.T"] == 5
    with torch._inductor.config.patch("cpp.threads", 3):
        assert compiled.builder.settings(constants, sizes)["inductor"] != found["inductor"]


def test_a_dump_shows_every_pass_so_it_is_traced(decoder, rollout, runtime: Made, tmp_path: Path, monkeypatch) -> None:
    train_step(decoder(layers=1), rollout, runtime())
    monkeypatch.setenv("HOME", str(tmp_path))
    dumping = runtime(dump="~/dump")
    train_step(decoder(layers=1), rollout, dumping)
    assert dumping.captures == 1 and list((tmp_path / "dump").iterdir())


def test_code_that_no_hash_covers_is_not_stored(runtime: Made, tmp_path: Path) -> None:
    def body(t: Inputs) -> dict[str, torch.Tensor]:
        return {"y": t.user["x"] * 2}

    runtime().program("f", body, Inputs(), constants={})({"x": torch.ones(3)})
    assert not (tmp_path / "graphs").exists()


def test_a_stored_graph_with_other_bits_is_found_and_captured_anew(decoder, rollout, runtime: Made, caplog) -> None:
    """Its hashes are right, so only the comparison with eager can tell."""
    train_step(decoder(layers=1), rollout, runtime())
    store = runtime().store
    assert store is not None
    (file,) = store.folder.iterdir()
    sections = framed_file.unpack(file.read_bytes())
    wrong = loads(sections["graph"])
    node = next(n for n in wrong.graph.nodes if str(n.target) == "aten.exp.default")
    node.target = torch.ops.aten.expm1.default
    wrong.module.recompile()
    file.write_bytes(framed_file.pack({**sections, "graph": dumps(wrong)}))
    warm, model = runtime(), decoder(layers=1)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), runtime=warm)
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    with caplog.at_level(logging.WARNING, "lockstep.graph"):
        function = trainer.programs.by_name["forward_backward"]
        case = trainer.programs.case(
            "forward_backward",
            "one",
            batch,
            lambda: trainer.flat.grad.zero_(),
            loss_type="grpo",
            with_support=False,
        )
        assert isinstance(case, TrustCase)
        (verdict,) = check_against_eager(warm, [(function, [case])], "strict")
    assert "differs from eager" in caplog.text and "it was a stored graph, and is captured anew" in caplog.text
    assert verdict.faults == () and (warm.loaded, warm.captures) == (1, 1)
    again = runtime()
    train_step(decoder(layers=1), rollout, again)
    assert (again.loaded, again.captures) == (1, 0)  # and the right one was stored


@dataclass(frozen=True)
class LossWithGain(LossConfig):
    gain: float = 1.0


@dataclass(frozen=True)
class UndeclaredGain(GRPO):
    """What a contributor writes who forgets the setting."""

    def loss(self, values: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
        loss_C, clipped_C = super().loss(values)
        return self.gain * loss_C, clipped_C  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class WithGain(UndeclaredGain):
    """What a contributor writes who adds a setting to the loss."""

    gain: float = 1.0


def as_edits_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have code of this file count as the package's."""
    monkeypatch.setattr("lockstep.graph.store.key.is_covered", lambda code: True)
    monkeypatch.setattr("lockstep.cache.loaded_code.find_difference", lambda: None)


def gradient(model: Decoder, rollout: Callable[..., Any], loss: LossConfig, runtime: Runtime) -> torch.Tensor:
    (batch,) = pack(rollout(model, 0), max_tokens=256, check_parity=True)
    trainer = Trainer(model, OptimizerConfig(), loss, runtime=runtime)
    trainer.forward_backward(batch)
    return trainer.flat.grad.clone()


def restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deeper: str, helper: str = "from own_deeper import VALUE\n"
) -> None:
    """What a user's file imports (`own_helper`), and what that imports, as a new process has them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two edits in one second are one to Python
    for name, source in (("own_deeper", deeper), ("own_helper", helper)):
        (folder / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)


def test_a_loss_of_one_s_own_is_traced_at_every_start(
    decoder, rollout, runtime: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    class Own(GRPO):
        def loss(self, values: TokenValues) -> tuple[torch.Tensor, torch.Tensor]:
            loss_C, clipped_C = super().loss(values)
            return importlib.import_module("own_helper").VALUE * loss_C, clipped_C

    monkeypatch.setitem(ALGORITHMS, "grpo", Own)
    found = []
    for gain in (1.0, 5.0):
        restarted(tmp_path, monkeypatch, f"VALUE = {gain}\n")
        found.append(gradient(decoder(layers=1), rollout, LossConfig(), own := runtime()))
        assert torch.equal(found[-1], gradient(decoder(layers=1), rollout, LossConfig(), EAGER))
        assert (own.captures, own.loaded) == (1, 0)
    assert not torch.equal(*found)


def test_an_edited_helper_of_a_mask_is_seen(
    decoder, rollout, runtime: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "mask.py"
    file.write_text("import own_helper\n\n\ndef near(query, key):\n    return query - key < own_helper.VALUE\n")
    found, made = [], []
    for edit in (
        ("VALUE = 3\n",),
        ("VALUE = 9\n",),
        ("VALUE = 9\n", "from own_deeper import VALUE\n\nVALUE = 4\n"),
        ("# a word\nVALUE = 3\n",),
    ):
        restarted(tmp_path, monkeypatch, *edit)
        for name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) == str(file):
                del sys.modules[name]
        graphs, model, eager = runtime(), decoder(layers=1), decoder(layers=1)
        for own in (model, eager):
            set_attention(own, "flex", f"{file}:near")
        found.append(gradient(model, rollout, LossConfig(), graphs))
        made.append((graphs.captures, graphs.loaded))
        assert torch.equal(found[-1], gradient(eager, rollout, LossConfig(), EAGER))
    assert made == [(1, 0), (1, 0), (1, 0), (0, 1)]
    assert torch.equal(found[0], found[3])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found[:3], 2))


def test_a_loss_cannot_read_what_is_not_in_the_key(decoder, rollout, runtime: Made, monkeypatch) -> None:
    as_edits_of_the_package(monkeypatch)
    monkeypatch.setitem(ALGORITHMS, "grpo", UndeclaredGain)
    for own in (EAGER, runtime()):
        with pytest.raises(AttributeError, match="gain"):
            gradient(decoder(layers=1), rollout, LossWithGain(gain=5.0), own)


def test_a_setting_that_a_loss_reads_is_in_the_key(decoder, rollout, runtime: Made, monkeypatch) -> None:
    as_edits_of_the_package(monkeypatch)
    monkeypatch.setitem(ALGORITHMS, "grpo", WithGain)
    for gain in (1.0, 5.0):
        own = runtime()
        found = gradient(decoder(layers=1), rollout, LossWithGain(gain=gain), own)
        assert torch.equal(found, gradient(decoder(layers=1), rollout, LossWithGain(gain=gain), EAGER))
        assert (own.captures, own.loaded) == (1, 0)
    assert own.store is not None
    assert own.store.lookups[0].reasons == ("constants.loss.gain was '1.0' and is '5.0'",)
