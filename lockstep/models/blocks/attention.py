"""The one thing that differs between the roles: how a layer's queries reach keys and values.

Grouped-query attention calls both, and latent attention their `latent`; each has one family of operators.

Shape suffixes: T tokens, E = (N + 2K) * H fused projection, N query heads, K key/value heads, H head dim, R latent
rank, P rotated dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from ... import ops


class Latent(NamedTuple):
    """Absorbed queries, and what all their heads read, with the rotated parts apart; see `ops.latent_attention_packed`.

    `latent_TR` and `k_rope_TP` are the tokens' own, and what the cache keeps of them.
    """

    q_TNR: Tensor
    q_rope_TNP: Tensor
    latent_TR: Tensor
    k_rope_TP: Tensor
    scale: float


@dataclass(frozen=True)
class Masks:
    """Attention that does not see all keys before a query; None in a model stands for `ops.attention_*`, which does.

    `windows` are the layers' sliding windows (0: none), `name` a mask of `ops.register_mask` for all layers ("": none).
    """

    windows: tuple[int, ...]
    name: str = ""

    def of(self, layer: int) -> tuple[int, str]:
        """The arguments `window` and `mask` of `ops.flex_packed` and `ops.flex_paged`."""
        return self.windows[layer], self.name


class Attend(Protocol):
    """What a decoder is given."""

    def prepare(self, tokens: int, num_heads: int, num_kv_heads: int) -> None:
        """Find what all layers share, before the first of them."""

    def __call__(self, layer: int, qkv_TE: Tensor, by: ops.Rotation) -> Tensor:
        """Grouped-query attention, [T, N, H]."""

    def latent(self, layer: int, x: Latent) -> Tensor:
        """Latent attention: weighted sums of latents, [T, N, R]."""


@dataclass(frozen=True)
class PackedAttention:
    """Training: packed segments after shared prefixes. Fields as in `types.PackedBatch`; `masks` are the model's."""

    cu_seqlens: Tensor
    prefix_start_S: Tensor
    prefix_len_S: Tensor
    max_len: int
    masks: Masks | None = None
    tiles: dict[int, list[Tensor]] = field(default_factory=dict)  # by window

    def prepare(self, tokens: int, num_heads: int, num_kv_heads: int) -> None:
        """See `Attend.prepare`."""
        layout = self.cu_seqlens, self.prefix_start_S, self.prefix_len_S
        for window in sorted(set(self.masks.windows)) if self.masks else ():
            sizes = tokens, num_heads, num_kv_heads
            self.tiles[window] = ops.flex_tiles_packed(*sizes, *layout, self.max_len, window)

    def __call__(self, layer: int, qkv_TE: Tensor, by: ops.Rotation) -> Tensor:
        qk = ops.qk_norm_rope(qkv_TE, by)
        q_TNH, k_TKH = qk.split((by.num_heads, by.num_kv_heads), dim=1)
        v_TKH = qkv_TE.unflatten(1, (-1, qk.shape[2])).narrow(1, qk.shape[1], by.num_kv_heads)
        layout = self.cu_seqlens, self.prefix_start_S, self.prefix_len_S, self.max_len
        if self.masks is None:
            return ops.attention_packed(q_TNH, k_TKH, v_TKH, *layout)
        window, mask = self.masks.of(layer)
        return ops.flex_packed(q_TNH, k_TKH, v_TKH, *layout, window, mask, self.tiles[window])

    def latent(self, layer: int, x: Latent) -> Tensor:
        """See `Attend.latent`."""
        return ops.latent_attention_packed(*x, self.cu_seqlens, self.prefix_start_S, self.prefix_len_S, self.max_len)


@dataclass(frozen=True)
class PagedAttention:
    """Generation: new keys and values go to their slots, then queries reach the sequence's pages.

    `k_cache` and `v_cache` are [layers, pages, page_size, K, H]; with latents, [layers, pages, page_size, 1, R + P] and
    empty. The other fields are as in `ops.attention_paged` and `ops.qk_norm_rope_write_kv`; `masks` are the model's.
    """

    k_cache: Tensor
    v_cache: Tensor
    slots_T: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    context_len_S: Tensor
    max_query_len: int
    max_context_len: int
    group_rows_CW: Tensor | None = None
    shared_len_S: Tensor | None = None
    masks: Masks | None = None
    tiles: dict[int, list[Tensor]] = field(default_factory=dict)  # by window

    def prepare(self, tokens: int, num_heads: int, num_kv_heads: int) -> None:
        """See `Attend.prepare`."""
        paged = self.block_table, self.cu_seqlens, self.context_len_S, self.max_context_len
        for window in sorted(set(self.masks.windows)) if self.masks else ():
            self.tiles[window] = ops.flex_tiles_paged(tokens, num_heads, self.k_cache[0], *paged, window)

    def __call__(self, layer: int, qkv_TE: Tensor, by: ops.Rotation) -> Tensor:
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        if self.masks is None and self.max_query_len == 1 and qkv_TE.shape[0] == self.context_len_S.shape[0]:
            return ops.attention_decode(
                qkv_TE,
                *by,
                k_cache,
                v_cache,
                self.slots_T,
                self.block_table,
                self.context_len_S,
                self.max_context_len,
                self.group_rows_CW,
                self.shared_len_S,
            )
        q_TNH = ops.qk_norm_rope_write_kv(qkv_TE, by, k_cache, v_cache, self.slots_T)
        paged = self.block_table, self.cu_seqlens, self.context_len_S
        bounds = self.max_query_len, self.max_context_len
        if self.masks is None:
            return ops.attention_paged(q_TNH, k_cache, v_cache, *paged, *bounds)
        window, mask = self.masks.of(layer)
        return ops.flex_paged(q_TNH, k_cache, v_cache, *paged, *bounds, window, mask, self.tiles[window])

    def latent(self, layer: int, x: Latent) -> Tensor:
        """See `Attend.latent`."""
        cache = self.k_cache[layer].squeeze(2)
        ops.write_latent(x.latent_TR, x.k_rope_TP, cache, self.slots_T)
        return ops.latent_attention_paged(
            x.q_TNR,
            x.q_rope_TNP,
            cache,
            x.scale,
            self.block_table,
            self.cu_seqlens,
            self.context_len_S,
            self.max_query_len,
            self.max_context_len,
        )
