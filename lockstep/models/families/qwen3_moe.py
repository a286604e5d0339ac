"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..blocks.layer import QKNormLayer
from ..blocks.weight_slices import slices_with_qk_norm
from ..config import ModelConfig, MoEConfig
from . import qwen3
from .family import (
    DEFAULT_WINDOW,
    EXPERT_SIZES,
    SILU_WITHOUT_BIAS,
    Family,
    Raw,
    read_optional_window,
    require_uniform_windows,
    write_optional_window,
)


def _read(raw: Raw) -> dict[str, Any]:
    step, plain = raw.values.get("decoder_sparse_step", 1), raw.values.get("mlp_only_layers") or []
    layers = range(raw.integer("num_hidden_layers"))
    moe = MoEConfig(
        raw.integer("num_experts", "num_local_experts"),
        raw.integer("num_experts_per_tok"),
        raw.integer("moe_intermediate_size"),
        tuple(i for i in layers if i in plain or (i + 1) % step),
        normalize=bool(raw.values.get("norm_topk_prob", False)),
    )
    return {"moe": moe, **read_optional_window(raw, tuple(layers))}


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "mlp_only_layers": list(moe.dense_layers),
        "decoder_sparse_step": 1,
        "norm_topk_prob": moe.normalize,
        **write_optional_window(config),
    }


def golden(config: ModelConfig, odd: ModelConfig) -> dict[str, ModelConfig]:
    experts = {"experts": replace(odd, family="qwen3_moe", moe=MoEConfig(6, 2, 89))} if config.moe_layers else {}
    return experts | qwen3.golden(config, odd)


def _size(layers: int, hidden: int, ffn: int, heads: int, width: int) -> ModelConfig:
    return ModelConfig(
        151936, hidden, ffn, layers, heads, 4, 128, tie_word_embeddings=False, family="qwen3_moe",
        moe=MoEConfig(128, 8, width),
    )  # fmt: skip


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    QKNormLayer,
    slices_with_qk_norm,
    fixed=SILU_WITHOUT_BIAS,
    read=_read,
    write=_write,
    sizes=EXPERT_SIZES,
    check=require_uniform_windows,
    defaults=DEFAULT_WINDOW,
    golden=golden,
    architectures={
        "tiny-qwen3-moe": replace(qwen3.TINY, family="qwen3_moe", moe=MoEConfig(8, 2, 192)),
        "qwen3-30b-a3b": _size(48, 2048, 6144, 32, 768),
        "qwen3-235b-a22b": _size(94, 4096, 12288, 64, 1536),
    },
)
