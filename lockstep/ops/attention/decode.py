"""Attention of one new token a sequence, from the fused projection on: the bits of the separate operators.

Shape suffixes: E fused projection, N query heads, H head dim, S sequences, C groups of sequences, W rows of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator
from ..records import Rotation
from ..rope.fused import qk_norm_rope_write_kv
from .operator import attention_paged


@operator(
    "lockstep::attention_decode",
    mutates=("k_cache", "v_cache"),
    cuda="triton_decode:attention_decode",
    fake=lambda qkv_SE, q_weight_H, k_weight_H, cos_sin_SH, num_heads, *_: qkv_SE.new_empty(
        qkv_SE.shape[0], num_heads, cos_sin_SH.shape[1]
    ),
)
def attention_decode(
    qkv_SE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_SH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_S: Tensor,
    block_table: Tensor,
    context_len_S: Tensor,
    max_context_len: int,
    group_rows_CW: Tensor | None = None,
    shared_len_S: Tensor | None = None,
) -> Tensor:
    """`qk_norm_rope_write_kv` and `attention_paged` of one new token a sequence, [S, N, H]. No autograd.

    Args:
        qkv_SE: the tokens' fused projections; arguments up to `slots_S` are as in `qk_norm_rope_write_kv`.
        slots_S: where each sequence's last position lies by its block table. Elsewhere for a row that is idle: what it
            attends to means nothing.
        block_table: and the others are as in `attention_paged`.
    """
    rotation = Rotation(q_weight_H, k_weight_H, cos_sin_SH, num_heads, num_kv_heads, eps)
    q_SNH = qk_norm_rope_write_kv.on_cpu(qkv_SE, rotation, k_cache, v_cache, slots_S)
    cu_seqlens = torch.arange(qkv_SE.shape[0] + 1, dtype=torch.int32)
    return attention_paged.on_cpu(q_SNH, k_cache, v_cache, block_table, cu_seqlens, context_len_S, 1, max_context_len)
