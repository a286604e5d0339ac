"""The one thing that differs between the roles: how a layer's queries reach keys and values.

Both are callables `attend(layer, q_TNH, k_TKH, v_TKH) -> [T, N, H]` over one family of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .. import ops

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PackedAttention:
    """Training: packed segments after shared prefixes. Fields as in `types.PackedBatch`."""

    cu_seqlens: Tensor
    prefix_start_S: Tensor
    prefix_len_S: Tensor
    max_len: int

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        return ops.attention_packed(
            q_TNH, k_TKH, v_TKH, self.cu_seqlens, self.prefix_start_S, self.prefix_len_S, self.max_len
        )


@dataclass(frozen=True)
class PagedAttention:
    """Generation: new keys and values go to their slots, then queries reach the sequence's pages.

    `k_cache` and `v_cache` are [layers, pages, page_size, K, H]; the other fields as in `ops.attention_paged` and
    `ops.write_kv`.
    """

    k_cache: Tensor
    v_cache: Tensor
    slots_T: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    context_len_S: Tensor
    max_query_len: int
    max_context_len: int

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        ops.write_kv(k_TKH, v_TKH, k_cache, v_cache, self.slots_T)
        return ops.attention_paged(
            q_TNH,
            k_cache,
            v_cache,
            self.block_table,
            self.cu_seqlens,
            self.context_len_S,
            self.max_query_len,
            self.max_context_len,
        )
