"""Random tiny models of every family, made by `transformers`, and what must hold of each.

Heads are odd or even, weights tied or not, windows smaller than a page and larger than the context, vocabularies odd.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from small import load_model, rounds, shared_engine

from lockstep import ops
from lockstep.models import Decoder, PackedAttention, save_model
from lockstep.types import SampleIdentity, SamplingParams

CONTEXT = 256
EAGERLY = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the plain code, for any sizes
TOLERANCE = 2e-5  # of the largest logit


def hf_config(family: str, seed: int, **changes: Any) -> Any:
    """A random tiny configuration, always the same for a seed, with these `changes`."""
    rng = random.Random(f"{family} {seed}")
    heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    layers = rng.choice((2, 3, 4))
    sizes = {
        "vocab_size": rng.choice((211, 257, 300)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads * group,
        "num_key_value_heads": heads,
        "hidden_size": heads * group * rng.choice((8, 14, 20)),
        "head_dim": rng.choice((16, 20, 32)),
        "intermediate_size": rng.choice((37, 64, 100)),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": rng.random() < 0.5,
        "rms_norm_eps": rng.choice((1e-6, 1e-5)),
        "bos_token_id": 1,
        "eos_token_id": 3,
        "pad_token_id": None,
    }
    make, more = MAKERS[family]
    return make(**sizes | more(rng, sizes) | changes)


def _theta(rng: random.Random, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": rng.choice((1e4, 5e5)), **(scaling or {"rope_type": "default"})}}


def _window(rng: random.Random) -> int:
    return rng.choice((3, 7, 20, 70, 1000))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


def _kinds(rng: random.Random, sizes: dict[str, Any]) -> list[str]:
    return [rng.choice(("sliding_attention", "full_attention")) for _ in range(sizes["num_hidden_layers"])]


def _halves(sizes: dict[str, Any]) -> dict[str, Any]:
    """Of families whose heads are the hidden state's parts."""
    hidden = sizes["num_attention_heads"] * sizes["head_dim"]
    return {"hidden_size": hidden}


def _switched(rng: random.Random) -> dict[str, Any]:
    """Windows of families that have a switch for them."""
    windows = {"use_sliding_window": True, "sliding_window": _window(rng), "max_window_layers": rng.choice((0, 1, 9))}
    return rng.choice(({}, windows, windows))


