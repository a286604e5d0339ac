"""The decoder layer of most families, in parts that other families combine differently.

Shape suffixes: T tokens, D hidden, E fused projection, F feed-forward, H head dim.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from ... import ops
from ...distributed.placement import ROWS, Placement
from ..config import ModelConfig
from .attention import Attend
from .moe import MixtureOfExperts, Routing
from .weights import WeightFactory


class Layer(nn.Module):
    """Grouped-query attention and a feed-forward, each preceded by a norm and added to the residual stream.

    Attributes:
        num_heads, num_kv_heads: this rank's.
        qk_norm: whether queries and keys are normalized per head.
        norm_offset: added to the weights of norms.
        num_pre_norms: how many norms of the stream are inputs of products, so that a backward pass needs their results.
        activation: of the gated feed-forward.
    """

    qk_norm: ClassVar[bool] = False
    num_pre_norms: ClassVar[int] = 2
    norm_offset: ClassVar[float] = 0.0
    activation: ClassVar[str] = "silu"

    def __init__(self, config: ModelConfig, index: int, weight: WeightFactory) -> None:
        super().__init__()
        self.config, self.spread = config, weight.spread
        self.num_heads, self.num_kv_heads = map(self.spread.local_count, (config.num_heads, config.num_kv_heads))
        self.attention_norm = self.norm(config.hidden_size, weight)
        values = self.make_projections(config, weight)
        self.scores = ops.AttentionScores(window=config.windows[index], scale=config.attention_scale)
        self.sinks = weight(config.num_heads, on=ROWS, fill=0.0) if config.attention_sinks else None
        self.o = weight(config.hidden_size, values, on=ROWS)
        self.o_bias = weight(config.hidden_size, on=ROWS, fill=0.0) if "o" in config.biases else None
        self.mlp_norm = self.norm(config.hidden_size, weight)
        self.moe = None
        if config.moe is not None and config.is_moe(index):
            self.moe = MixtureOfExperts(config.moe, config.hidden_size, weight)
        else:
            width = config.intermediate_size
            self.gate_up = weight(2 * width, config.hidden_size, on=Placement(tp=0, blocks=(width, width)))
            self.down = weight(config.hidden_size, width, on=ROWS)

    def make_projections(self, config: ModelConfig, weight: WeightFactory) -> int:
        """Make the parameters that give queries, keys and values; return the width of all heads' values."""
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        blocks = heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
        self.qkv = weight(sum(blocks), config.hidden_size, on=Placement(tp=0, blocks=blocks))
        biased = "qkv" in config.biases
        self.qkv_bias = weight(sum(blocks), on=Placement(tp=0, blocks=blocks), fill=0.0) if biased else None
        self.q_norm = self.norm(head_dim, weight) if self.qk_norm else None
        self.k_norm = self.norm(head_dim, weight) if self.qk_norm else None
        return blocks[0]

    def norm(self, size: int, weight: WeightFactory) -> nn.Parameter:
        return weight(size, fill=1.0 - self.norm_offset)

    def forward(
        self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend, routes: list[Routing] | None = None
    ) -> Tensor:
        """The residual stream after layer `index`, [T, D]; the layer's `Routing`, if any, is appended to `routes`."""
        eps, offset = self.config.rms_norm_eps, self.norm_offset
        added = self.spread.add_product
        attended_TW = self.attention(index, x_TD, rope_TH, attend)
        x_TD, own_TW = added(ops.linear_add, attended_TW, self.o, x_TD, self.o_bias)
        if self.moe is not None:
            return x_TD + self.moe(ops.rms_norm(x_TD, self.mlp_norm, eps, offset), routes)
        gated_TF = ops.norm_gate_up(x_TD, self.mlp_norm, self.gate_up, eps, offset, self.activation)
        return added(ops.linear_add, gated_TF, self.down, x_TD, None, own_TW)[0]

    def gathered_linear(self, x_TW: Tensor, weight: Tensor) -> Tensor:
        return self.spread.gather_columns(ops.linear(self.spread.gather_columns(x_TW), weight))

    def attention(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        """Attention over the normalized stream by this rank's heads, before the output projection."""
        norm, eps = self.attention_norm, self.config.rms_norm_eps
        qkv_TE = ops.norm_linear(x_TD, norm, self.qkv, eps, self.qkv_bias, self.norm_offset)
        return self.attend(index, qkv_TE, rope_TH, attend)

    def attend(self, index: int, qkv_TE: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        """Attention of projected queries, keys and values, after per-head norms (if `qk_norm`) and rotation."""
        c, (q_norm, k_norm) = self.config, (self.q_norm, self.k_norm) if self.qk_norm else (None, None)
        by = ops.Rotation(q_norm, k_norm, rope_TH, self.num_heads, self.num_kv_heads, c.rms_norm_eps)
        scores = self.scores if self.sinks is None else self.scores._replace(sinks_N=self.sinks)
        return attend(index, qkv_TE, by, scores, self.norm_offset).flatten(1)


class QKNormLayer(Layer):
    qk_norm = True
