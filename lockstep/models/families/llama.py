"""Llama 2 and 3 (arXiv 2407.21783)."""

from __future__ import annotations

from ..blocks.rope import RopeScaling
from ..config import ModelConfig
from .family import SILU_WITHOUT_BIAS, Family, refuse_windows


def _size(layers: int, hidden: int, ffn: int, heads: int, factor: float = 0.0, tied: bool = False) -> ModelConfig:
    """A Llama 3; with a `factor`, frequencies are scaled and the context is 131,072, as from 3.1 on."""
    scaling = RopeScaling("llama3", factor) if factor else None
    context = 131072 if factor else 8192
    return ModelConfig(
        128256, hidden, ffn, layers, heads, 8, hidden // heads, context, 1e-5, 500000.0, tied, family="llama",
        rope_scaling=scaling,
    )  # fmt: skip


_TINY = ModelConfig(
    512, 128, 384, 4, 4, 2, 32, 2048, rope_theta=10000.0, tie_word_embeddings=False, family="llama",
    rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=256),
)  # fmt: skip

FAMILY = Family(
    "LlamaForCausalLM",
    fixed=SILU_WITHOUT_BIAS | {"mlp_bias": (False, None), "pretraining_tp": (1, None)},
    check=refuse_windows,
    architectures={
        "tiny-llama": _TINY,
        "llama3-8b": _size(32, 4096, 14336, 32),
        "llama3.1-8b": _size(32, 4096, 14336, 32, factor=8.0),
        "llama3.1-70b": _size(80, 8192, 28672, 64, factor=8.0),
        "llama3.2-1b": _size(16, 2048, 8192, 32, 32.0, tied=True),
        "llama3.2-3b": _size(28, 3072, 8192, 24, factor=32.0, tied=True),
    },
)
