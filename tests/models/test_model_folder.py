"""The decoder against `transformers`, and folders in and out."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save, save_file
from small import load_model

from lockstep import ops
from lockstep.cache import tensor_file
from lockstep.cache.tokenizers import CachedTokenizer
from lockstep.errors import InputError, LockstepError
from lockstep.models import (
    Decoder,
    PackedAttention,
    describe_folder,
    num_parameters,
    resolve_folder,
    save_model,
)
from lockstep.models.hf.export import Export
from lockstep.models.hf.folder import read_config
from lockstep.models.hf.weight_map import weight_map
from lockstep.models.init import ARCHITECTURES, init_folder, initialize
from lockstep.models.parts import TensorRange, ranges_of

transformers = pytest.importorskip("transformers")

GQA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
ODD = {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
WIDE = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_attention_heads": 4}
ODD_MLA = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "num_attention_heads": 3,
}
DEEP_EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
LOW_RANK = MLA | DEEP_EXPERTS | {"hidden_size": 64, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}
ODD_RANK = ODD_MLA | DEEP_EXPERTS | {"hidden_size": 40, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
QWEN3, LLAMA, QWEN3_MOE = transformers.Qwen3Config, transformers.LlamaConfig, transformers.Qwen3MoeConfig
DEEPSEEK = transformers.DeepseekV3Config
MODELS = {
    "qwen3, gqa, tied": (QWEN3, GQA, {"tie_word_embeddings": True}),
    "qwen3, odd heads, yarn": (QWEN3, ODD, {"tie_word_embeddings": False, "rope_parameters": YARN_ROPE}),
    "qwen3, wide head": (QWEN3, WIDE, {"tie_word_embeddings": False}),
    "qwen3, a window in some layers": (
        QWEN3,
        GQA,
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3, windows by layer": (
        QWEN3,
        ODD,
        {
            "use_sliding_window": True,
            "sliding_window": 70,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, no layer for its window": (QWEN3, GQA, {"use_sliding_window": True, "sliding_window": 20}),
    "qwen3_moe, a window": (QWEN3_MOE, GQA | EXPERTS, {"use_sliding_window": True, "sliding_window": 20}),
    "llama, gqa, tied, scaled": (LLAMA, GQA, {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "llama, odd heads": (LLAMA, ODD | {"hidden_size": 48}, {"tie_word_embeddings": False}),
    "llama, wide head, linear": (LLAMA, WIDE, {"tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE}),
    "qwen3_moe, gqa, tied": (QWEN3_MOE, GQA | EXPERTS, {"tie_word_embeddings": True, "norm_topk_prob": True}),
    "qwen3_moe, odd heads, a dense layer": (QWEN3_MOE, ODD | EXPERTS, {"mlp_only_layers": [1]}),
    "qwen3_moe, wide head, every other layer": (QWEN3_MOE, WIDE | EXPERTS, {"decoder_sparse_step": 2}),
    "deepseek_v3, group limits, interleaved": (DEEPSEEK, LOW_RANK, {"n_shared_experts": 1}),
    "deepseek_v3, one group, queries at once, halves": (
        DEEPSEEK,
        ODD_RANK,
        {"n_shared_experts": 2, "rope_interleave": False, "tie_word_embeddings": True, "norm_topk_prob": False},
    ),
    "deepseek_v3, yarn on scores": (
        DEEPSEEK,
        LOW_RANK,
        {"n_shared_experts": 2, "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16}},
    ),
    "deepseek_v3, yarn on rotations, odd": (
        DEEPSEEK,
        ODD_RANK | {"q_lora_rank": 12, "first_k_dense_replace": 0},
        {"rope_parameters": YARN_ROPE | {"truncate": False}},
    ),
}


def hf_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    make, sizes, more = MODELS[name]
    config = make(
        vocab_size=211,
        intermediate_size=100,
        num_hidden_layers=3,
        max_position_embeddings=256,
        rope_theta=10000.0,
        eos_token_id=3,
        **sizes,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    return model


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Plain float32 logits of one sequence."""
    length = len(tokens)
    zero = torch.zeros(1, dtype=torch.int32)
    attend = PackedAttention(ops.Packed(torch.tensor([0, length], dtype=torch.int32), zero, zero, length), model.masks)
    with torch.no_grad():
        return model(tokens, torch.arange(length), attend).float() @ model.lm_head.float().t()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_model("qwen3, gqa, tied").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard", ["100KB", "5GB"])
