"""A model folder that cannot be used is bad input: the message names the file and what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_edits import NORM, cut, edited, instead, tensors, written

from lockstep.config import RunConfig
from lockstep.errors import InputError
from lockstep.models.hf.folder import read_config
from lockstep.session.build import load_policy


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (written("config.json", None), "config.json: missing (is this a Hugging Face model folder?)"),
        (written("config.json", b"{"), "config.json: cannot be read as JSON"),
        (written("config.json", b"[]"), "config.json: must hold a JSON object, holds list"),
        (edited(model_type="gpt2"), "config.json: model_type is 'gpt2'; supported: qwen3"),
        (
            edited(model_type="gemma3n_text", layer_types=["sliding_attention"] * 4),
            "config.json: model_type is 'gemma3n_text'; supported: qwen3, qwen3_moe, qwen2, llama,",
        ),
        (edited(model_type="olmo", layer_types="x"), "glm4_moe, deepseek_v3; the nearest family that can is olmo"),
        (edited(model_type="olmo3", layer_types="x", hidden_act="gelu"), "config.json: layer_types is 'x'; it must be"),
        (
            edited(model_type="qwen3_vl", text_config={"model_type": "qwen3"}),
            "config.json: model_type is 'qwen3_vl', which reads more than text; its text part (text_config) is a qwen3",
        ),
        (
            edited(model_type="mistral4", text_config={"model_type": "new"}),
            "its text part (text_config) is a 'new'; needed is a folder of its own, with a model_type of qwen3,",
        ),
        (
            edited(model_type="mistral4", text_config={"model_type": ["qwen3"]}),
            "its text part (text_config) is a ['qwen3']; needed is a folder of its own",
        ),
        (
            edited(model_type="gemma3_text", query_pre_attn_scalar=float("inf")),
            "query_pre_attn_scalar is inf; it must be a number above 0",
        ),
        (edited(attention_bias=True), "attention_bias is True; supported: False; the nearest family that can is olmoe"),
        (edited(partial_rotary_factor=0.5), "supported: 1; the nearest family that can is phi3"),
        (edited(hidden_act="gelu"), "hidden_act is 'gelu'; supported: 'silu'; no family here can"),
        (
            edited(model_type="llama", layer_types=["sliding_attention"] * 4),
            "other kinds are not supported; the nearest family that can is",
        ),
        (edited(model_type="qwen3_next", layer_types=["linear_attention"]), "model_type is 'qwen3_next'; supported"),
        (
            edited(model_type="phi3", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
            "short_factor and long_factor of the longrope rope scaling have 1 and 1 numbers; each must have 16",
        ),
        (
            edited(model_type="phi3", partial_rotary_factor=0.01),
            "config.json: partial_rotary_factor is 0.01; it must rotate at least 2 of a head's 32 elements",
        ),
        (
            edited(model_type="phi3", rope_scaling={"type": "su", "short_factor": [1.0], "long_factor": [0]}),
            "config.json: long_factor of the longrope rope scaling is [0]; it must be a list of numbers above 0",
        ),
        (
            edited(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}),
            "config.json: rope_type is 'longrope'; supported: default",
        ),
        (
            edited(model_type="phi3", rope_scaling={"type": "linear", "factor": 2.0}),
            "config.json: rope_type is 'linear'; supported: default, longrope",
        ),
        (edited(model_type="qwen3_5_moe", rope_parameters=[1]), "model_type is 'qwen3_5_moe'; supported"),
        (edited(model_type=["qwen3"]), "config.json: model_type is ['qwen3']; it must be a string"),
        (edited(model_type=None, layer_types=["full_attention"]), "config.json: model_type is None; supported: "),
        (edited(is_causal=False), "config.json: is_causal is False; it must be true, or left out"),
        (edited(bos_token_id=[1]), "config.json: bos_token_id is [1]; it must be a token id"),
        (edited(pad_token_id=[1]), "config.json: pad_token_id is [1]; it must be a token id"),
        (edited(hidden_size="x"), "config.json: hidden_size is 'x'; it must be an integer above 0"),
        (edited(hidden_size=None), "config.json: hidden_size is None; it must be an integer"),
        (edited(num_attention_heads=0), "config.json: num_attention_heads is 0; it must be an integer above 0"),
        (edited(num_key_value_heads=3), "config.json: model config: num_heads 4 is not a multiple of num_kv_heads 3"),
        (edited(rms_norm_eps="a"), "config.json: rms_norm_eps is 'a'; it must be a number above 0"),
        (edited(rope_parameters={"rope_theta": "x"}), "config.json: rope_parameters: rope_theta is 'x'"),
        (edited(rope_parameters=[1]), "config.json: rope_parameters is [1]; it must be an object"),
        (edited(max_position_embeddings=-4), "config.json: max_position_embeddings is -4"),
        (edited(vocab_size=10**12), "config.json: vocab_size is too large; it must be at most"),
        (edited(vocab_size=2 * 10**9), "GiB; use a smaller model"),
        (edited(vocab_size=300), "model.embed_tokens.weight has shape [512, 128]; config.json asks for [300, 128]"),
        (written("generation_config.json", b'{"eos_token_id": "x"}'), "generation_config.json: eos_token_id is 'x'"),
        (written("model.safetensors", None), "model.safetensors: missing (a model folder needs it, or an index"),
        (written("model.safetensors", b"no"), "model.safetensors: not a whole safetensors file"),
        (cut, "model.safetensors: not a whole safetensors file"),
        (
            tensors(lambda t: {k: v for k, v in t.items() if k != NORM}),
            "1 tensors are missing, first model.norm.weight (config.json asks for 46)",
        ),
        (tensors(lambda t: t | {NORM: t[NORM][:4].clone()}), f"{NORM} has shape [4]; config.json asks for [128]"),
        (tensors(lambda t: t | {NORM: t[NORM].to(torch.int8)}), f"{NORM} is torch.int8; quantized weights are not"),
        (tensors(lambda t: t | {"model.layers.9.x": t[NORM].clone()}), "model.layers.9.x has no place in the model"),
        (
            written("model.safetensors.index.json", json.dumps({"weight_map": {NORM: "b.safetensors"}}).encode()),
            "b.safetensors: missing (model.safetensors.index.json names it)",
        ),
        (written("model.safetensors.index.json", b'{"weight_map": [1]}'), "weight_map must be an object of tensor"),
        (
            written("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": "../b.safetensors"}}'),
            "index.json: weight_map places model.norm.weight in '../b.safetensors', out of the model's folder",
        ),
        (
            written("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": "b\\u0000"}}'),
            "weight_map places model.norm.weight in 'b\\x00', out of the model's folder",
        ),
        (
            written("model.safetensors.index.json", json.dumps({"weight_map": {NORM: "b" * 300}}).encode()),
            "bbb: cannot be read, File name too long (model.safetensors.index.json names it)",
        ),
        (
            written("model.safetensors.index.json", b'{"weight_map": {"model.norm.weight": "/b.safetensors"}}'),
            "index.json: weight_map places model.norm.weight in '/b.safetensors', out of the model's folder",
        ),
        (instead("model.safetensors", os.mkfifo), "model.safetensors: not a regular file (a model folder needs it"),
        (instead("model.safetensors", os.mkdir), "model.safetensors: a folder, not a file (a model folder needs it"),
        (
            instead("model.safetensors", lambda path: path.symlink_to(path)),
            "model.safetensors: cannot be read, Too many levels of symbolic links (a model folder needs it",
        ),
        (
            instead("model.safetensors", lambda path: path.symlink_to("gone")),
            "model.safetensors: missing, the link leads nowhere (a model folder needs it",
        ),
        (written("tokenizer.json", None), "has no tokenizer: none of tokenizer.json"),
        (written("tokenizer.json", b"{"), "cannot be read"),
    ],
)
def test_a_model_folder(model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model, folder)
    damage(folder)
    with pytest.raises(InputError) as info:
        load_policy(RunConfig(model=str(folder), device="cpu", dtype="float32"))
    assert message in str(info.value) and str(folder) in str(info.value)


@pytest.mark.parametrize("has_config", [False, True])
def test_an_adapter_is_told_from_a_model(model: Path, tmp_path: Path, has_config: bool) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(model, folder)
    written("adapter_config.json", b"{}")(folder)
    assert read_config(folder) == read_config(model)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    if not has_config:
        written("config.json", None)(folder)
    with pytest.raises(InputError, match=r"adapter_config\.json: an adapter, such as LoRA's, is no model; merge it"):
        load_policy(RunConfig(model=str(folder), device="cpu"))


def test_weights_that_may_not_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is made up."""
    opened = Path.open

    def refused(path: Path, *args: Any, **named: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InputError, match=r"model\.safetensors: cannot be read \(Permission denied\)"):
        load_policy(RunConfig(model=str(model)))


