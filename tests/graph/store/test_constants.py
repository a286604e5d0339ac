"""A stored graph is found by every number that it holds: whichever field of a configuration changes, a graph that
changes with it changes its key, too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Apart, completed, train_group

from lockstep import ops
from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.distributed.mesh import Axis, Mesh
from lockstep.distributed.placement import Placement
from lockstep.errors import LockstepError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Inputs, Program, Runtime, digest
from lockstep.graph.capture.request import Request
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.graph.store.baked_constants import flatten
from lockstep.graph.store.key import key_of
from lockstep.models import Decoder, Masks, ModelConfig
from lockstep.models.blocks.rope import RopeScaling, YarnScaling
from lockstep.models.config import MLAConfig, MoEConfig
from lockstep.models.init import initialize
from lockstep.trainer import Trainer, pack
from lockstep.trainer.programs import TrainerPrograms
from lockstep.types import SamplingParams

DENSE = ModelConfig(64, 16, 16, 1, 2, 2, 8, rope_theta=1e4, max_position_embeddings=256, family="qwen3")
ROUTED = MoEConfig(4, 1, 16, sigmoid=True, groups=2, shared_experts=1, router_bias=True)
YARN = YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5)
LATENT = replace(DENSE, family="deepseek_v3", num_kv_heads=1, moe=ROUTED, mla=MLAConfig(16, 8, 8, 8), rope_scaling=YARN)
SOFTMAX = replace(DENSE, family="qwen3_moe", moe=MoEConfig(4, 2, 16), rope_scaling=RopeScaling("llama3", 4.0))
NOT_IN_THE_GRAPH = {  # and so not in its key, or every change of them would trace anew
    *("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.lr_scheduler", "loss.scale_rewards"),
    *("loss.overlong_buffer", "loss.overlong_penalty", "loss.mask_truncated_completions"),
    *("loss.dynamic_sampling", "loss.max_num_gen_batches", "loss.normalize_advantages"),
}
PATTERNS = {"freeze": "model.norm", "lr_scales": "model.norm=0.5", "weight_decays": "model.norm=0.5"}
OTHER = {"qwen3": "llama", "qwen3_moe": "llama", "deepseek_v3": "qwen3", "llama3": "linear", "none": "group"} | {
    "grpo": "dapo",
    "constant": "linear",
    "token": "sequence",
    "k3": "k2",
}

LOSS, ADAMW = LossConfig(beta=0.1, epsilon=0.2), OptimizerConfig()
WANTED = ("forward_backward", "optim_step")


@dataclass(frozen=True)
class Key:
    """The file that a graph is kept in, and the graph, which is traced when its digest is asked for."""

    file: str
    function: Program
    user: Mapping[str, torch.Tensor]
    statics: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        return digest(self.function.graph(self.user, self.statics).captured)


def key_of_call(function: Program, user: Mapping[str, torch.Tensor], **statics: Any) -> Key:
    """Of the graph that a call would launch."""
    request = replace(function.request(replace(function.inputs, user=user), statics), dynamic={})
    assert function.constants is not None
    settings = function.tools.builder.settings(function.constants, {})
    key = key_of(request, "captured", settings, [])
    function.one_shape = True
    assert key is not None, f"{function.name} is not stored"
    return Key(key.file, function, user, statics)


def traced(
    model: ModelConfig = DENSE,
    loss: LossConfig = LOSS,
    optimizer: OptimizerConfig = ADAMW,
    enforce_parity: bool = True,
    wanted: tuple[str, ...] = WANTED,
    masks: Masks | None = None,
) -> dict[str, Key]:
    """A trainer's graphs."""
    runtime = Runtime(CompileConfig("step", canonicalize=False), torch.device("cpu"))
    decoders = [initialize(Decoder(model, torch.float32), seed) for seed in range(2)]
    for decoder in decoders:
        decoder.masks = masks
    reference = decoders[1] if loss.beta else None
    trainer = Trainer(decoders[0], optimizer, loss, reference=reference, enforce_parity=enforce_parity, runtime=runtime)
    sequence = completed([3, 4], 1.0, 0.1, [0.0] * 2, [0.0] * 2, route_digests=[1, 2] if model.moe else None)
    (batch,) = pack([train_group([1, 2], [sequence], SamplingParams())], max_tokens=64, check_parity=True)
    batch.ref_logprob_C = torch.zeros_like(batch.old_logprob_C)
    if trainer.algorithm.indexes_sequences:
        batch.index_sequences()
    case = trainer.programs.case("check", "", batch, lambda: None)
    statics = {"forward_backward": {"loss_type": loss.loss_type, "with_support": False} | dict(case.statics)}
    statics |= {"check": dict(case.statics), "reference_logprobs": dict(case.statics), "optim_step": {}}
    functions = trainer.programs.by_name
    return {
        name: key_of_call(functions[name], {} if name == "optim_step" else case.user, **statics[name])
        for name in wanted
    }


