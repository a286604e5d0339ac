"""Attention of one new token a sequence from the fused projection on, and what comes before it alone: the bits of the
separate operators, in fewer kernels on a GPU.

Shape suffixes: T rows, E fused projection, N query heads, K key/value heads, H head dim, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator
from ..records import ALONE, Contexts, KVPages, Paged, PrefixGroups, Rotation
from ..rope.operator import qk_norm_rope
from .operator import attention_paged, write_kv


def _queries_fake(qkv_TE, by, *_):
    heads = by.num_heads + (0 if qkv_TE.is_cuda else by.num_kv_heads)  # strides as the implementations leave them
    return qkv_TE.new_empty(qkv_TE.shape[0], heads, by.cos_sin_TH.shape[1])[:, : by.num_heads]


@operator(
    "lockstep::qk_norm_rope_write_kv",
    mutates=("k_cache", "v_cache"),
    cuda=".rope.triton:qk_norm_rope_write_kv",
    fake=_queries_fake,
)
def qk_norm_rope_write_kv(qkv_TE: Tensor, by: Rotation, cache: KVPages, slots_T: Tensor) -> Tensor:
    """`qk_norm_rope`, then `write_kv` of the keys and of the projection's values; the queries, [T, N, H]. No
    autograd."""
    qk = qk_norm_rope.on_cpu[qkv_TE.dtype](qkv_TE, by)
    v_TKH = qkv_TE[:, qk.shape[1] * qk.shape[2] :].unflatten(1, (by.num_kv_heads, qk.shape[2]))
    write_kv.on_cpu[qk.dtype](qk[:, by.num_heads :], v_TKH, cache, slots_T)
    return qk[:, : by.num_heads]


@operator(
    "lockstep::attention_decode",
    mutates=("k_cache", "v_cache"),
    cuda="triton_decode:attention_decode",
    fake=lambda qkv_SE, by, *_: qkv_SE.new_empty(qkv_SE.shape[0], by.num_heads, by.cos_sin_TH.shape[1]),
)
def attention_decode(
    qkv_SE: Tensor, by: Rotation, cache: KVPages, slots_S: Tensor, contexts: Contexts, groups: PrefixGroups = ALONE
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
