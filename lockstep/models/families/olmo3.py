"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a sliding window and unscaled positions in three of four layers."""

from __future__ import annotations

from dataclasses import replace

from ..blocks.rope import YarnScaling
from ..config import ModelConfig
from . import qwen3
from .family import (
    FULL,
    ROPE_BY_LAYER_TYPE,
    SILU_WITHOUT_BIAS,
    SLIDING,
    Family,
    all_but_every,
    read_alternating_windows,
    read_rope_by_layer_type,
    require_truncated_yarn,
    write_rope_by_layer_type,
)
from .olmo2 import NormAfterLayer, slices

_THETA = 500000.0  # transformers' default for both kinds of layers
_TINY = replace(
    qwen3.TINY, family="olmo3", tie_word_embeddings=False, sliding_window=48, sliding_layers=(0, 1, 2),
    local_rope_theta=10000.0, rope_scaling=YarnScaling(8.0, 256),
)  # fmt: skip


FAMILY = Family(
    "Olmo3ForCausalLM",
    NormAfterLayer,
    slices,
    fixed=SILU_WITHOUT_BIAS,
    read=lambda raw: read_alternating_windows(raw, 4),
    write=write_rope_by_layer_type,
    rope=lambda raw: read_rope_by_layer_type(raw, _THETA),
    extra_fields=(ROPE_BY_LAYER_TYPE,),
    layer_kinds=(FULL, SLIDING),
    check=require_truncated_yarn,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": _THETA, "sliding_window": 4096},
    architectures={
        "tiny-olmo3": _TINY,
        "olmo3-7b": ModelConfig(
            100278, 4096, 11008, 32, 32, 32, 128, 65536, 1e-6, _THETA, False, family="olmo3", sliding_window=4096,
            sliding_layers=all_but_every(4, 32), local_rope_theta=_THETA,
            rope_scaling=YarnScaling(8.0, 8192),
        ),
    },
)  # fmt: skip
