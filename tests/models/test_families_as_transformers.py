"""Random tiny models of every family: what `transformers` makes of a folder, and one arithmetic in both roles.

One of each here, over two updates; `tests/matrix.py` has the others, over three.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import (
    EAGERLY,
    MAKERS,
    TOLERANCE,
    assert_roles_agree,
    assert_same_model,
    folder_of,
    hf_config,
    logits,
)
from model_edits import edited
from safetensors.torch import load_file, save_file
from small import load_model
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.errors import InputError
from lockstep.models import Decoder, ModelConfig, save_model
from lockstep.models.blocks.rope import scaling_to_hf
from lockstep.models.families import FAMILIES
from lockstep.models.families.family import FULL, SLIDING
from lockstep.models.hf.config import to_hf
from lockstep.models.hf.folder import read_config
from lockstep.models.init import architecture, initialize

# Seeds of models of two layers; windows of 7 (smaller than a page), 20 and 70 (larger than a key tile) are among them,
# and every kind of layer: `olmo2` has that of `olmo3`.
ROLES = {"qwen2": 2, "mistral": 0, "olmo3": 2, "gemma3_text": 3, "gpt_oss": 0, "glm4_moe": 4, "smollm3": 40}


def test_every_family_has_random_models() -> None:
    assert FAMILIES.keys() == MAKERS.keys()


@pytest.mark.parametrize("family", MAKERS)
def test_a_folder_is_the_model_that_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    for seed in range(2):
        assert_same_model(family, seed, tmp_path / str(seed))


@pytest.mark.parametrize("family", ROLES)
def test_both_roles_agree_over_updates_captured_or_not(family: str, tmp_path: Path) -> None:
    assert_roles_agree(family, ROLES[family], tmp_path, torch.bfloat16, steps=2)


def test_norms_of_all_queries_and_keys_copy_nothing() -> None:
    """Of a layer only queries, keys and values together, for attention, are laid out anew; and the gate is one with its
    product."""
    model, tokens = initialize(Decoder(architecture("tiny-olmo2"), torch.float32), 0), torch.arange(7)
    graph = make_fx(lambda tokens: logits(model, tokens))(tokens)
    assert torch.equal(graph(tokens), logits(model, tokens))
    called = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    layers = model.config.num_layers
    assert called["lockstep.rms_norm.default"] == 2 * layers + 1
    assert called["lockstep.gate_up.default"] == called["aten.cat.default"] == layers
    assert not called.keys() & {"aten.clone.default", "lockstep.silu_mul.default"}


def windows_of(config: Any) -> tuple[int, ...]:
    """Of each layer of a configuration of `transformers`; 0: none."""
    window = getattr(config, "sliding_window", None) or 0
    default = [SLIDING if window else FULL] * config.num_hidden_layers
    return tuple(window if kind == SLIDING else 0 for kind in getattr(config, "layer_types", None) or default)


def unrotated_layers_of(config: Any) -> tuple[int, ...]:
    flags = getattr(config, "no_rope_layers", None) or []  # 1: with rotary positions
    return tuple(i for i, flag in enumerate(flags[: config.num_hidden_layers]) if not flag)


def biases_of(config: Any, ours: ModelConfig) -> tuple[bool, bool]:
    """Of the projections to queries, keys and values, and of the one behind attention; as ours where nothing tells."""
    before = getattr(config, "attention_bias", "qkv" in ours.biases)
    return before, getattr(config, "attention_out_bias", before if config.model_type in BOTH else "o" in ours.biases)


BOTH = {"smollm3", "olmoe", "gpt_oss"}  # families with one field for all biases of attention


def chosen_experts(config: ModelConfig) -> dict[str, Any]:
    """How experts are chosen and weighed, by the names in config.json."""
    moe = config.moe
    if moe is None:
        return {}
    weighed = {"norm_topk_prob": moe.normalize, "routed_scaling_factor": moe.scale}
    chosen = {"n_group": moe.groups, "topk_group": moe.kept_groups, "first_k_dense_replace": len(moe.dense_layers)}
    return weighed | chosen | {"n_shared_experts": moe.shared_experts}


# What transformers has no default for, or writes always.
NEEDED = {"model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
NEEDED |= {"num_key_value_heads", "max_position_embeddings", "num_local_experts", "num_experts_per_tok"}
NEEDED |= {"moe_intermediate_size", "num_experts", "n_routed_experts", "eos_token_id", "use_sliding_window"}
LATENT = {"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group"}
LATENT |= {"first_k_dense_replace", "n_shared_experts"}


@pytest.mark.parametrize("family", MAKERS)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, tmp_path: Path) -> None:
    hf_config(family, 0, num_hidden_layers=7, layer_types=None).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    needed = NEEDED | (LATENT if family == "deepseek_v3" else set())
    values = {key: value for key, value in json.loads(path.read_text()).items() if key in needed}
    values |= {"head_dim": 32} if family == "glm4_moe" else {}  # half of which rotates by default
    path.write_text(json.dumps(values))
    theirs, ours = transformers.AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
    assert ours.windows == windows_of(theirs)
    edited(sliding_window=None, **({"use_sliding_window": False} if "use_sliding_window" in values else {}))(tmp_path)
    assert not any(read_config(tmp_path).windows)
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.unrotated_layers == unrotated_layers_of(theirs)
    assert ("qkv" in ours.biases, "o" in ours.biases) == biases_of(theirs, ours)
    rope = theirs.rope_parameters
    full, local = (rope[FULL], rope[SLIDING]["rope_theta"]) if FULL in rope else (rope, None)
    assert (ours.rope_theta, ours.local_rope_theta) == (full["rope_theta"], local)
    assert (ours.rotary_dim or ours.head_dim) == int(ours.head_dim * full.get("partial_rotary_factor", 1.0))
    scaling = scaling_to_hf(ours.rope_scaling)
    assert {key: full[key] for key in scaling} == scaling
    for name, value in chosen_experts(ours).items():
        assert value == getattr(theirs, name, value), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or ours.head_dim)
    if family == "gemma3_text":
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5


@pytest.mark.parametrize("family", MAKERS)
def test_a_configuration_comes_back(family: str, tmp_path: Path) -> None:
    for seed in range(5):
        hf_config(family, seed, eos_token_id=[3, 5]).save_pretrained(tmp_path)
        config = read_config(tmp_path)
        assert config.eos_token_ids == (3, 5)
        (tmp_path / "config.json").write_text(json.dumps(to_hf(config, "float32")))
        assert read_config(tmp_path) == config
        theirs, again = hf_config(family, seed), transformers.AutoConfig.from_pretrained(tmp_path)
        assert windows_of(again) == windows_of(theirs) == config.windows
        assert unrotated_layers_of(again) == unrotated_layers_of(theirs) == config.unrotated_layers
        assert biases_of(again, config) == biases_of(theirs, config) == ("qkv" in config.biases, "o" in config.biases)
        for name in ("norm_topk_prob", "routed_scaling_factor", "tie_word_embeddings", "head_dim"):
            assert getattr(again, name, None) == getattr(theirs, name, None), name


@pytest.mark.parametrize("family", MAKERS)
def test_a_random_model_begins_with_norms_that_change_nothing(family: str) -> None:
    rows = FAMILIES[family]
    for config in rows.architectures.values():
        fills = Decoder(config.first_layers(1), torch.bfloat16, "meta").init_constants
        norms = {name: fill for name, fill in fills.items() if name.endswith("norm")}
        assert set(norms.values()) == {1 - rows.norm_offset} and len(norms) >= 3


def test_what_embeddings_are_multiplied_by_is_rounded_as_transformers_rounds_it(tmp_path: Path) -> None:
    theirs, tokens = folder_of("gemma3_text", 0, tmp_path, hidden_size=60).bfloat16(), torch.arange(50)
    ours = load_model(tmp_path, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(ours.embed[tokens] * ours.embed_factor, theirs.model.embed_tokens(tokens))
    assert ours.embed_factor == 7.75 != 60**0.5


OTHER_MODELS = [
    ("gemma3_text", {"final_logit_softcapping": 30.0}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"hidden_activation": "silu"}),
    ("gpt_oss", {"swiglu_limit": 5.0}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", {"attention_bias": False}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"pretraining_tp": 2}),
    ("olmo2", {"attention_bias": True}),
    ("olmo3", {"hidden_act": "gelu"}),
    ("mistral", {"hidden_act": "gelu"}),
    ("olmoe", {"clip_qkv": 8.0}),
    ("smollm3", {"mlp_bias": True}),
    ("seed_oss", {"mlp_bias": True}),
    ("qwen2", {"hidden_act": "gelu"}),
    ("qwen3_moe", {"attention_bias": True}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"topk_method": "greedy"}),
    ("deepseek_v3", {"moe_layer_freq": 2}),
]


@pytest.mark.parametrize(("family", "change"), OTHER_MODELS)
def test_a_field_of_another_model_is_named(family: str, change: dict[str, Any], tmp_path: Path) -> None:
    hf_config(family, 0).save_pretrained(tmp_path)
    edited(**change)(tmp_path)
    ((field, value),) = change.items()
    with pytest.raises(
        InputError, match=rf"config\.json: {field} is {value!r}; supported: .*(nearest family|no family)"
    ):
        read_config(tmp_path)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_left_out(family: str, tmp_path: Path) -> None:
    layers = folder_of(family, 0, tmp_path).config.num_hidden_layers
    plain, path = load_model(tmp_path, torch.float32), tmp_path / "model.safetensors"
    further = {f"model.layers.{layers}.{name}.weight": torch.ones(2) for name in ("eh_proj", "input_layernorm")}
    save_file(load_file(path) | further, path)
    again = load_model(tmp_path, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))


def test_a_head_without_a_size_is_a_part_of_the_hidden_state(tmp_path: Path) -> None:
    hf_config("seed_oss", 0).save_pretrained(tmp_path)
    edited(head_dim=None)(tmp_path)
    assert read_config(tmp_path).head_dim == transformers.AutoConfig.from_pretrained(tmp_path).head_dim == 8


@pytest.mark.parametrize(("window", "expected"), [(70, (70, 0, 0)), (None, (0, 0, 0))])
def test_a_window_without_layer_types_is_of_layers_without_positions(
    window: int | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    hf_config("smollm3", 1).save_pretrained(tmp_path)
    edited(layer_types=None, sliding_window=window)(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.use_sliding_window and unrotated_layers_of(theirs) == (0,)
    assert read_config(tmp_path).windows == windows_of(theirs) == expected


SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"image_size": 28, "patch_size": 14}


@pytest.mark.parametrize("form", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize(("family", "whole"), [("gemma3_text", "gemma3"), ("mistral", "mistral3")])
def test_the_text_part_of_a_model_that_sees(family: str, whole: str, form: str, tmp_path: Path) -> None:
    more = {"mm_tokens_per_image": 4} if whole == "gemma3" else {}
    text = hf_config(family, 1).to_dict()
    config = transformers.AutoConfig.for_model(whole, text_config=text, vision_config=SIGHT, **more)
    theirs = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.data.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path)
    edited(eos_token_id=[3, 5])(tmp_path)
    path = tmp_path / "model.safetensors"
    others = {name.replace("language_model.model.", form): tensor for name, tensor in load_file(path).items()}
    save_file(others, path)
    ours, tokens = load_model(tmp_path, torch.float32), torch.arange(4, 120)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        assert (logits(ours, tokens) - expected).abs().max() <= TOLERANCE * expected.abs().max()
        save_model(ours, tmp_path / "out")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **EAGERLY)
        assert (again(tokens[None]).logits[0] - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert again.config.model_type == ours.config.family == family and ours.config.eos_token_ids == (3, 5)
    save_file(others | {f"{form}layers.9.x.weight": torch.ones(2)}, path)
    with pytest.raises(InputError, match=r"layers\.9\.x\.weight has no place in the model"):
        load_model(tmp_path, torch.float32)


def test_a_text_part_has_the_family_s_defaults(tmp_path: Path) -> None:
    """As the config.json of Gemma 3 4B, whose text part says what differs from them alone."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **sizes}
    values = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106], "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = FAMILIES["gemma3_text"].architectures["gemma3-4b"]
    assert read_config(tmp_path) == replace(expected, eos_token_ids=(1, 106))
    for kind in ("gemma3n_text", None):
        edited(text_config=text | {"model_type": kind})(tmp_path)
        with pytest.raises(InputError, match=r"config\.json: model_type is 'gemma3', which reads more than text"):
            read_config(tmp_path)


