"""Attention with sliding windows and custom masks, for both roles: FlexAttention (`torch.nn.attention`) on a GPU.

As in `attention`, a query's result depends on the keys' absolute positions only: keys are taken in tiles of `KEY_TILE`
at absolute positions in ascending order, wherever they lie. There are no splits. A query that sees no key gives zero.

On a CPU, torch's flex_attention has no backward, and its order of additions depends on shapes, so the reference of
`attention` takes the mask instead.

Shape suffixes: T rows, S segments or sequences, N query heads, K key/value heads, H head dim, P pages.
"""

from __future__ import annotations

from torch import Tensor

from ..operator import like, operator, save, saved_values
from ..records import FlexMask, FlexSizes, KVPages, Packed, Paged
from . import reference
from .reference import visibility


def flex_tiles_packed(layout: Packed, sizes: FlexSizes, window: int) -> list[Tensor]:
    """Where a GPU finds the queries and keys of packed segments, the same for all layers with this window; empty on a
    CPU. A prefix must begin a segment that has no prefix itself."""
    return _tiles_packed(layout, sizes, window) if layout.cu_seqlens.is_cuda else []


def flex_tiles_paged(layout: Paged, sizes: FlexSizes, k_cache: Tensor, window: int) -> list[Tensor]:
    """`flex_tiles_packed` for a paged cache, [P, page_size, K, H]."""
    return _tiles_paged(layout, sizes, *k_cache.shape[:2], window) if layout.cu_seqlens.is_cuda else []


@operator("lockstep::flex_tiles_packed", cuda="triton_flex:tiles_packed", fake="triton_flex:tiles_packed")
def _tiles_packed(layout: Packed, sizes: FlexSizes, window: int) -> list[Tensor]:
    from . import triton_flex

    return triton_flex.tiles_packed(layout, sizes, window)


@operator("lockstep::flex_tiles_paged", cuda="triton_flex:tiles_paged", fake="triton_flex:tiles_paged")
def _tiles_paged(layout: Paged, sizes: FlexSizes, pages: int, page_size: int, window: int) -> list[Tensor]:
    from . import triton_flex

    return triton_flex.tiles_paged(layout, sizes, pages, page_size, window)


def _backward(ctx, grad_TNH: Tensor):
    q_TNH, k_TKH, v_TKH, *fields = saved_values(ctx)
    layout, (window, mask, *tiles) = Packed(*fields[:4]), fields[4:]
    grads = flex_packed_backward(grad_TNH.contiguous(), q_TNH, k_TKH, v_TKH, layout, FlexMask(window, mask, tiles))
    return *grads, *[None] * 6, [None] * len(tiles)


@operator(
    cuda="triton_flex:packed",
    fake=like(0, contiguous=True),
    setup=lambda ctx, inputs, output: save(ctx, [*inputs[:-1], *inputs[-1]]),
    backward=_backward,
)
def flex_packed(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, mask: FlexMask) -> Tensor:
    """`attention_packed` where a query sees, of the keys up to its own, those that a window and a mask allow;
    [T, N, H]."""
    return reference.packed(q_TNH, k_TKH, v_TKH, layout, visible=visibility(*mask[:2]))


@operator(cuda="triton_flex:packed_backward", fake=like(1, 2, 3, contiguous=True))
def flex_packed_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, mask: FlexMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, zero in padding rows. Not under the forward's contract, but deterministic. `grad_TNH`
    is the output's gradient, contiguous; the others are the forward's arguments."""
    return reference.packed_backward((grad_TNH, q_TNH, k_TKH, v_TKH), layout, visible=visibility(*mask[:2]))[:3]


@operator(cuda="triton_flex:paged", fake=like(0, contiguous=True))
def flex_paged(q_TNH: Tensor, cache: KVPages, layout: Paged, mask: FlexMask) -> Tensor:
    """`attention_paged` with a window and a mask, see `flex_packed`; [T, N, H].

    On a GPU, a page must consist of whole key tiles (`KEY_TILE` positions each), and what the cache holds at positions
    that do not exist yet must be finite.
    """
    return reference.paged(q_TNH, cache, layout, visible=visibility(*mask[:2]))