def test_logits_agree_with_transformers(name: str, shard: str, tmp_path: Path) -> None:
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "100KB")
    tokens = torch.randint(0, 211, (150,))
    expected = theirs(tokens[None]).logits[0]
    ours = logits(load_model(tmp_path, torch.float32), tokens)
    assert expected.abs().max() > 1
    assert (ours - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard_bytes", [50_000, 10**9])
def test_round_trip_keeps_every_bit(name: str, dtype: torch.dtype, shard_bytes: int, tmp_path: Path) -> None:
    theirs = hf_model(name).to(dtype)
    theirs.save_pretrained(tmp_path / "in")
    save_model(load_model(tmp_path / "in", dtype), tmp_path / "out", shard_bytes)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert again.config.tie_word_embeddings == theirs.config.tie_word_embeddings
    state = theirs.state_dict()
    assert state.keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    assert read_config(tmp_path / "in") == read_config(tmp_path / "out")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id in (3, [3])


def third(values: torch.Tensor, rank: int) -> list[TensorRange]:
    """A rank's of three, itself in two ranges."""
    size = -(-values.numel() // 3)
    first, end = (min(at * size, values.numel()) for at in (rank, rank + 1))
    middle = (first + end) // 2
    return [TensorRange(values[first:middle], first), TensorRange(values[middle:end], middle)]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith("tiny")])
