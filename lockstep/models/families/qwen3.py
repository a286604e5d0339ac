"""Qwen3 (arXiv 2505.09388): each query and key head is normalized."""

from __future__ import annotations

from dataclasses import replace

from ..blocks.layer import QKNormLayer
from ..blocks.weight_slices import slices_with_qk_norm
from ..config import ModelConfig
from .family import (
    DEFAULT_WINDOW,
    FULL,
    SILU_WITHOUT_BIAS,
    SLIDING,
    Family,
    read_windows_by_layer,
    write_windows_by_layer,
)

TINY = ModelConfig(512, 128, 384, 4, 4, 2, 32, max_position_embeddings=2048, rope_theta=10000.0, family="qwen3")


def _size(layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> ModelConfig:
    return ModelConfig(151936, hidden, ffn, layers, heads, 8, 128, tie_word_embeddings=tied, family="qwen3")


def golden(config: ModelConfig, odd: ModelConfig) -> dict[str, ModelConfig]:
    return {"windows": replace(odd, sliding_window=20, sliding_layers=(1,))} if any(config.windows) else {}


FAMILY = Family(
    "Qwen3ForCausalLM",
    QKNormLayer,
    slices_with_qk_norm,
    fixed=SILU_WITHOUT_BIAS,
    read=read_windows_by_layer,
    write=write_windows_by_layer,
    layer_kinds=(FULL, SLIDING),
    defaults={**DEFAULT_WINDOW, "head_dim": 128},
    golden=golden,
    architectures={
        "tiny": TINY,
        "qwen3-100m": replace(
            TINY, hidden_size=768, intermediate_size=2304, num_layers=14, num_heads=12, num_kv_heads=4, head_dim=64,
            max_position_embeddings=4096,
        ),
        "qwen3-0.6b": _size(28, 1024, 3072, 16, tied=True),
        "qwen3-1.7b": _size(28, 2048, 6144, 16, tied=True),
        "qwen3-4b": _size(36, 2560, 9728, 32, tied=True),
        "qwen3-8b": _size(36, 4096, 12288, 32),
        "qwen3-14b": _size(40, 5120, 17408, 40),
        "qwen3-32b": _size(64, 5120, 25600, 64),
    },
)  # fmt: skip
