"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), absorbed in both roles: a query is
multiplied by its head's key projection and attends to the latents themselves, and the weighted sum of latents is
multiplied by the head's value projection. So only the latent and one rotated key are cached.

Shape suffixes: T tokens, D hidden, E fused down-projection, Q query rank, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import ops
from ...distributed.placement import ROWS, Placement
from ..config import ModelConfig
from .attention import Attend
from .layer import Layer
from .rope import YarnScaling
from .weights import WeightFactory

LATENT_EPS = 1e-6  # for the latents' norms, whatever the model's own: Hugging Face's DeepseekV3RMSNorm default


class LatentAttention(nn.Module):
    """The weights of a layer's attention, except its output projection. `down` stacks the projections of the hidden
    state: to the query latent (or the queries), the latent, and the rotated key."""

    def __init__(self, config: ModelConfig, weight: WeightFactory) -> None:
        super().__init__()
        m = config.mla
        assert m is not None
        self.config, self.spread = m, weight.spread
        self.num_heads = weight.spread.local_count(config.num_heads)
        queries = config.num_heads * (m.nope_dim + m.rope_dim)
        blocks = m.q_rank or queries, m.kv_rank, m.rope_dim
        self.widths = tuple(map(weight.spread.local_count, blocks))
        self.down = weight(sum(blocks), config.hidden_size, on=Placement(tp=0, blocks=blocks))
        self.q_norm = None if m.q_rank is None else weight(m.q_rank)
        self.q_up = None if m.q_rank is None else weight(queries, m.q_rank, on=ROWS)
        self.kv_norm = weight(m.kv_rank)
        self.kv_up = weight(config.num_heads * (m.nope_dim + m.v_dim), m.kv_rank, on=ROWS)
        self.scale = (m.nope_dim + m.rope_dim) ** -0.5
        if isinstance(config.rope_scaling, YarnScaling):
            self.scale *= config.rope_scaling.score_factor

    def forward(self, index: int, x_TD: Tensor, norm_D: Tensor, eps: float, rope_TH: Tensor, attend: Attend) -> Tensor:
        """Attention of layer `index` over the normalized hidden state, [T, N * v_dim], of this rank's heads."""
        m, heads = self.config, self.num_heads
        down_TE = ops.norm_linear(x_TD, norm_D, self.down, eps)
        q_TE, latent_TR, k_rope_TP = down_TE.split(self.widths, dim=1)
        if self.q_norm is None or self.q_up is None:
            latent_TR, k_rope_TP = self.spread.gather_all(latent_TR, k_rope_TP)
        else:
            q_TE, latent_TR, k_rope_TP = self.spread.gather_all(q_TE, latent_TR, k_rope_TP)
            q_TE = ops.norm_linear(q_TE, self.q_norm, self.q_up, LATENT_EPS)
        latent_TR = ops.rms_norm(latent_TR, self.kv_norm, LATENT_EPS)
        q_TNH, q_rope_TNP = q_TE.unflatten(1, (heads, -1)).split((m.nope_dim, m.rope_dim), dim=2)
        rotary_TE = torch.cat((q_rope_TNP.flatten(1), k_rope_TP), dim=1)
        rotated = ops.qk_norm_rope(rotary_TE, ops.Rotation(None, None, rope_TH, heads, 1, 0.0))
        q_rope_TNP, k_rope_T1P = rotated.split((heads, 1), dim=1)
        key_up, value_up = self.kv_up.unflatten(0, (heads, -1)).split((m.nope_dim, m.v_dim), dim=1)
        q_TNR = ops.per_head_linear(q_TNH, key_up.transpose(1, 2))
        latents = ops.Latent(q_TNR, q_rope_TNP, latent_TR, k_rope_T1P.squeeze(1), self.scale)
        return ops.per_head_linear(attend.latent(index, latents), value_up).flatten(1)


class LatentLayer(Layer):
    def make_projections(self, config: ModelConfig, weight: WeightFactory) -> int:
        assert config.mla is not None
        self.mla = LatentAttention(config, weight)
        return config.num_heads * config.mla.v_dim

    def attention(self, index: int, x_TD: Tensor, rope_TH: Tensor, attend: Attend) -> Tensor:
        return self.mla(index, x_TD, self.attention_norm, self.config.rms_norm_eps, rope_TH, attend)
