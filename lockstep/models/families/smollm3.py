"""SmolLM3 (Hugging Face, 2025): Llama's layers, some of which have no rotary positions (arXiv 2501.18795)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config import ModelConfig
from . import qwen3
from .family import (
    FULL,
    SLIDING,
    Family,
    Raw,
    all_but_every,
    layer_types,
    read_windows_by_layer,
    write_optional_window,
)


def _read(raw: Raw) -> dict[str, Any]:
    unrotated = _read_unrotated_layers(raw)
    default = unrotated if raw.values.get("sliding_window") else ()
    biases = ("qkv", "o") if raw.values.get("attention_bias") else ()
    return {"unrotated_layers": unrotated, "biases": biases, **read_windows_by_layer(raw, default)}


def _read_unrotated_layers(raw: Raw) -> tuple[int, ...]:
    """By `no_rope_layers`, which has a 1 for each layer with rotary positions, or every `no_rope_layer_interval`th."""
    count, flags = raw.integer("num_hidden_layers"), raw.values.get("no_rope_layers")
    if flags is None:
        rotated = all_but_every(raw.integer("no_rope_layer_interval"), count)
        return tuple(i for i in range(count) if i not in rotated)
    fits = isinstance(flags, list) and all(isinstance(flag, int) and flag in (0, 1) for flag in flags)
    raw.refuse(not fits, f"no_rope_layers is {flags!r}; it must be a list of 1 (with rotary positions) and 0 (without)")
    raw.refuse(len(flags) < count, f"no_rope_layers has {len(flags)} entries; there are {count} layers")
    return tuple(i for i in range(count) if not flags[i])


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_optional_window(config),
        "layer_types": layer_types(config),
        "no_rope_layers": [int(i not in config.unrotated_layers) for i in range(config.num_layers)],
        "attention_bias": "qkv" in config.biases,
    }


_TINY = replace(qwen3.TINY, family="smollm3", unrotated_layers=(1, 3))

FAMILY = Family(
    "SmolLM3ForCausalLM",
    fixed={"hidden_act": ("silu", "swish"), "mlp_bias": (False, None)},
    read=_read,
    write=_write,
    extra_fields=("attention_bias",),
    sizes=("no_rope_layer_interval",),
    layer_kinds=(FULL, SLIDING),
    defaults={"tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    architectures={
        "tiny-smollm3": _TINY,
        "smollm3-3b": ModelConfig(
            128256, 2048, 11008, 36, 16, 4, 128, 65536, rope_theta=5e6, family="smollm3",
            unrotated_layers=tuple(range(3, 36, 4)),
        ),
    },
)  # fmt: skip