def test_weights_of_4_bits_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Experts of 32 inputs and more, in blocks and scales that lie in two files."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = folder_of("gpt_oss", 0, tmp_path, hidden_size=64, intermediate_size=32)
    tensors, parts = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        parts[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        parts[f"{name}_scales"] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        whole = convert_moe_packed_tensors(parts[f"{name}_blocks"], parts[f"{name}_scales"])
        theirs.get_parameter(name).data.copy_(whole)
    scales = {name: part for name, part in parts.items() if name.endswith("scales")}
    files = {"a.safetensors": scales, "b.safetensors": tensors | {n: p for n, p in parts.items() if n not in scales}}
    for file, some in files.items():
        save_file(some, tmp_path / file)
    placed = {name: file for file, some in files.items() for name in some}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    edited(quantization_config={"quant_method": "mxfp4"})(tmp_path)
    tokens = torch.arange(4, 120)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    found = logits(load_model(tmp_path, torch.float32), tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    save_file({name: part[:, :-1].clone() for name, part in scales.items()}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"b\.safetensors: \S+_proj has _blocks \[.*\] and _scales \["):
        load_model(tmp_path, torch.float32)
    save_file(scales | {"lm_head.bias": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors: lm_head\.bias has no place"):
        load_model(tmp_path, torch.float32)
    edited(quantization_config={"quant_method": "fp8"})(tmp_path)
    with pytest.raises(InputError, match=r"config\.json: quantization_config is .*fp8.*bfloat16 model; no family"):
        load_model(tmp_path, torch.float32)