def test_a_tokenizer_larger_than_the_vocabulary(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    shutil.copytree(model, folder)
    edited(vocab_size=200, eos_token_id=199, pad_token_id=199)(folder)
    written("generation_config.json", None)(folder)
    tensors(lambda t: t | {"model.embed_tokens.weight": t["model.embed_tokens.weight"][:200].clone()})(folder)
    with pytest.raises(InputError, match="small needs a vocabulary of 259, but the model's has 200 entries"):
        load_policy(RunConfig(model=str(folder), device="cpu", dtype="float32"))


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "n_routed_experts": 64}
OF_LLAMA = {"mlp_bias": False, "pretraining_tp": 1}


@pytest.mark.parametrize(
    ("kind", "fields", "near"),
    [
        ("phi", {"partial_rotary_factor": 0.5}, "phi3"),
        ("phi4_multimodal", {"embd_layer": {}}, "phi3"),
        ("gemma2", {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}, "gemma3_text"),
        ("gemma3n", {"text_config": {"model_type": "gemma3n_text", "hidden_activation": "x"}}, "gemma3_text"),
        ("qwen2_vl", {"text_config": {"model_type": "qwen2_vl_text"}}, "qwen2"),
        ("qwen2_moe", {"decoder_sparse_step": 1, "num_experts": 60}, "qwen3_moe"),
        ("qwen3_next", {"linear_num_key_heads": 16, "num_experts": 512, "decoder_sparse_step": 1}, "qwen3_moe"),
        ("qwen3_vl", {"text_config": {"model_type": "qwen3_vl_text"}}, "qwen3"),
        ("llama4", {"text_config": {"model_type": "llama4_text", **EXPERTS}}, "mixtral"),
        ("deepseek_v2", LATENT, "deepseek_v3"),
        ("kimi_k2", LATENT, "deepseek_v3"),
        ("falcon", {"multi_query": True, "new_decoder_architecture": False}, "olmo2"),
        ("gpt2", {"n_embd": 768}, "phi3"),
        ("gpt_neox", {"rotary_pct": 0.25}, "phi3"),
        ("mamba", {"state_size": 16}, "mistral"),
        ("jamba", {"num_experts": 16, "attn_layer_period": 8}, "olmoe"),
        ("flex_olmo", {"num_experts": 7, "num_experts_per_tok": 5}, "olmoe"),
        ("cohere", {"logit_scale": 0.0625, "use_qk_norm": False}, "glm4_moe"),
        ("granite", {"residual_multiplier": 0.22, **OF_LLAMA}, "llama"),
        ("granitemoe", EXPERTS, "mixtral"),
        ("starcoder2", {"use_bias": True}, "mistral"),
        ("stablelm", {"use_qkv_bias": False}, "mistral"),
        ("minicpm", {"scale_emb": 12, **OF_LLAMA}, "llama"),
        ("glm4", {"partial_rotary_factor": 0.5}, "glm4_moe"),
        ("ernie4_5", {"use_bias": False}, "qwen3"),
        ("arcee", OF_LLAMA, "llama"),
        ("cohere2", {"no_rope_layers": [1, 0], "mlp_bias": False}, "smollm3"),
        ("nemotron", {"hidden_act": "relu2", "mlp_bias": False}, "mistral"),
    ],
)
def test_another_architecture_is_told_the_one_most_like_it(kind: str, fields: dict, near: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    with pytest.raises(
        InputError, match=rf"config\.json: model_type is '{kind}'.*the nearest family that can is {near}$"
    ):
        read_config(tmp_path)
