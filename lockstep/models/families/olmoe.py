"""OLMoE (arXiv 2409.02060): norms over all queries and all keys of a token, and experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import refuse
from ..blocks.weight_slices import slices_of_layer
from ..config import ModelConfig, MoEConfig
from . import qwen3
from .family import EXPERT_SIZES, Family, Raw, refuse_windows
from .olmo2 import SpanningNormLayer, spanning_attention_slices


def _read(raw: Raw) -> dict[str, Any]:
    window = raw.values.get("sliding_window")
    raw.refuse(window, f"sliding_window is {window!r}; it must be left out, as transformers does not always apply it")
    moe = MoEConfig(
        raw.integer("num_experts", "num_local_experts"),
        raw.integer("num_experts_per_tok"),
        raw.integer("intermediate_size"),
        normalize=bool(raw.values.get("norm_topk_prob", False)),
    )
    return {"moe": moe, "biases": ("qkv", "o") if raw.values.get("attention_bias") else ()}


def _write(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    return {
        "intermediate_size": moe.intermediate_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "norm_topk_prob": moe.normalize,
        "attention_bias": "qkv" in config.biases,
    }


def _check(config: ModelConfig) -> None:
    refuse_windows(config)
    heads, head_dim, hidden = config.num_heads, config.head_dim, config.hidden_size
    refuse(
        heads * head_dim != hidden,
        f"model config: head_dim is {head_dim}; the {heads} heads of an {config.family} must be as wide together as "
        f"the hidden state, {hidden}",
    )


_TINY = replace(
    qwen3.TINY, family="olmoe", tie_word_embeddings=False, intermediate_size=192,
    moe=MoEConfig(8, 2, 192, normalize=False),
)  # fmt: skip
_ODD_TINY = replace(_TINY.first_layers(2), vocab_size=509, hidden_size=138, num_heads=3, num_kv_heads=3, head_dim=46)

FAMILY = Family(
    "OlmoeForCausalLM",
    SpanningNormLayer,
    lambda config, index: slices_of_layer(config, index, spanning_attention_slices(config)),
    fixed={"hidden_act": ("silu", "swish"), "clip_qkv": (None,)},
    read=_read,
    write=_write,
    extra_fields=("attention_bias",),
    sizes=EXPERT_SIZES,
    check=_check,
    defaults={"rms_norm_eps": 1e-5},
    golden=lambda config, odd: {"layers": _ODD_TINY},
    architectures={
        "tiny-olmoe": _TINY,
        "olmoe-1b-7b": ModelConfig(
            50304, 2048, 1024, 16, 16, 16, 128, 4096, 1e-5, 10000.0, False, family="olmoe",
            moe=MoEConfig(64, 8, 1024, normalize=False),
        ),
    },
)  # fmt: skip