def _qwen2(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    windows = _switched(rng)
    return _theta(rng) | _halves(sizes) | windows


def _qwen3(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = {"use_sliding_window": True, "sliding_window": _window(rng), "layer_types": _kinds(rng, sizes)}
    return _theta(rng, **rng.choice(({}, YARN))) | rng.choice((_switched(rng), kinds))


def _qwen3_moe(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    dense = rng.choice(({}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}))
    windows = rng.choice(({}, {"use_sliding_window": True, "sliding_window": _window(rng)}))
    experts = {"num_experts": 6, "num_experts_per_tok": rng.choice((1, 2, 3)), "norm_topk_prob": rng.random() < 0.5}
    return _theta(rng) | dense | windows | experts | {"moe_intermediate_size": rng.choice((16, 23))}


def _llama(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    return _theta(rng, **rng.choice(({}, LLAMA3, LINEAR, YARN)))


def _deepseek_v3(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    rotated = rng.choice((6, 8))
    latent = {
        "head_dim": rotated,
        "num_key_value_heads": sizes["num_attention_heads"],
        "q_lora_rank": rng.choice((None, 12, 24)),
        "kv_lora_rank": rng.choice((20, 32)),
        "qk_nope_head_dim": rng.choice((10, 16)),
        "qk_rope_head_dim": rotated,
        "v_head_dim": rng.choice((14, 16)),
        "rope_interleave": rng.random() < 0.5,
    }
    scaled = YARN | {"mscale": rng.choice((0.7, 1.0)), "mscale_all_dim": rng.choice((0.0, 1.0))}
    return _theta(rng, **rng.choice(({}, scaled, LINEAR))) | latent | _experts(rng)


def _mistral(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    return _theta(rng) | {"sliding_window": rng.choice((None, _window(rng), _window(rng)))}


def _phi3(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    share = rng.choice((1.0, 0.5))
    pairs = int(sizes["head_dim"] * share) // 2
    factors = {name: [rng.uniform(1, 4) for _ in range(pairs)] for name in ("short_factor", "long_factor")}
    scaled = _theta(rng, rope_type="longrope", **factors) | {"original_max_position_embeddings": CONTEXT}
    found = rng.choice((_theta(rng), scaled | {"max_position_embeddings": 4 * CONTEXT}))
    found["rope_parameters"]["partial_rotary_factor"] = share
    return _mistral(rng, sizes) | _halves(sizes) | found


def _mixtral(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_local_experts": rng.choice((3, 6)), "num_experts_per_tok": rng.choice((1, 2, 3))}
    return _mistral(rng, sizes) | experts | {"intermediate_size": rng.choice((16, 23))}


def _olmo2(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    return _theta(rng, **rng.choice(({}, YARN))) | _halves(sizes)


def _by_kind(rng: random.Random, **scaling: Any) -> dict[str, Any]:
    full = {"rope_theta": rng.choice((1e4, 1e6)), **(scaling or {"rope_type": "default"})}
    return {"full_attention": full, "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"}}


def _olmo3(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = {"sliding_window": _window(rng), "layer_types": _kinds(rng, sizes)}
    return _halves(sizes) | kinds | {"rope_parameters": _by_kind(rng, **rng.choice(({}, YARN)))}


def _gemma3_text(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = rng.choice(({"sliding_window_pattern": 2}, {"layer_types": _kinds(rng, sizes)}))
    scores = {"query_pre_attn_scalar": rng.choice((16, 24, 100)), "sliding_window": _window(rng)}
    return scores | kinds | {"rope_parameters": _by_kind(rng, **rng.choice(({}, LINEAR)))}


def _experts(rng: random.Random) -> dict[str, Any]:
    groups = rng.choice((1, 2))
    return {
        "moe_intermediate_size": rng.choice((16, 23)),
        "n_routed_experts": 6,
        "num_experts_per_tok": rng.choice((1, 2, 3)),
        "n_group": groups,
        "topk_group": groups,
        "first_k_dense_replace": rng.choice((0, 1)),
        "n_shared_experts": rng.choice((1, 2)),
        "routed_scaling_factor": rng.choice((1.0, 1.7)),
        "norm_topk_prob": rng.random() < 0.5,
    }


def _glm4_moe(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    flags = {"use_qk_norm": rng.choice((True, False)), "attention_bias": rng.choice((True, False))}
    rope = _theta(rng, **rng.choice(({}, YARN)))
    rope["rope_parameters"]["partial_rotary_factor"] = rng.choice((1.0, 0.5, 0.25))
    return {"head_dim": rng.choice((16, 24, 32))} | flags | rope | _experts(rng)


def _gpt_oss(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_local_experts": 6, "num_experts_per_tok": rng.choice((1, 2, 3))}
    scaling = {"rope_parameters": YARN | {"rope_theta": 1e4, "truncate": rng.random() < 0.5}}
    kinds = {"sliding_window": _window(rng), "layer_types": _kinds(rng, sizes)}
    return experts | scaling | kinds | {"intermediate_size": rng.choice((16, 23))}


def _smollm3(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    windows, listed = rng.choice(("none", "of layers without positions", "by kind")), rng.choice((False, True))
    flags = [rng.choice((0, 1)) for _ in range(8)]  # more than there are layers
    found = {"no_rope_layers": flags} if listed else {"no_rope_layer_interval": 2}
    found["attention_bias"] = rng.random() < 0.5
    found |= {} if windows == "none" else {"use_sliding_window": True, "sliding_window": _window(rng)}
    found |= _theta(rng, **rng.choice(({}, YARN)))
    return found | ({"layer_types": _kinds(rng, sizes)} if windows == "by kind" else {})


def _seed_oss(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    biases = {"attention_bias": rng.random() < 0.5, "attention_out_bias": rng.random() < 0.5}
    return _theta(rng, **rng.choice(({}, LINEAR))) | biases


def _olmoe(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": rng.choice((1, 2, 3)), "norm_topk_prob": rng.random() < 0.5}
    experts |= {"intermediate_size": rng.choice((16, 23)), "attention_bias": rng.random() < 0.5}
    return _theta(rng, **rng.choice(({}, YARN))) | _halves(sizes) | experts


Maker = tuple[Callable[..., Any], Callable[[random.Random, dict[str, Any]], dict[str, Any]]]
MAKERS: dict[str, Maker] = {
    "qwen3": (transformers.Qwen3Config, _qwen3),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _qwen3_moe),
    "llama": (transformers.LlamaConfig, _llama),
    "deepseek_v3": (transformers.DeepseekV3Config, _deepseek_v3),
    "qwen2": (transformers.Qwen2Config, _qwen2),
    "mistral": (transformers.MistralConfig, _mistral),
    "mixtral": (transformers.MixtralConfig, _mixtral),
    "phi3": (transformers.Phi3Config, _phi3),
    "olmo2": (transformers.Olmo2Config, _olmo2),
    "olmo3": (transformers.Olmo3Config, _olmo3),
    "gemma3_text": (transformers.Gemma3TextConfig, _gemma3_text),
    "gpt_oss": (transformers.GptOssConfig, _gpt_oss),
    "glm4_moe": (transformers.Glm4MoeConfig, _glm4_moe),
    "smollm3": (transformers.SmolLM3Config, _smollm3),
    "seed_oss": (transformers.SeedOssConfig, _seed_oss),
    "olmoe": (transformers.OlmoeConfig, _olmoe),
}


def offset_of_norms(config: Any) -> float:
    """What is added to the weights of norms."""
    return 1.0 if config.model_type.startswith("gemma") else 0.0


def hf_model(config: Any, seed: int) -> Any:
    """With random weights, large enough that its distributions are far from flat."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGERLY).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
        elif name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5).sub_(offset_of_norms(config))
        else:
            parameter.data.normal_(0, 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.2, 0.2)
    return model


def folder_of(family: str, seed: int, path: Path, **changes: Any) -> Any:
    """Write a folder of a family's random model, by `transformers`; its model."""
    model = hf_model(hf_config(family, seed, **changes), seed)
    model.save_pretrained(path)
    return model


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Of one sequence."""
    zero, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([0, len(tokens)], dtype=torch.int32)
    attend = PackedAttention(ops.Packed(ends, zero, zero, len(tokens)), model.masks)
    with torch.no_grad():
        return model(tokens, torch.arange(len(tokens)), attend) @ model.lm_head.t()


def assert_same_model(family: str, seed: int, path: Path) -> None:
    """Logits and greedy tokens are those of `transformers`, and a folder comes out with the bytes that went in."""
    theirs = folder_of(family, seed, path / "in")
    ours = load_model(path / "in", torch.float32)
    vocabulary = ours.config.vocab_size
    tokens = torch.randint(4, vocabulary, (150,), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected, found = theirs(tokens[None]).logits[0], logits(ours, tokens)
    largest = expected.abs().max().item()
    assert largest > 0.5
    assert (found - expected).abs().max().item() <= TOLERANCE * largest
    sampling = SamplingParams(temperature=0.0, max_completion_length=12, ignore_eos=True)
    ((answer,),) = shared_engine(ours).generate([tokens[:40].tolist()], [sampling], [SampleIdentity(0, 0, 0, 0)])
    whole = torch.cat((tokens[:40], torch.tensor(answer.token_ids)))
    with torch.no_grad():
        assert theirs(whole[None]).logits[0, 39:-1].argmax(1).tolist() == answer.token_ids
    assert_folder_comes_back(path, ours)


def assert_folder_comes_back(path: Path, ours: Decoder) -> None:
    """Bytes of all tensors, and `transformers` makes the same model of both."""
    save_model(ours, path / "out")
    before, after = (load_file(path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    again = load_model(path / "out", torch.float32)
    assert again.config == ours.config
    tokens = torch.arange(5, 90)[None]
    both = [transformers.AutoModelForCausalLM.from_pretrained(path / name, **EAGERLY) for name in ("in", "out")]
    with torch.no_grad():
        assert torch.equal(*(model(tokens).logits for model in both))


def assert_roles_agree(family: str, seed: int, path: Path, dtype: torch.dtype, steps: int = 3) -> None:
    """Generator and trainer, eagerly and in captured graphs: no word different over so many updates."""
    folder_of(family, seed, path / "in")
    found = [rounds(load_model(path / "in", dtype), capture, steps) for capture in ("none", "step")]
    assert found[0] == found[1]
    assert found[0][1] == [0] * steps
