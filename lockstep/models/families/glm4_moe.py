"""GLM-4.5 (arXiv 2508.06471): half of each head rotated, biases, and experts chosen by biased sigmoid scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..blocks.layer import Layer, QKNormLayer
from ..blocks.rope import scaling_to_hf
from ..blocks.weight_slices import slices_of_layer, slices_with_qk_norm
from ..config import ModelConfig, MoEConfig
from . import qwen3
from .deepseek_v3 import is_multi_token_prediction, read_grouped_experts, write_grouped_experts
from .family import (
    EXPERT_SIZES,
    PARTIAL_ROTARY,
    Family,
    Raw,
    read_partial_rope,
    read_rotary_dim,
    refuse_windows,
    write_rotary_factor,
)


def _read(raw: Raw) -> dict[str, Any]:
    get = raw.values.get
    return {
        "moe": read_grouped_experts(raw, 1.0),
        "rotary_dim": read_rotary_dim(raw, 0.5),
        "biases": ("qkv",) if get("attention_bias") else (),
        "qk_norm": bool(get("use_qk_norm")),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    factor = write_rotary_factor(config)
    turned = {"rope_theta": config.rope_theta, "partial_rotary_factor": factor}
    return {
        **write_grouped_experts(config),
        "partial_rotary_factor": factor,
        "rope_parameters": turned | scaling_to_hf(config.rope_scaling),
        "attention_bias": "qkv" in config.biases,
        "use_qk_norm": config.qk_norm,
    }


def _air(layers: int) -> ModelConfig:
    return ModelConfig(
        151552, 4096, 10944, layers, 96, 8, 128, 131072, 1e-5, 1e6, False, family="glm4_moe", rotary_dim=64,
        biases=("qkv",), moe=MoEConfig(128, 8, 1408, (0,), sigmoid=True, shared_experts=1, router_bias=True),
    )  # fmt: skip


_TINY = replace(
    qwen3.TINY, family="glm4_moe", tie_word_embeddings=False, rotary_dim=16, biases=("qkv",), qk_norm=True,
    moe=MoEConfig(8, 2, 192, (0,), sigmoid=True, shared_experts=1, router_bias=True),
)  # fmt: skip

FAMILY = Family(
    "Glm4MoeForCausalLM",
    lambda config, index, weight: (QKNormLayer if config.qk_norm else Layer)(config, index, weight),
    lambda config, index: (slices_with_qk_norm if config.qk_norm else slices_of_layer)(config, index),
    fixed={"hidden_act": ("silu", "swish")},
    read=_read,
    write=_write,
    rope=read_partial_rope,
    extra_fields=("attention_bias", PARTIAL_ROTARY),
    sizes=EXPERT_SIZES,
    check=refuse_windows,
    ignores_tensor=is_multi_token_prediction,
    defaults={"rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    architectures={"tiny-glm4-moe": _TINY, "glm4.5-air": _air(46), "glm4.5-air-4-layers": _air(4)},
)
