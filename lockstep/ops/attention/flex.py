"""Attention with sliding windows and masks of one's own, for both roles: FlexAttention (`torch.nn.attention`) on a GPU.

As in `attention`, a query's result depends on the keys' absolute positions only: keys are taken in tiles of `KEY_TILE`
at absolute positions in ascending order, wherever they lie. There are no splits. A query that sees no key is zero.

On a CPU torch's flex_attention adds in an order that depends on shapes and has no backward, so the reference of
`attention` does the same with the mask.

Shape suffixes: T rows, S segments or sequences, N query heads, K key/value heads, H head dim, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..embedding.operator import accumulate_rows
from ..operator import SAME, operator
from . import reference, reference_backward
from .masks import visibility


def flex_tiles_packed(
    tokens: int,
    heads: int,
    kv_heads: int,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
    window: int,
) -> list[Tensor]:
    """Where a GPU finds the queries and keys of packed segments: the same for all layers with this window. Nothing on a
    CPU. Arguments as in `flex_packed`; a prefix must begin a segment that has none itself."""
    if not cu_seqlens.is_cuda:
        return []
    return _tiles_packed(cu_seqlens, prefix_start_S, prefix_len_S, tokens, heads, kv_heads, max_len, window)


def flex_tiles_paged(
    tokens: int,
    heads: int,
    k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_context_len: int,
    window: int,
) -> list[Tensor]:
    """`flex_tiles_packed` of a paged cache, [P, page_size, K, H]; arguments as in `flex_paged`."""
    if not cu_seqlens.is_cuda:
        return []
    pages, page_size, kv_heads = k_cache.shape[:3]
    sizes = tokens, heads, kv_heads, pages, page_size, max_context_len, window
    return _tiles_paged(block_table, cu_seqlens, context_len_S, *sizes)


def _tiles_packed_fake(*args):
    from . import triton_flex

    return triton_flex.tiles_packed(*args)


@operator(
    "lockstep::flex_tiles_packed",
    cuda=SAME,
    fake=_tiles_packed_fake,
)
def _tiles_packed(
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    tokens: int,
    heads: int,
    kv_heads: int,
    max_len: int,
    window: int,
) -> list[Tensor]:
    from . import triton_flex

    return triton_flex.tiles_packed(cu_seqlens, prefix_start_S, prefix_len_S, tokens, heads, kv_heads, max_len, window)


def _tiles_paged_fake(*args):
    from . import triton_flex

    return triton_flex.tiles_paged(*args)


@operator(
    "lockstep::flex_tiles_paged",
    cuda=SAME,
    fake=_tiles_paged_fake,
)
def _tiles_paged(
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    tokens: int,
    heads: int,
    kv_heads: int,
    pages: int,
    page_size: int,
    max_context_len: int,
    window: int,
) -> list[Tensor]:
    from . import triton_flex

    sizes = tokens, heads, kv_heads, pages, page_size, max_context_len, window
    return triton_flex.tiles_paged(block_table, cu_seqlens, context_len_S, *sizes)


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.max_len, ctx.window, ctx.mask, tiles = inputs
    ctx.save_for_backward(*tensors, *tiles)


def _backward(ctx, grad_TNH: Tensor):
    tensors, tiles = ctx.saved_tensors[:6], list(ctx.saved_tensors[6:])
    settings = ctx.max_len, ctx.window, ctx.mask, tiles
    return *flex_packed_backward(grad_TNH.contiguous(), *tensors, *settings), *[None] * 6, [None] * len(tiles)


@operator(
    "lockstep::flex_packed",
    cuda="triton_flex:packed",
    fake=lambda q_TNH, *_: q_TNH.new_empty(q_TNH.shape),
    setup=_setup,
    backward=_backward,
)
def flex_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
    window: int,
    mask: str,
    tiles: Sequence[Tensor],
) -> Tensor:
    """`attention_packed` where a query sees, of the keys up to its own, those of a window and a mask; [T, N, H].

    Args:
        window, mask: see `masks.visibility`.
        tiles: `flex_tiles_packed` of the same layout and window; the others as in `attention_packed`.
    """
    visible = visibility(window, mask)
    return reference.packed(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S, visible)


@operator(
    "lockstep::flex_packed_backward",
    cuda="triton_flex:packed_backward",
    fake=lambda grad_TNH, q_TNH, k_TKH, v_TKH, *_: (
        q_TNH.new_empty(q_TNH.shape),
        k_TKH.new_empty(k_TKH.shape),
        v_TKH.new_empty(v_TKH.shape),
    ),
)
def flex_packed_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
    window: int,
    mask: str,
    tiles: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, zero in padding rows. Not under the forward's contract, but the same every time.

    Args:
        grad_TNH: gradient of the output, contiguous; the others are what the forward was given.
    """
    layout, visible = (cu_seqlens, prefix_start_S, prefix_len_S), visibility(window, mask)
    return reference_backward.packed(grad_TNH, q_TNH, k_TKH, v_TKH, *layout, accumulate_rows, visible)


@operator(
    "lockstep::flex_paged",
    cuda="triton_flex:paged",
    fake=lambda q_TNH, *_: q_TNH.new_empty(q_TNH.shape),
)
def flex_paged(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_query_len: int,
    max_context_len: int,
    window: int,
    mask: str,
    tiles: Sequence[Tensor],
) -> Tensor:
    """`attention_paged` with a window and a mask, see `flex_packed`, and `flex_tiles_paged`; [T, N, H].

    On a GPU a page must be one key tile or several (`KEY_TILE` positions each), and what the cache holds at positions
    that do not exist yet must be finite.
    """
    paged = block_table, cu_seqlens, context_len_S, max_query_len, max_context_len
    return reference.paged(q_TNH, k_cache, v_cache, *paged, visibility(window, mask))