def test_ranges_of_any_processes_are_the_bytes_of_the_library(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes, each with a third of every tensor, cut anywhere; heads and experts lie across the cuts."""
    model = initialize(Decoder(ARCHITECTURES[name], torch.bfloat16), 0)
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 5000)
    exports = [Export(model, tmp_path / "three", 200_000) for _ in range(3)]
    exports[0].create_files()
    for rank, export in enumerate(exports):
        export.write({name: third(values, rank) for name, ((values, _),) in ranges_of(model).items()})
    for export in exports:
        export.convert_layouts()
    monkeypatch.setattr(tensor_file.OpenTensorFile, "read", None)  # what is held whole is written once
    save_model(model, tmp_path / "one", 200_000)
    tensors = {n: p.detach() for n, p in model.named_parameters()} | dict(model.named_buffers())
    pieces = {piece.name: piece.to_hf(piece.rows_of(tensors)).contiguous() for piece in weight_map(model.config)}
    for path in (tmp_path / "one").iterdir():
        written = path.read_bytes()
        assert written == (tmp_path / "three" / path.name).read_bytes(), path.name
        if path.suffix == ".safetensors":
            names = load_file(path).keys()
            assert written == save({name: pieces.pop(name) for name in names}, {"format": "pt"}), path.name
    assert not pieces


def test_experts_load_from_either_layout(tmp_path: Path) -> None:
    theirs = hf_model("qwen3_moe, gqa, tied")
    theirs.save_pretrained(tmp_path)
    apart = load_model(tmp_path, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if ".experts." not in name}
    together = {f"model.{n}": p.detach() for n, p in theirs.model.named_parameters() if ".experts." in n}
    assert len(kept) < len(tensors) and len(together) == 6
    save_file(kept | together, tmp_path / "model.safetensors")
    again = load_model(tmp_path, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(apart.parameters(), again.parameters(), strict=True))
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"72 tensors are missing, first model\.layers\.0\.mlp\.experts\.0\.gate_proj"):
        load_model(tmp_path, torch.float32)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    hf_model("deepseek_v3, group limits, interleaved").save_pretrained(tmp_path)
    plain = load_model(tmp_path, torch.float32)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    further = {name.replace("layers.2", "layers.3"): t + 1 for name, t in tensors.items() if "layers.2" in name}
    save_file(tensors | further | {"model.layers.3.eh_proj.weight": torch.ones(2)}, weights)
    edit(tmp_path / "config.json", num_nextn_predict_layers=1)
    again = load_model(tmp_path, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    save_file(tensors | {"model.layers.2.self_attn.extra.weight": torch.ones(2)}, weights)
    with pytest.raises(InputError, match=r"model\.layers\.2\.self_attn\.extra\.weight has no place"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is None; it must be an integer"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0; it must be an integer above 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1; it must be an integer, 0 or above"),
        ({"n_group": 3}, "8 experts in 3 groups"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}},
            "original_max_position_embeddings of the yarn",
        ),
    ],
)
def test_unusable_latent_configurations_are_named(changes: dict, message: str, tmp_path: Path) -> None:
    hf_model("deepseek_v3, group limits, interleaved").config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(InputError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name.startswith("tiny")])
def test_parameters_are_counted_right(name: str) -> None:
    config = ARCHITECTURES[name]
    parameters = dict(Decoder(config, torch.float32).named_parameters())
    pieces = [piece.rows_of(parameters) for piece in weight_map(config) if piece.parameter in parameters]
    assert num_parameters(config) == sum(rows.numel() for rows in pieces) > 1e5


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_broken_folders_are_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"model\.safetensors: not a whole safetensors file"):
        load_model(folder, torch.float32)

    weights.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors: missing"):
        load_model(folder, torch.float32)

    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}, weights)
    with pytest.raises(InputError, match=r"1 tensors are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32)

    save_file(tensors | {"model.norm.weight": torch.ones(65)}, weights)
    with pytest.raises(InputError, match=r"model\.norm\.weight has shape \[65\]; config\.json asks for \[64\]"):
        load_model(folder, torch.float32)


OLMO3, GEMMA3 = {"model_type": "olmo3"}, {"model_type": "gemma3_text"}
SMOLLM3, OLMOE = {"model_type": "smollm3"}, {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2}
GLM4 = {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _by_kind(full: object, sliding: object = None) -> dict[str, object]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope_type is 'longrope'"),
        ({"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; it must be true or false"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor of the linear rope scaling is 0"),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({"rope_parameters": YARN_ROPE | {"truncate": "false"}}, "truncate of the yarn rope scaling is 'false'"),
        ({"rope_parameters": YARN_ROPE | {"factor": 10**400}}, "factor of the yarn rope scaling is 1000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types has 2 entries; there are 3 layers"),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "and use_sliding_window is not true"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types is ['full_attention', 'linear"),
        ({"layer_types": 5}, "layer_types is 5; it must be a list of 'full_attention' or 'sliding_attention'"),
        (
            {"model_type": "llama", "layer_types": ["sliding_attention"] * 3},
            "it must be a list of 'full_attention'; other kinds are not supported",
        ),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3, "sliding_window": None},
            "sliding_window is None; it must be an integer",
        ),
        ({"max_window_layers": -1}, "max_window_layers is -1; it must be an integer, 0 or above"),
        ({"sliding_window": "x"}, "sliding_window is 'x'; it must be an integer above 0"),
        ({"quantization_config": {"a": 1}}, "quantization_config is {'a': 1}; it must be left out"),
        ({"eos_token_id": 99999}, "config.json: eos_token_id is 99999, outside the model's vocabulary of 211"),
        ({"eos_token_id": [3, -1]}, "eos_token_id is -1, outside"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is too large; it must be at most 10,000"),
        ({"hidden_size": 10**400}, "hidden_size is too large"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "num_experts is too large; it must be at most 100,000"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["1"]}, "mlp_only_layers is ['1']; it must be a list"),
        (OLMO3 | _by_kind(YARN_ROPE | {"truncate": False}), "(config.json: rope_parameters.full_attention.truncate)"),
        (OLMO3 | _by_kind({}, {"type": "linear", "factor": 4.0}), "rope_type of sliding_attention is 'linear'"),
        (OLMO3 | _by_kind({}, {"rope_theta": "x"}), "rope_theta of sliding_attention is 'x'; it must be a number"),
        (OLMO3 | _by_kind(5), "config.json: rope_parameters.full_attention is 5; it must be an object"),
        (
            GEMMA3 | {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
            "the rope scaling of full_attention has type 'linear', which transformers does not read beside rope_type",
        ),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "config.json: no_rope_layers has 2 entries; there are 3 layers"),
        (SMOLLM3 | {"no_rope_layers": [1, 0, 2]}, "no_rope_layers is [1, 0, 2]; it must be a list of 1 (with rotary"),
        (SMOLLM3 | {"no_rope_layers": 4}, "config.json: no_rope_layers is 4; it must be a list of 1"),
        (SMOLLM3 | {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be an integer above 0"),
        (SMOLLM3 | {"attention_bias": "no"}, "config.json: attention_bias is 'no'; it must be true or false"),
        (
            SMOLLM3 | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 3, "sliding_window": None},
            "sliding_window is None; it must be an integer",
        ),
        (OLMOE | {"sliding_window": 64}, "config.json: sliding_window is 64; it must be left out"),
        (OLMOE | {"head_dim": 20}, "head_dim is 20; the 4 heads of an olmoe must be as wide together as the hidden"),
        (GLM4 | {"n_group": 5}, "(config.json: n_group, topk_group)"),
        (GLM4 | {"num_experts_per_tok": 99}, "of 8 eligible experts (config.json: num_experts_per_tok)"),
        ({"num_key_value_heads": 3}, "(config.json: num_attention_heads, num_key_value_heads)"),
    ],
)
def test_unusable_configurations_are_named(folder: Path, changes: dict, message: str) -> None:
    edit(folder / "config.json", **changes)
    with pytest.raises(InputError, match=re.escape(message)):
        read_config(folder)


@pytest.mark.parametrize("changes", [OLMO3, GEMMA3])
def test_a_family_is_not_sent_to_itself(folder: Path, changes: dict) -> None:
    edit(folder / "config.json", **changes, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(InputError, match="rope_parameters has rope_theta for all layers; .* have their own here$"):
        read_config(folder)


def test_fields_that_change_nothing_are_let_pass(folder: Path) -> None:
    before = read_config(folder)
    edit(folder / "config.json", layer_types=["full_attention"] * 3, sliding_window=4096, quantization_config=None)
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_config(folder) == before


def test_token_0_is_a_token(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", bos_token_id=0, pad_token_id=0)
    edit(folder / "generation_config.json", eos_token_id=0)
    config = read_config(folder)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_ids) == (0, 0, (3, 0))
    save_model(load_model(folder, torch.float32), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["bos_token_id"] == written["pad_token_id"] == 0 and written["eos_token_id"] == [3, 0]


def test_an_end_of_sequence_outside_the_vocabulary_is_named_with_its_file(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[3, 211])
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id is 211, outside"):
        read_config(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_weights_that_are_not_finite_are_named(folder: Path, value: float) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, weights)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj\.weight has values that are NaN or infinite as"):
        load_model(folder, torch.float16)


def test_what_cannot_be_written_is_named(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, torch.float32)
    with pytest.raises(LockstepError, match=r"config\.json/x: the folder cannot be made \(Not a directory\)"):
        save_model(model, folder / "config.json" / "x")
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(LockstepError, match=r"out/model\.safetensors: cannot be written"):
        save_model(model, tmp_path / "out")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        with pytest.raises(LockstepError, match=r"full/model\.safetensors: cannot be written \(File too large\)"):
            save_model(model, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with pytest.raises(InputError, match=r"config\.json/x: the folder cannot be made"):
        init_folder("tiny", folder / "config.json" / "x", seed=0)


@pytest.mark.parametrize(("limit", "file"), [(0, "config.json"), (100, "config.json"), (100_000, "model.safetensors")])
def test_a_disk_that_fills_up_during_init_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, file: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))  # the tokenizer is not there yet
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(LockstepError, match=f"out/{file}: cannot be written .File too large.$"):
            init_folder("tiny", tmp_path / "out", seed=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "out").iterdir())
    init_folder("tiny", tmp_path / "out", seed=0)


def test_a_model_without_its_tokenizer_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object, folder: Path) -> None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text("{%")
        raise OSError(28, "No space left on device")

    for kind in (CachedTokenizer, transformers.PreTrainedTokenizerFast):
        monkeypatch.setattr(kind, "save_pretrained", full)
    with pytest.raises(LockstepError, match="out: the tokenizer cannot be written .*No space left"):
        init_folder("tiny", tmp_path / "out", seed=0)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("has_critic", [False, True])
def test_a_value_head_is_not_among_the_files_that_an_index_names(has_critic: bool, tmp_path: Path) -> None:
    """Those alone vLLM reads, or all `*.safetensors` if there is no index."""
    model = initialize(Decoder(ARCHITECTURES["tiny"], torch.float32), 0)
    if has_critic:
        model.add_value_head()
    save_model(model, tmp_path)
    index, read = tmp_path / "model.safetensors.index.json", [path.name for path in tmp_path.glob("*.safetensors")]
    if index.exists():
        read = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    assert read == ["model.safetensors"] and (tmp_path / "value_head.safetensors").exists() == has_critic
    again = load_model(tmp_path, torch.float32)
    assert torch.equal(again.embed, model.embed)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 512


def test_weights_have_the_permissions_of_the_other_files(folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(load_model(folder, torch.float32), tmp_path / "out")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o644}


def test_missing_folders_and_damaged_json_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        resolve_folder("./nowhere")
    run = folder.parent / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(InputError, match=rf"model '{run}' is the folder of a run that has no model yet"):
        resolve_folder(str(run))
    (checkpoint := run / "checkpoints" / "step_8").mkdir(parents=True)
    with pytest.raises(
        InputError, match=f"is a checkpoint of a run that has no .*: lockstep train --resume {run} --st"
    ):
        resolve_folder(str(checkpoint))
    (run / "model").mkdir()
    with pytest.raises(InputError, match=f"model '{run}' is the folder of a run; its model is '{run}/model'"):
        resolve_folder(str(run))
    with pytest.raises(InputError, match=f"model '{checkpoint}' is a checkpoint of a run; its model is '{run}/model'"):
        resolve_folder(str(checkpoint))
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json: cannot be read as JSON"):
        read_config(folder)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"config\.json: cannot be read as JSON \(it is nested too deep\)"):
        read_config(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(InputError, match=r"config\.json: cannot be read as JSON \(it is not a regular file\)"):
        read_config(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(InputError, match=r"config\.json: missing"):
        read_config(folder)


@pytest.mark.parametrize("model", ["models/x.safetensors", "models/x.GGUF", "org/model.tar"])
def test_a_missing_file_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(InputError, match="there is no such folder"):
        resolve_folder(model)


def test_weights_are_downloaded_in_one_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """gpt-oss and Mistral's models have them in two."""
    kept = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "value_head.safetensors", "a/b.jinja"]
    others = ["original/model.safetensors", "original/config.json", "consolidated.safetensors", "metal/model.bin"]
    found: list[str] = []

    def snapshot_download(_: str, **patterns: Any) -> str:
        found.extend(filter_repo_objects(kept + others, **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_folder("org/name") == tmp_path and found == kept


def test_a_folder_is_described_with_its_further_chat_templates(tmp_path: Path) -> None:
    """`transformers` renders with `default` of them where there is no other template."""
    (tmp_path / "model.safetensors").touch()
    before = describe_folder(str(tmp_path))["files"]
    template = tmp_path / "additional_chat_templates" / "default.jinja"
    template.parent.mkdir()
    template.write_text("{{ messages[0].content }}")
    assert describe_folder(str(tmp_path))["files"].keys() - before == {"additional_chat_templates/default.jinja"}
