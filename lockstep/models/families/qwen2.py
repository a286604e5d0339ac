"""Qwen2 and 2.5 (arXiv 2412.15115): the projections to queries, keys and values have biases."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from . import qwen3
from .family import DEFAULT_WINDOW, FULL, SLIDING, Family, read_windows_by_layer, write_windows_by_layer

_TINY = replace(qwen3.TINY, family="qwen2", biases=("qkv",))


def _size(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 151936) -> ModelConfig:
    return ModelConfig(
        vocab, hidden, ffn, layers, heads, kv_heads, hidden // heads, 32768, tie_word_embeddings=hidden < 3584,
        family="qwen2", biases=("qkv",),
    )  # fmt: skip


FAMILY = Family(
    "Qwen2ForCausalLM",
    fixed={"hidden_act": ("silu", "swish")},
    read=lambda raw: {"biases": ("qkv",), **read_windows_by_layer(raw)},
    write=write_windows_by_layer,
    layer_kinds=(FULL, SLIDING),
    defaults=DEFAULT_WINDOW,
    architectures={
        "tiny-qwen2": _TINY,
        "qwen2.5-0.5b": _size(24, 896, 4864, 14, 2),
        "qwen2.5-1.5b": _size(28, 1536, 8960, 12, 2),
        "qwen2.5-3b": _size(36, 2048, 11008, 16, 2),
        "qwen2.5-7b": _size(28, 3584, 18944, 28, 4, 152064),
        "qwen2.5-14b": _size(48, 5120, 13824, 40, 8, 152064),
        "qwen2.5-32b": _size(64, 5120, 27648, 40, 8, 152064),
    },
)
