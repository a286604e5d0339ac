"""OLMo 2 (arXiv 2501.00656): norms after attention and feed-forward, and over all queries and all keys of a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ... import ops
from ..blocks.attention import Attend
from ..blocks.layer import Layer
from ..blocks.moe import Routing
from ..blocks.weight_slices import LayerSlice, attention_slices, feed_forward_slices
from ..blocks.weights import WeightFactory
from ..config import ModelConfig
from . import qwen3
from .family import SILU_WITHOUT_BIAS, Family, refuse_windows


class SpanningNormLayer(Layer):
    """Norms of queries and keys span all heads."""

    def make_projections(self, config: ModelConfig, weight: WeightFactory) -> int:
        values = super().make_projections(config, weight)
        self.q_norm = weight(values)
        self.k_norm = weight(config.num_kv_heads * config.head_dim)
        return values

    def attention(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        c, (q_norm, k_norm) = self.config, (self.q_norm, self.k_norm)
        assert q_norm is not None and k_norm is not None
        spread, sizes = self.spread, [self.spread.local_count(len(norm)) for norm in (q_norm, k_norm, k_norm)]
        q, k, v = self.project(x_TD).split(sizes, dim=1)
        q, k = spread.gather_all(q, k)  # their norms span all heads
        q = spread.local_columns(ops.rms_norm(q, q_norm, c.rms_norm_eps))
        k = spread.local_columns(ops.rms_norm(k, k_norm, c.rms_norm_eps))
        return self.attend(index, torch.cat((q, k, v), dim=1), rope_TH, attend)

    def project(self, x_TD: Tensor) -> Tensor:
        """Queries, keys and values of the normalized stream, [T, E]."""
        return ops.norm_linear(x_TD, self.attention_norm, self.qkv, self.config.rms_norm_eps, self.qkv_bias)


class NormAfterLayer(SpanningNormLayer):
    """Attention and a feed-forward, each followed by a norm."""

    num_pre_norms = 0

    def forward(
        self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        attended_TD = self.gathered_linear(self.attention(index, x_TD, rope_TH, attend), self.o)
        x_TD = ops.norm_add(attended_TD, self.attention_norm, x_TD, eps)
        gated_TF = ops.gate_up(x_TD, self.gate_up)
        return ops.norm_add(self.gathered_linear(gated_TF, self.down), self.mlp_norm, x_TD, eps)

    def project(self, x_TD: Tensor) -> Tensor:
        """Queries, keys and values of the stream, [T, E]."""
        return ops.linear(x_TD, self.qkv)


def spanning_attention_slices(config: ModelConfig) -> Iterator[LayerSlice]:
    yield from attention_slices(config)
    yield LayerSlice("self_attn.q_norm.weight", "q_norm", 0, config.num_heads * config.head_dim)
    yield LayerSlice("self_attn.k_norm.weight", "k_norm", 0, config.num_kv_heads * config.head_dim)


def slices(config: ModelConfig, index: int) -> Iterator[LayerSlice]:
    yield from spanning_attention_slices(config)
    yield LayerSlice("post_attention_layernorm.weight", "attention_norm", 0, config.hidden_size)
    yield from feed_forward_slices(config, index)
    yield LayerSlice("post_feedforward_layernorm.weight", "mlp_norm", 0, config.hidden_size)


_TINY = replace(qwen3.TINY, family="olmo2", tie_word_embeddings=False)

FAMILY = Family(
    "Olmo2ForCausalLM",
    NormAfterLayer,
    slices,
    fixed=SILU_WITHOUT_BIAS,
    check=refuse_windows,
    defaults={"rms_norm_eps": 1e-5},
    architectures={
        "tiny-olmo2": _TINY,
        "olmo2-1b": ModelConfig(100352, 2048, 8192, 16, 16, 16, 128, 4096, 1e-6, 500000.0, False, family="olmo2"),
        "olmo2-7b": ModelConfig(100352, 4096, 11008, 32, 32, 32, 128, 4096, 1e-6, 500000.0, False, family="olmo2"),
    },
)
