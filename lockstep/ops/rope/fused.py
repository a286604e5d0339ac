"""Queries and keys normalized and rotated, and keys and values written to the cache, in one kernel on a GPU.

Shape suffixes: T rows, E fused projection, N query heads, K key/value heads, H head dim, P pages.
"""

from __future__ import annotations

from torch import Tensor

from ..attention.operator import write_kv
from ..operator import operator
from ..records import KVPages, Rotation
from .operator import qk_norm_rope


def _fake(qkv_TE, by, *_):
    heads = by.num_heads + (0 if qkv_TE.is_cuda else by.num_kv_heads)  # strides as the implementations leave them
    return qkv_TE.new_empty(qkv_TE.shape[0], heads, by.cos_sin_TH.shape[1])[:, : by.num_heads]


@operator(
    "lockstep::qk_norm_rope_write_kv",
    mutates=("k_cache", "v_cache"),
    cuda="triton:qk_norm_rope_write_kv",
    fake=_fake,
)
def qk_norm_rope_write_kv(qkv_TE: Tensor, by: Rotation, cache: KVPages, slots_T: Tensor) -> Tensor:
    """`qk_norm_rope`, then `write_kv` of the keys and of the projection's values; the queries, [T, N, H]. No
    autograd."""
    qk = qk_norm_rope.on_cpu[qkv_TE.dtype](qkv_TE, by)
    v_TKH = qkv_TE[:, qk.shape[1] * qk.shape[2] :].unflatten(1, (by.num_kv_heads, qk.shape[2]))
    write_kv.on_cpu[qk.dtype](qk[:, by.num_heads :], v_TKH, cache, slots_T)
    return qk[:, : by.num_heads]
