"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and grouped experts chosen by biased sigmoid scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..blocks.mla import LatentLayer
from ..blocks.rope import YarnScaling, rope_parameters_from_hf, scaling_from_hf
from ..blocks.weight_slices import LayerSlice, interleaved_rotary, slices_of_layer
from ..config import MLAConfig, ModelConfig, MoEConfig
from . import qwen3, qwen3_moe
from .family import EXPERT_SIZES, SILU_WITHOUT_BIAS, Family, Raw, refuse_windows

_MLA_SIZES = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}


def _read(raw: Raw) -> dict[str, Any]:
    get = raw.values.get
    values = rope_parameters_from_hf(raw.values, raw.where)
    other = not isinstance(scaling_from_hf(raw.values, raw.where), YarnScaling | None)
    scale = values.get("mscale_all_dim")
    raw.refuse(scale and other, f"mscale_all_dim is {scale!r}; it is supported with yarn only")
    sizes = {ours: raw.integer(theirs) for ours, theirs in _MLA_SIZES.items()}
    q_rank = None if get("q_lora_rank") is None else raw.integer("q_lora_rank")
    mla = MLAConfig(**sizes, q_rank=q_rank, interleaved=bool(get("rope_interleave", True)))
    return {"mla": mla, "moe": read_grouped_experts(raw, 2.5), "num_kv_heads": 1, "head_dim": mla.rope_dim}


def read_grouped_experts(raw: Raw, scale: float) -> MoEConfig:
    """Grouped experts chosen by biased sigmoid scores; `scale` is the default of `routed_scaling_factor`."""
    get = raw.values.get
    return MoEConfig(
        raw.integer("n_routed_experts", "num_local_experts"),
        raw.integer("num_experts_per_tok"), raw.integer("moe_intermediate_size"),
        tuple(range(min(raw.integer("first_k_dense_replace"), raw.integer("num_hidden_layers")))),
        sigmoid=True, groups=raw.integer("n_group"), kept_groups=raw.integer("topk_group"),
        normalize=bool(get("norm_topk_prob", True)), scale=float(get("routed_scaling_factor", scale)),
        shared_experts=raw.integer("n_shared_experts"), router_bias=True,
    )  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    assert mla is not None
    return {
        "num_key_value_heads": config.num_heads,
        **{theirs: getattr(mla, ours) for ours, theirs in _MLA_SIZES.items()},
        "q_lora_rank": mla.q_rank,
        "rope_interleave": mla.interleaved,
        **write_grouped_experts(config),
    }


def write_grouped_experts(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "n_group": moe.groups,
        "topk_group": moe.kept_groups,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "num_nextn_predict_layers": 0,
    }


def _attention(config: ModelConfig) -> Iterator[LayerSlice]:
    m = config.mla
    assert m is not None
    queries, up = config.num_heads * (m.nope_dim + m.rope_dim), config.num_heads * (m.nope_dim + m.v_dim)
    q_layout = interleaved_rotary(m.nope_dim + m.rope_dim, m.rope_dim) if m.interleaved else None
    kv_layout = interleaved_rotary(m.key_dim, m.rope_dim) if m.interleaved else None
    if m.q_rank is None:
        yield LayerSlice("self_attn.q_proj.weight", "mla.down", 0, queries, q_layout)
    else:
        yield LayerSlice("self_attn.q_a_proj.weight", "mla.down", 0, m.q_rank)
        yield LayerSlice("self_attn.q_a_layernorm.weight", "mla.q_norm", 0, m.q_rank)
        yield LayerSlice("self_attn.q_b_proj.weight", "mla.q_up", 0, queries, q_layout)
    yield LayerSlice("self_attn.kv_a_proj_with_mqa.weight", "mla.down", m.q_rank or queries, m.key_dim, kv_layout)
    yield LayerSlice("self_attn.kv_a_layernorm.weight", "mla.kv_norm", 0, m.kv_rank)
    yield LayerSlice("self_attn.kv_b_proj.weight", "mla.kv_up", 0, up)
    yield LayerSlice("self_attn.o_proj.weight", "o", 0, config.hidden_size)


def is_multi_token_prediction(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to the layers after the last, which are for multi-token prediction."""
    before, _, rest = name.partition("model.layers.")
    layer = rest.partition(".")[0]
    return not before and layer.isdecimal() and int(layer) >= config.num_layers


def _golden(config: ModelConfig, odd: ModelConfig) -> dict[str, ModelConfig]:
    latent = replace(odd, family="deepseek_v3", num_kv_heads=1, head_dim=14, mla=MLAConfig(37, 22, 14, 29, 41))
    return qwen3_moe.golden(config, odd) | {"latent": latent}


def _size(layers: int, dense: int, experts: int) -> ModelConfig:
    """A model of DeepSeek-V3's widths. The context is YaRN's factor, 40, times 4,096."""
    moe = MoEConfig(
        experts, 8, 2048, tuple(range(dense)), sigmoid=True, groups=8, kept_groups=4, scale=2.5, shared_experts=1,
        router_bias=True,
    )  # fmt: skip
    return ModelConfig(
        129280, 7168, 18432, layers, 128, 1, 64, 163840, rope_theta=10000.0, tie_word_embeddings=False,
        family="deepseek_v3", rope_scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0), moe=moe,
        mla=MLAConfig(512, 128, 64, 128, 1536),
    )  # fmt: skip


_TINY = replace(
    qwen3.TINY, family="deepseek_v3", num_kv_heads=1, head_dim=16, tie_word_embeddings=False,
    rope_scaling=YarnScaling(8.0, 256, mscale=1.0, mscale_all_dim=1.0), mla=MLAConfig(64, 32, 16, 32, 96),
    moe=MoEConfig(
        8, 2, 192, (0,), sigmoid=True, groups=4, kept_groups=2, scale=2.5, shared_experts=1, router_bias=True
    ),
)  # fmt: skip

FAMILY = Family(
    "DeepseekV3ForCausalLM",
    LatentLayer,
    lambda config, index: slices_of_layer(config, index, _attention(config)),
    fixed=SILU_WITHOUT_BIAS | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    read=_read,
    write=_write,
    sizes=EXPERT_SIZES,
    check=refuse_windows,
    ignores_tensor=is_multi_token_prediction,
    golden=_golden,
    architectures={
        "tiny-deepseek-v3": _TINY,
        "deepseek-v3": _size(61, 3, 256),
        "deepseek-v3-3-layers-32-experts": _size(3, 1, 32),
    },
)
