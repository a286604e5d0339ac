"""Attention with sliding windows and masks of one's own, for both roles: FlexAttention (`torch.nn.attention`) on a GPU.

As in `attention`, a query's result depends on the keys' absolute positions only: keys are taken in tiles of `KEY_TILE`
at absolute positions in ascending order, wherever they lie. There are no splits. A query that sees no key is zero.

On a CPU torch's flex_attention adds in an order that depends on shapes and has no backward, so the reference of
`attention` does the same with the mask.

Shape suffixes: T rows, S segments or sequences, N query heads, K key/value heads, H head dim, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import attention_backward, attention_reference
from .masks import visibility
from .operator import operator
from .rows import accumulate_rows


@torch.library.custom_op("lockstep::flex_packed", mutates_args=(), device_types="cpu")
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
) -> Tensor:
    """`attention_packed` where a query sees, of the keys up to its own, those of a window and a mask; [T, N, H].

    Args:
        window, mask: see `masks.visibility`. Others as in `attention_packed`.
    """
    visible = visibility(window, mask)
    return attention_reference.packed(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S, visible)


@flex_packed.register_kernel("cuda")
def _(q_TNH, *args):
    from .kernels import flex

    return flex.packed(q_TNH, *args)


@flex_packed.register_fake
def _(q_TNH, *_):
    return q_TNH.new_empty(q_TNH.shape)


@torch.library.custom_op("lockstep::flex_packed_backward", mutates_args=(), device_types="cpu")
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, zero in padding rows. Not under the forward's contract, but the same every time.

    Args:
        grad_TNH: gradient of the output, contiguous; the others are what the forward was given.
    """
    layout, visible = (cu_seqlens, prefix_start_S, prefix_len_S), visibility(window, mask)
    return attention_backward.packed(grad_TNH, q_TNH, k_TKH, v_TKH, *layout, accumulate_rows, visible)


@flex_packed_backward.register_kernel("cuda")
def _(grad_TNH, *args):
    from .kernels import flex

    return flex.packed_backward(grad_TNH, *args)


@flex_packed_backward.register_fake
def _(grad_TNH, q_TNH, k_TKH, v_TKH, *_):
    return q_TNH.new_empty(q_TNH.shape), k_TKH.new_empty(k_TKH.shape), v_TKH.new_empty(v_TKH.shape)


def _setup(ctx, inputs, output) -> None:
    *tensors, ctx.max_len, ctx.window, ctx.mask = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_TNH: Tensor):
    settings = ctx.max_len, ctx.window, ctx.mask
    return *flex_packed_backward(grad_TNH.contiguous(), *ctx.saved_tensors, *settings), *[None] * 6


flex_packed.register_autograd(_backward, setup_context=_setup)


@operator("lockstep::flex_paged")
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
) -> Tensor:
    """`attention_paged` with a window and a mask, see `flex_packed`; [T, N, H].

    On a GPU a page must be one key tile or several (`KEY_TILE` positions each), and what the cache holds at positions
    that do not exist yet must be finite.
    """
    paged = block_table, cu_seqlens, context_len_S, max_query_len, max_context_len
    return attention_reference.paged(q_TNH, k_cache, v_cache, *paged, visibility(window, mask))


@flex_paged.register_kernel("cuda")
def _(q_TNH, *args):
    from .kernels import flex

    return flex.paged(q_TNH, *args)


@flex_paged.register_fake
def _(q_TNH, *_):
    return q_TNH.new_empty(q_TNH.shape)
