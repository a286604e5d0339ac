"""Phi-3 and 4 (arXiv 2404.14219, 2412.08905): Llama's layers, perhaps with a window; folders have fused projections.

Models with a context of 131,072 scale positions by `longrope`, which is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...errors import refuse
from ..blocks.weight_slices import LayerSlice
from ..config import ModelConfig
from . import qwen3
from .family import (
    SILU_WITHOUT_BIAS,
    Family,
    golden_tiny,
    read_uniform_window,
    require_uniform_windows,
    write_uniform_window,
)


def _write(config: ModelConfig) -> dict[str, Any]:
    return write_uniform_window(config) | {"original_max_position_embeddings": config.max_position_embeddings}


def _check(config: ModelConfig) -> None:
    require_uniform_windows(config)
    scaled = config.rope_scaling is not None  # transformers reads yarn as longrope, and no other scaling
    refuse(scaled, "model config: rope_scaling of a phi3 is not supported; positions must not be scaled")


def _slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    hidden, width = config.hidden_size, config.intermediate_size
    heads = config.num_heads + 2 * config.num_kv_heads
    yield LayerSlice("input_layernorm.weight", "attention_norm", 0, hidden)
    yield LayerSlice("self_attn.qkv_proj.weight", "qkv", 0, heads * config.head_dim)
    yield LayerSlice("self_attn.o_proj.weight", "o", 0, hidden)
    yield LayerSlice("post_attention_layernorm.weight", "mlp_norm", 0, hidden)
    yield LayerSlice("mlp.gate_up_proj.weight", "gate_up", 0, 2 * width)
    yield LayerSlice("mlp.down_proj.weight", "down", 0, hidden)


_TINY = replace(qwen3.TINY, family="phi3", tie_word_embeddings=False, sliding_window=64, sliding_layers=(0, 1, 2, 3))

FAMILY = Family(
    "Phi3ForCausalLM",
    slices=_slices,
    fixed=SILU_WITHOUT_BIAS,
    read=read_uniform_window,
    write=_write,
    check=_check,
    defaults={"rms_norm_eps": 1e-5},
    golden=golden_tiny(_TINY),
    architectures={
        "tiny-phi3": _TINY,
        "phi3-mini": ModelConfig(
            32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e-5, 10000.0, False, family="phi3", sliding_window=2047,
            sliding_layers=tuple(range(32)),
        ),
        "phi4": ModelConfig(100352, 5120, 17920, 40, 40, 10, 128, 16384, 1e-5, 250000.0, False, family="phi3"),
    },
)  # fmt: skip
