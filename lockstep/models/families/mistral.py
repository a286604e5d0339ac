"""Mistral (arXiv 2310.06825): either all layers have a sliding window, or none."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from . import qwen3
from .family import Family, read_uniform_window, require_uniform_windows, write_uniform_window

_TINY = replace(qwen3.TINY, family="mistral", tie_word_embeddings=False, sliding_window=64, sliding_layers=(0, 1, 2, 3))


def _size(layers: int) -> ModelConfig:
    return ModelConfig(
        32000, 4096, 14336, layers, 32, 8, 128, 32768, 1e-5, 10000.0, False, family="mistral", sliding_window=4096,
        sliding_layers=tuple(range(layers)),
    )  # fmt: skip


FAMILY = Family(
    "MistralForCausalLM",
    fixed={"hidden_act": ("silu", "swish")},
    read=read_uniform_window,
    write=write_uniform_window,
    check=require_uniform_windows,
    defaults={"sliding_window": 4096},
    multimodal_types=("mistral3",),
    architectures={"tiny-mistral": _TINY, "mistral-7b": _size(32), "mistral-7b-8-layers": _size(8)},
)
