"""Seed-OSS (ByteDance, 2025): Llama's layers, whose attention may have biases before and after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from . import qwen3
from .family import Family, Raw, refuse_windows

_BIASES = {"qkv": "attention_bias", "o": "attention_out_bias"}


def _read(raw: Raw) -> dict[str, Any]:
    return {"biases": tuple(ours for ours, theirs in _BIASES.items() if raw.values.get(theirs))}


def _write(config: ModelConfig) -> dict[str, Any]:
    biases = {theirs: ours in config.biases for ours, theirs in _BIASES.items()}
    return {**biases, "residual_dropout": 0.0}  # transformers' default, 0.1, is for training


_TINY = replace(qwen3.TINY, family="seed_oss", tie_word_embeddings=False, biases=("qkv",))

FAMILY = Family(
    "SeedOssForCausalLM",
    fixed={"hidden_act": ("silu", "swish"), "mlp_bias": (False, None)},
    read=_read,
    write=_write,
    extra_fields=tuple(_BIASES.values()),
    check=refuse_windows,
    defaults={"head_dim": 128, "attention_bias": True},
    architectures={
        "tiny-seed-oss": _TINY,
        "seed-oss-36b": ModelConfig(
            155136, 5120, 27648, 64, 80, 8, 128, 524288, rope_theta=1e7, tie_word_embeddings=False, family="seed_oss",
            biases=("qkv",),
        ),
    },
)  # fmt: skip
