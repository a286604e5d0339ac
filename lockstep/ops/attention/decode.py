"""Attention of one new token a sequence, from the fused projection on: the bits of the separate operators.

Shape suffixes: E fused projection, N query heads, H head dim, S sequences, C groups of sequences, W rows of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator
from ..records import ALONE, Contexts, KVPages, Paged, PrefixGroups, Rotation
from ..rope.fused import qk_norm_rope_write_kv
from .operator import attention_paged


@operator(
    "lockstep::attention_decode",
    mutates=("k_cache", "v_cache"),
    cuda="triton_decode:attention_decode",
    fake=lambda qkv_SE, by, *_: qkv_SE.new_empty(qkv_SE.shape[0], by.num_heads, by.cos_sin_TH.shape[1]),
)
def attention_decode(
    qkv_SE: Tensor,
    by: Rotation,
    cache: KVPages,
    slots_S: Tensor,
    contexts: Contexts,
    groups: PrefixGroups = ALONE,
) -> Tensor:
    """`qk_norm_rope_write_kv` and `attention_paged` of one new token a sequence, [S, N, H]. No autograd.

    Args:
        qkv_SE: the tokens' fused projections.
        slots_S: where each sequence's last position lies by its block table. Elsewhere for a row that is idle: what it
            attends to means nothing.
    """
    q_SNH = qk_norm_rope_write_kv.on_cpu[qkv_SE.dtype](qkv_SE, by, cache, slots_S)
    cu_seqlens = torch.arange(qkv_SE.shape[0] + 1, dtype=torch.int32)
    paged = Paged(contexts.block_table, cu_seqlens, contexts.context_len_S, 1, contexts.max_context_len)
    return attention_paged.on_cpu[q_SNH.dtype](q_SNH, cache, paged, groups)
