"""Gemma 3's text model (arXiv 2503.19786): norms before and after each block, with weights centered on 0; GELU; and in
five of six layers a sliding window and a separate rotary base."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ... import ops
from ..blocks.attention import Attend
from ..blocks.layer import QKNormLayer
from ..blocks.moe import Routing
from ..blocks.rope import RopeScaling, is_positive
from ..blocks.weight_slices import LayerSlice, attention_slices, feed_forward_slices, qk_norm_slices
from ..blocks.weights import WeightFactory
from ..config import ModelConfig
from . import qwen3
from .family import (
    FULL,
    ROPE_BY_LAYER_TYPE,
    SLIDING,
    Family,
    Raw,
    all_but_every,
    read_alternating_windows,
    read_rope_by_layer_type,
    require_truncated_yarn,
    write_rope_by_layer_type,
)

OFFSET = 1.0  # added to the weights of norms
GELU = "gelu_tanh"


class SandwichLayer(QKNormLayer):
    """Attention and a feed-forward, each between two norms, with residual connections."""

    norm_offset = OFFSET

    def __init__(self, config: ModelConfig, index: int, weight: WeightFactory) -> None:
        super().__init__(config, index, weight)
        self.attention_out_norm = weight(config.hidden_size, fill=0.0)
        self.mlp_out_norm = weight(config.hidden_size, fill=0.0)

    def forward(
        self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        attended_TD = self.gathered_linear(self.attention(index, x_TD, rope_TH, attend), self.o)
        x_TD = ops.norm_add(attended_TD, self.attention_out_norm, x_TD, eps, OFFSET)
        gated_TF = ops.norm_gate_up(x_TD, self.mlp_norm, self.gate_up, eps, OFFSET, GELU)
        return ops.norm_add(self.gathered_linear(gated_TF, self.down), self.mlp_out_norm, x_TD, eps, OFFSET)


def _slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    hidden = config.hidden_size
    yield LayerSlice("input_layernorm.weight", "attention_norm", 0, hidden)
    yield from attention_slices(config)
    yield from qk_norm_slices(config)
    yield LayerSlice("post_attention_layernorm.weight", "attention_out_norm", 0, hidden)
    yield LayerSlice("pre_feedforward_layernorm.weight", "mlp_norm", 0, hidden)
    yield from feed_forward_slices(config, index)
    yield LayerSlice("post_feedforward_layernorm.weight", "mlp_out_norm", 0, hidden)


def _read(raw: Raw) -> dict[str, Any]:
    found: Any = raw.values.get("query_pre_attn_scalar")
    raw.refuse(not is_positive(found), f"query_pre_attn_scalar is {found!r}; it must be a number above 0")
    period = raw.integer("sliding_window_pattern")
    raw.refuse(period < 1, f"sliding_window_pattern is {period}; it must be at least 1")
    return {"attention_scale": float(found) ** -0.5, **read_alternating_windows(raw, period)}


def _write(config: ModelConfig) -> dict[str, Any]:
    scalar = round(config.attention_scale**-2, 9)
    return {
        **write_rope_by_layer_type(config),
        "rope_local_base_freq": config.local_rope_theta,
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
    }


def _size(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, window: int = 1024) -> ModelConfig:
    small = hidden < 2000
    return ModelConfig(
        262144 if small else 262208, hidden, ffn, layers, heads, kv_heads, 256, 32768 if small else 131072,
        family="gemma3_text", rope_scaling=None if small else RopeScaling("linear", 8.0), sliding_window=window,
        sliding_layers=all_but_every(6, layers), local_rope_theta=10000.0, attention_scale=256**-0.5,
    )  # fmt: skip


_TINY = replace(
    qwen3.TINY, family="gemma3_text", num_layers=6, sliding_window=48, sliding_layers=all_but_every(6, 6),
    local_rope_theta=5000.0, attention_scale=24**-0.5,
)  # fmt: skip

FAMILY = Family(
    "Gemma3ForCausalLM",
    SandwichLayer,
    _slices,
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False, None),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    read=_read,
    write=_write,
    rope=lambda raw: read_rope_by_layer_type(raw, raw.values.get("rope_local_base_freq") or 10000.0),
    extra_fields=(ROPE_BY_LAYER_TYPE,),
    layer_kinds=(FULL, SLIDING),
    check=require_truncated_yarn,
    norm_offset=OFFSET,
    embedding_scale=lambda config: config.hidden_size**0.5,
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "tie_word_embeddings": True, "rope_theta": 1e6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    multimodal_types=("gemma3",),
    architectures={
        "tiny-gemma3": _TINY,
        "gemma3-1b": _size(26, 1152, 6912, 4, 1, 512),
        "gemma3-4b": _size(34, 2560, 10240, 8, 4),
        "gemma3-12b": _size(48, 3840, 15360, 16, 8),
    },
)  # fmt: skip
