"""The one thing that differs between the roles: how a layer's queries reach keys and values.

Grouped-query attention calls the role's `Attend`, latent attention its `latent`; each has one family of operators.

Shape suffixes: T tokens, E = (N + 2K) * H fused projection, N query heads, K key/value heads, H head dim, R latent
rank, P rotated dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ... import ops


@dataclass(frozen=True)
class Masks:
    """Masks for FlexAttention. A model without them uses `ops.attention_*`, with each layer's `AttentionScores`.

    `windows` are the layers' sliding windows (0: none), `name` a mask of `ops.register_mask` for all layers ("": none).
    """

    windows: tuple[int, ...]
    name: str = ""

    def of(self, layer: int, tiles: dict[int, list[Tensor]], scores: ops.AttentionScores) -> ops.FlexMask:
        """A layer's mask, with the tiles of its window."""
        assert scores.sinks_N is None and not scores.softcap, "flex attention has a window and a mask"
        return ops.FlexMask(self.windows[layer], self.name, tiles[self.windows[layer]])


class Attend(Protocol):
    """A role's attention, given to the decoder."""

    def prepare(self, sizes: ops.FlexSizes) -> None:
        """Compute what all layers share, before the first of them."""

    def __call__(
        self, layer: int, qkv_TE: Tensor, by: ops.Rotation, scores: ops.AttentionScores, weight_offset: float
    ) -> Tensor:
        """Grouped-query attention, [T, N, H]; `weight_offset` is added to the weights of the norms in `by`."""

    def latent(self, layer: int, x: ops.Latent) -> Tensor:
        """Latent attention: weighted sums of latents, [T, N, R]."""


@dataclass(frozen=True)
class PackedAttention:
    """Training: packed segments, each after an optional shared prefix; `masks` are the model's."""

    packed: ops.Packed
    masks: Masks | None = None
    tiles: dict[int, list[Tensor]] = field(default_factory=dict)  # by window

    def prepare(self, sizes: ops.FlexSizes) -> None:
        for window in sorted(set(self.masks.windows)) if self.masks else ():
            self.tiles[window] = ops.flex_tiles_packed(self.packed, sizes, window)

    def __call__(
        self, layer: int, qkv_TE: Tensor, by: ops.Rotation, scores: ops.AttentionScores, weight_offset: float
    ) -> Tensor:
        qk = ops.qk_norm_rope(qkv_TE, by, weight_offset)
        q_TNH, k_TKH = qk.split((by.num_heads, by.num_kv_heads), dim=1)
        v_TKH = qkv_TE.unflatten(1, (-1, qk.shape[2])).narrow(1, qk.shape[1], by.num_kv_heads)
        if self.masks is None:
            return ops.attention_packed(q_TNH, k_TKH, v_TKH, self.packed, scores)
        return ops.flex_packed(q_TNH, k_TKH, v_TKH, self.packed, self.masks.of(layer, self.tiles, scores))

    def latent(self, layer: int, x: ops.Latent) -> Tensor:
        return ops.mla_packed(x, self.packed)


@dataclass(frozen=True)
class PagedAttention:
    """Generation: new keys and values are stored in their slots (int64 [T]), then queries read their sequence's pages.

    The pages' tensors are [layers, pages, page_size, K, H] each; for latents, [layers, pages, page_size, 1, R + P] and
    an empty one. `contexts` is given if each sequence has one new token, and says the same as `paged`. `masks` are the
    model's.
    """

    pages: ops.KVPages
    slots_T: Tensor
    paged: ops.Paged
    contexts: ops.Contexts | None = None
    groups: ops.PrefixGroups = ops.NO_GROUPS
    masks: Masks | None = None
    tiles: dict[int, list[Tensor]] = field(default_factory=dict)  # by window

    def prepare(self, sizes: ops.FlexSizes) -> None:
        for window in sorted(set(self.masks.windows)) if self.masks else ():
            self.tiles[window] = ops.flex_tiles_paged(self.paged, sizes, self.pages.k_cache[0], window)

    def __call__(
        self, layer: int, qkv_TE: Tensor, by: ops.Rotation, scores: ops.AttentionScores, weight_offset: float
    ) -> Tensor:
        cache = ops.KVPages(self.pages.k_cache[layer], self.pages.v_cache[layer])
        if self.masks is None and self.contexts is not None:
            by_sequence = self.contexts, self.groups
            return ops.attention_decode(qkv_TE, by, cache, self.slots_T, *by_sequence, scores, weight_offset)
        q_TNH = ops.qk_norm_rope_write_kv(qkv_TE, by, cache, self.slots_T, weight_offset)
        if self.masks is None:
            return ops.attention_paged(q_TNH, cache, self.paged, self.groups, scores)
        return ops.flex_paged(q_TNH, cache, self.paged, self.masks.of(layer, self.tiles, scores))

    def latent(self, layer: int, x: ops.Latent) -> Tensor:
        cache = self.pages.k_cache[layer].squeeze(2)
        ops.mla_write(x.latent_TR, x.k_rope_TP, cache, self.slots_T)
        return ops.mla_paged(x.q_TNR, x.q_rope_TNP, cache, x.scale, self.paged)
