"""A model family from outside the package: this file, and one row of a dict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small import CONFIG, compare, generate, load_model, requests, train_groups
from torch import Tensor

from lockstep import ops
from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.errors import InputError
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime, Store
from lockstep.models import Decoder, ModelConfig, save_model, select_by_pattern
from lockstep.models.blocks.attention import Attend
from lockstep.models.blocks.layer import Layer
from lockstep.models.blocks.moe import Routing
from lockstep.models.blocks.weight_slices import LayerSlice, attention_slices, feed_forward_slices
from lockstep.models.families import FAMILIES, Family, Raw, require_family
from lockstep.models.init import architecture, initialize


class SideBySideLayer(Layer):
    """Attention and feed-forward read the same normalized stream (GPT-J), and a doubled one is added."""

    def forward(
        self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        gated_TF = ops.norm_gate_up(x_TD, self.attention_norm, self.gate_up, self.config.rms_norm_eps)
        fed_TD = ops.linear_add(gated_TF, self.down, 2 * x_TD)
        return ops.linear_add(
            self.attention(index, x_TD, rope_TH, attend), self.o, ops.rms_norm(fed_TD, self.mlp_norm, 1e-6)
        )


def slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    yield LayerSlice("ln_in.weight", "attention_norm", 0, config.hidden_size)
    yield LayerSlice("ln_out.weight", "mlp_norm", 0, config.hidden_size)
    yield from attention_slices(config)
    yield from feed_forward_slices(config, index)


def read(raw: Raw) -> dict[str, Any]:
    raw.refuse(raw.values.get("toys") != 3, f"toys is {raw.values.get('toys')!r}; it must be 3")
    return {"biases": ("qkv",)}


TOY = Family("ToyForCausalLM", SideBySideLayer, slices, read=read, write=lambda config: {"toys": 3})


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    made = initialize(Decoder(replace(CONFIG, family="toy", biases=("qkv",)), torch.float32), 0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    return made


def test_a_folder_of_it_comes_back(model: Decoder, tmp_path: Path) -> None:
    save_model(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.layers.1.ln_out.weight", "model.layers.0.self_attn.q_proj.bias"} < names
    again = load_model(tmp_path, torch.float32)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert select_by_pattern(model, [("*.ln_in", 1)], "x") == {f"layers.{i}.attention_norm": 1 for i in range(2)}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"toys": 4}))
    with pytest.raises(InputError, match=r"config\.json: toys is 4; it must be 3"):
        load_model(tmp_path, torch.float32)


def test_its_layers_are_traced_at_every_start(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hash covers their code; of a family whose layers are the package's, graphs are known by its numbers."""

    def start() -> tuple[int, int]:
        runtime = Runtime(CompileConfig("step"), torch.device("cpu"), store=Store(tmp_path))
        again = Decoder(model.config, torch.float32)
        again.load_state_dict(model.state_dict())
        generate(Engine(SharedWeights(again), GeneratorConfig(), 4096, runtime=runtime), *requests(1, length=2))
        return runtime.captures, runtime.loaded

    assert [start(), start()] == [(2, 0)] * 2
    of_ours = {scale: replace(TOY, layer=Layer, embedding_scale=lambda _, scale=scale: scale) for scale in (1.0, 2.0)}
    found = []
    for scale in (1.0, 1.0, 2.0):
        monkeypatch.setitem(FAMILIES, "toy", of_ours[scale])
        found.append(start())
    assert found == [(2, 0), (0, 2), (2, 0)]


def test_both_roles_compute_its_bits_in_graphs(model: Decoder) -> None:
    runtime = Runtime(CompileConfig("step"), torch.device("cpu"))
    engine = Engine(SharedWeights(model), GeneratorConfig(), 4096, runtime=runtime)
    prompts, sampling = requests(3, length=8)
    groups = train_groups(prompts, sampling, generate(engine, prompts, sampling))
    result = compare(model, groups)
    assert result.tokens_different == 0 < result.tokens_checked
    plain = initialize(Decoder(replace(model.config, family=CONFIG.family), torch.float32), 0)
    assert compare(plain, groups).tokens_different > 0


def more(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    yield from slices(config, index)
    yield LayerSlice("gate.weight", "gate", 0, 1)


def less(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    yield from (piece for piece in slices(config, index) if piece.parameter != "mlp_norm")


def shifted(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    for piece in slices(config, index):
        yield piece._replace(start=1) if piece.name.startswith("self_attn.k_proj.w") else piece


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (more, "name layers.0.gate, which the model does not have"),
        (less, r"have 0 of the \d+ rows of layers.0.mlp_norm, and must have all"),
        (
            shifted,
            r"have model.layers.0.self_attn.\w_proj.weight begin at row \d+ of layers.0.qkv; the rows before end at",
        ),
    ],
)
def test_slices_that_would_lose_weights_are_refused_before_a_model_is_made_or_read(
    wrong: Any, message: str, model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(model, tmp_path)
    monkeypatch.setitem(FAMILIES, "toy", replace(TOY, slices=wrong))
    with pytest.raises(InputError, match=f"family toy: Family.slices {message}"):
        initialize(model, 0)
    with pytest.raises(InputError, match=f"family toy: Family.slices {message}"):
        load_model(tmp_path, torch.float32)


def test_a_folder_of_no_family_is_compared_with_one_from_outside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for family in (TOY, replace(TOY, architectures={"tiny-toy": CONFIG})):
        monkeypatch.setitem(FAMILIES, "toy", family)
        with pytest.raises(InputError, match=r"model_type is 'to'; supported: .*, toy; the nearest .* is toy"):
            require_family({"model_type": "to"}, "config.json")


def test_its_random_models_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, family="toy")
    monkeypatch.setitem(FAMILIES, "toy", replace(TOY, architectures={"tiny-toy": config}))
    assert architecture("tiny-toy") is config