def decoded(
    model: ModelConfig = DENSE,
    page_size: int = 16,
    cache_tokens: int = 256,
    context: int = 64,
    masks: Masks | None = None,
) -> dict[str, Key]:
    """A generator's graphs."""
    runtime = Runtime(CompileConfig("step", canonicalize=False), torch.device("cpu"))
    config = GeneratorConfig(page_size=page_size, max_num_seqs=2, max_num_batched_tokens=128)
    decoder = initialize(Decoder(model, torch.float32), 0)
    decoder.masks = masks
    weights = SharedWeights(decoder)
    Engine(weights, config, cache_tokens, runtime=runtime).warm_up(1, context, SamplingParams())
    return {f.name: key_of_call(f, {}, **s) for f in runtime.programs for s in [statics_of(f)]}


def statics_of(function: Program) -> dict[str, Any]:
    (graph,) = function.graphs.values()
    return dict(graph.captured.statics)


def variants(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """For each field of a dataclass, and of those within, the whole with that field changed; not those it refuses."""
    for f in fields(value):
        inner, here = getattr(value, f.name), f"{path}.{f.name}"
        changes = variants(inner, here) if is_dataclass(inner) else [(here, changed(inner, f.name))]
        for name, other in changes:
            try:
                yield name, replace(value, **{f.name: other})
            except LockstepError:
                continue


def changed(value: Any, name: str) -> Any:
    """Another value that is as good."""
    if name == "importance_sampling_mode":
        return "token_mask"
    if name in ("epsilon_high", "mscale", "attention_factor"):
        return 0.7
    if name in PATTERNS:
        return (PATTERNS[name],)
    if name in ("eos_token_ids", "dense_layers", "sliding_layers", "unrotated_layers"):
        return (0,)
    if name == "biases" and isinstance(value, tuple):
        return ("qkv",)
    if value is None or isinstance(value, str):
        return OTHER.get(value) if value else None  # type: ignore[arg-type]
    if isinstance(value, bool):
        return not value
    return value * 2 if isinstance(value, int) else value * 0.5 or 0.5


def compare(base: dict[str, Key], now: dict[str, Key], what: str) -> None:
    """A graph that changed must have another key."""
    for name in now.keys() & base.keys():
        same = now[name].file == base[name].file
        if same:
            in_the_graph = f"{name}: {what} is in the graph, and not among the constants it declares"
            assert now[name].digest == base[name].digest, in_the_graph


def changes(base: dict[str, Key], now: dict[str, Key], what: str) -> bool:
    """Whether any graph changed, with what `compare` holds against that."""
    compare(base, now, what)
    return any(now[name].digest != base[name].digest for name in now.keys() & base.keys())


@pytest.mark.parametrize(
    ("model", "in_the_graph"),
    [
        (LATENT, {"rms_norm_eps", "rope_scaling.attention_factor", "moe.scale", "moe.kept_groups", "moe.normalize"}),
        (SOFTMAX, {"rms_norm_eps", "moe.num_experts_per_token", "moe.sigmoid", "num_heads"}),
    ],
    ids=["latent", "softmax"],
)
def test_every_field_of_a_model(model: ModelConfig, in_the_graph: set[str]) -> None:
    def graphs(model: ModelConfig) -> dict[str, Key]:
        return traced(model, LossConfig(), wanted=("check",))

    base, seen = graphs(model), set()
    for what, other in variants(model, "model"):
        if what == "model.family":
            continue
        try:
            now = graphs(other)
        except (LockstepError, RuntimeError, AssertionError):
            continue  # not a model
        compare(base, now, what)
        name = what.removeprefix("model.")
        seen.add(name)
        assert name not in in_the_graph or changes(base, now, what)
    assert seen >= in_the_graph


def test_every_field_of_the_loss_and_the_optimizer() -> None:
    elsewhere = {"loss.router_aux_loss_coef", "optimizer.router_bias_rate", *NOT_IN_THE_GRAPH}
    base, seen = traced(), set()
    for what, other in variants(LOSS, "loss"):
        if what not in elsewhere and changes(base, traced(loss=other, wanted=WANTED[:1]), what):
            seen.add(what)
    for what, other in variants(ADAMW, "optimizer"):
        if what not in elsewhere and changes(base, traced(optimizer=other, wanted=WANTED[1:]), what):
            seen.add(what)
    assert changes(base, traced(enforce_parity=False), "enforce_parity")
    assert seen == {
        *("loss.loss_type", "loss.epsilon", "loss.epsilon_high", "loss.beta", "optimizer.beta1", "optimizer.beta2"),
        *("optimizer.epsilon", "optimizer.weight_decay", "optimizer.max_grad_norm", "optimizer.offload"),
        *(f"optimizer.{name}" for name in PATTERNS),
        *(
            "loss.use_bias_correction_kl",
            "loss.importance_sampling_level",
            "loss.kl_estimator",
            "loss.use_kl_in_reward",
        ),
        "loss.importance_sampling_mode",
    }


def test_what_is_in_no_graph_is_in_no_key() -> None:
    """Each alone leaves the keys as they are, and all together the graphs."""
    base, together = traced(), dict[str, dict[str, Any]]()
    for section, config in {"loss": LOSS, "optimizer": ADAMW}.items():
        apart = {what: other for what, other in variants(config, section) if what in NOT_IN_THE_GRAPH}
        names = [what.partition(".")[2] for what in apart]
        together[section] = replace(config, **{name: getattr(apart[f"{section}.{name}"], name) for name in names})
        for what, other in apart.items():
            now = traced(**{section: other})
            assert all(now[name].file == base[name].file for name in base), f"a change of {what} traces anew"
    now = traced(**together)
    for name in base:
        assert now[name].file == base[name].file and now[name].digest == base[name].digest, name


def test_what_experts_add_to_the_loss_and_the_update() -> None:
    for model, loss, optimizer in (
        (SOFTMAX, LossConfig(router_aux_loss_coef=0.1), OptimizerConfig()),
        (LATENT, LossConfig(), OptimizerConfig(router_bias_rate=0.1)),
    ):
        other = replace(loss, router_aux_loss_coef=loss.router_aux_loss_coef / 2)
        rate = replace(optimizer, router_bias_rate=optimizer.router_bias_rate / 2)
        base = traced(model, loss, optimizer)
        assert changes(base, traced(model, other, rate), "of the experts")


def test_every_number_of_the_generator() -> None:
    base = decoded()
    assert changes(base, decoded(replace(DENSE, rms_norm_eps=1e-5)), "model.rms_norm_eps")
    assert changes(base, decoded(page_size=32, cache_tokens=512), "page_size")
    assert changes(base, decoded(cache_tokens=512), "null_page")
    assert changes(base, decoded(context=200), "max_context")


def test_windows_and_masks() -> None:
    ops.register_mask("some", lambda query, key: key >= 0)
    none = (0,) * DENSE.num_layers
    for graphs in (traced, decoded):
        base, before = graphs(), None
        for masks in (Masks(none), Masks((7, *none[1:])), Masks(none, "some")):
            now = graphs(masks=masks)
            assert changes(base, now, "masks") and (before is None or changes(before, now, "masks"))
            before = now


def gathered() -> dict[str, Key]:
    """What brings a model's weights up to date on two ranks that share its products."""
    world = Apart(0, 2, 10.0, tp=2)
    runtime = Runtime(CompileConfig("step", canonicalize=False), torch.device("cpu"), mesh=world.sizes)
    decoder = initialize(Decoder(DENSE, torch.float32), 0)
    trainer = Trainer(decoder, ADAMW, LossConfig(), runtime=runtime, world=world)
    return {"gather_weights": key_of_call(trainer.programs.by_name["gather_weights"], {})}


def test_how_parameters_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which nothing else tells of them: all have the shapes that they had."""

    def of_two(tp: int, blocks: tuple[int, ...]) -> Placement:
        return Placement(tp=tp, blocks=(blocks[0], sum(blocks[1:])))

    base = gathered()
    monkeypatch.setattr("lockstep.models.blocks.layer.Placement", of_two)
    assert changes(base, gathered(), "blocks of a placement")


def test_a_number_that_is_not_declared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = TrainerPrograms.constants

    def without_epsilon(programs: TrainerPrograms) -> dict[str, Any]:
        found = declared(programs)
        loss = {k: v for k, v in asdict(found["forward_backward"]["loss"]).items() if k != "epsilon"}
        return {**found, "forward_backward": {**found["forward_backward"], "loss": loss}}

    monkeypatch.setattr(TrainerPrograms, "constants", without_epsilon)
    base, now = (traced(loss=LossConfig(epsilon=e), wanted=WANTED[:1]) for e in (0.2, 0.3))
    with pytest.raises(AssertionError, match="forward_backward: loss.epsilon is in the graph, and not among the const"):
        compare(base, now, "loss.epsilon")


def test_constants_are_flat_and_only_what_json_holds() -> None:
    found = flatten({"model": replace(SOFTMAX, eos_token_ids=(1, 2)), "page_size": 16, "high": float("inf")})
    assert found["model.moe.scale"] == "1.0" and found["model.eos_token_ids"] == [1, 2] and found["high"] == "inf"
    assert found["model.rope_scaling"] == "RopeScaling" and found["model.mla"] is None and found["page_size"] == 16
    assert flatten({"spans": ((0, 8), (16, 24)), "of": [int, ROUTED.__class__]}) == {
        "spans": [[0, 8], [16, 24]],
        "of": ["builtins.int", "lockstep.models.config.MoEConfig"],
    }
    with pytest.raises(TypeError, match="constant loss.f is <built-in function abs>; it must be a number"):
        flatten({"loss": {"f": abs}})
    program = Runtime(CompileConfig("step"), torch.device("cpu")).program(
        "f", lambda t: {"y": t.user["x"] * 2}, Inputs(), constants={"f": abs}
    )
    with pytest.raises(TypeError, match=r"constant constants\.f is <built-in function abs>"):
        program({"x": torch.ones(2)})


def test_a_graph_is_of_inputs_with_or_without_gradients() -> None:
    def file(requires_grad: bool) -> str:
        inputs = Inputs(param={"x": torch.ones(3, requires_grad=requires_grad)})
        key = key_of(Request("f", fingerprint, inputs, {}), "captured", {}, [])
        assert key is not None
        return key.file

    assert file(False) == file(False) != file(True)


@pytest.mark.parametrize("name", ["a.py", "ops/b.c", "ops/c.h", "d.json"])
def test_every_source_of_the_package_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = importlib.import_module("lockstep.cache.fingerprint")
    monkeypatch.setattr(origin.loaded_code, "PACKAGE", tmp_path)
    (tmp_path / "ops").mkdir()
    hashes = []
    for text in ("one", "other"):
        (tmp_path / name).write_text(text)
        hashes.append(origin.sources.__wrapped__())
    (tmp_path / name).rename(tmp_path / f"z{Path(name).suffix}")
    assert len({*hashes, linked := origin.sources.__wrapped__()}) == 3
    (tmp_path / "ops").rename(tmp_path.with_name(f"{tmp_path.name} beside"))
    (tmp_path / "ops").symlink_to(tmp_path.with_name(f"{tmp_path.name} beside"))
    assert origin.sources.__wrapped__() == linked, "a folder that is a link counts as well"


def test_how_words_come_from_other_ranks_is_in_the_key() -> None:
    def key(rank: int, pushes: bool) -> dict[str, Any]:
        mesh = Mesh(tp=Axis("generator_tp", 2, rank, pushes))
        return flatten(Decoder(DENSE, torch.float32, "meta", mesh).trace_constants())

    assert key(0, True) == key(1, True) != key(0, False) == key(1, False)


def test_a_graph_of_a_process_own_part_is_of_its_constants() -> None:
    """And so are the graphs that other processes made."""
    runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
    runtime.builder.own_part = made = {}
    for factor in (2, 3, 3):
        program = runtime.program("f", lambda t: {"sum": t.user["x"] + 1}, Inputs(), constants={"factor": factor})
        program.graph({"x": torch.ones(3)}, {})
    assert len(made) == runtime.captures == 2
