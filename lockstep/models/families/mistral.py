"""Mistral (arXiv 2310.06825): all layers have a sliding window, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import refuse
from ..config import ModelConfig
from . import qwen3
from .family import Family, Raw, odd_words

_TINY = replace(
    qwen3.TINY, family="mistral", tie_word_embeddings=False, sliding_window=64, sliding_layers=(0, 1, 2, 3)
)  # fmt: skip


def _read(raw: Raw) -> dict[str, Any]:
    if not raw.values.get("sliding_window"):
        return {}
    return {"sliding_window": raw.integer("sliding_window"), "sliding_layers": _all(raw.integer("num_hidden_layers"))}


def _all(layers: int) -> tuple[int, ...]:
    return tuple(range(layers))


def _check(config: ModelConfig) -> None:
    some = 0 < len(config.sliding_layers) < config.num_layers
    refuse(some, f"model config: sliding_layers must be all layers of a {config.family}, or none")


def _size(layers: int, window: int) -> ModelConfig:
    """Of the 7B."""
    return ModelConfig(
        32000, 4096, 14336, layers, 32, 8, 128, 32768, 1e-5, 10000.0, False, family="mistral", sliding_window=window,
        sliding_layers=_all(layers) if window else (),
    )  # fmt: skip


FAMILY = Family(
    "MistralForCausalLM",
    fixed={"hidden_act": ("silu", "swish")},
    read=_read,
    write=lambda config: {"sliding_window": config.sliding_window or None},
    check=_check,
    defaults={"sliding_window": 4096},
    inside=("mistral3",),
    golden=odd_words(_TINY),
    architectures={
        "tiny-mistral": _TINY,
        "mistral-7b": _size(32, 4096),
        "mistral-7b-8-layers": _size(8, 4096),
    },
)
