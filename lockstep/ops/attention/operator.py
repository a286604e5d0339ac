"""Causal attention for both roles: packed with shared prefixes (training) and paged (generation).

A query's result depends on the keys' absolute positions only: keys are taken in tiles of `KEY_TILE` at absolute
positions in ascending order, wherever they lie, with a fresh softmax every `KEY_SPLIT` keys whose results are merged in
that order. The two operators differ in how a position becomes an address and in nothing else.

Shape suffixes: T rows, S segments or sequences, N query heads, K key/value heads, H head dim, P pages, C groups of
sequences, W rows of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..embedding.operator import accumulate_rows
from ..operator import SAME, operator
from . import reference, reference_backward

KEY_TILE, KEY_SPLIT = reference.KEY_TILE, reference.KEY_SPLIT


def attention_packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> Tensor:
    """Attention over packed segments, each after an optional shared prefix; [T, N, H] in q's dtype.

    Args:
        q_TNH, k_TKH, v_TKH: one dtype; N is a multiple of K; scores are scaled by H ** -0.5.
        cu_seqlens: int32 [S + 1]; segment s is rows `cu_seqlens[s]:cu_seqlens[s + 1]` (empty ones allowed).
        prefix_start_S, prefix_len_S: int32 [S]; the rows that come before the segment's own (length 0: none).
        max_len: bound on prefix + own length.

    Rows after the last segment are padding; their output is zero. The prefix must be one segment's first rows.
    """
    return _packed(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S, max_len)[0]


def _packed_fake(q_TNH, k_TKH, *_):
    (tokens, heads, _), kv_heads = q_TNH.shape, k_TKH.shape[1]
    shape = (kv_heads, tokens, heads // kv_heads) if q_TNH.is_cuda else (0,)
    return torch.empty_like(q_TNH), q_TNH.new_empty(shape, dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    q_TNH, k_TKH, v_TKH, *layout, ctx.max_len = inputs
    ctx.save_for_backward(q_TNH, k_TKH, v_TKH, *output, *layout)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_TNH: Tensor, _):
    return (*attention_packed_backward(grad_TNH.contiguous(), *ctx.saved_tensors, ctx.max_len), None, None, None, None)


@operator(
    "lockstep::attention_packed",
    cuda="triton:packed",
    fake=_packed_fake,
    setup=_setup,
    backward=_backward,
)
def _packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor]:
    """The output and, for the backward, log2 of each row's sum of exponentials, float32 [K, T, N / K]; empty on a CPU,
    whose backward takes the softmax anew."""
    if native.usable(q_TNH, k_TKH, v_TKH):
        out_TNH = native.packed(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S, max_len)
    else:
        out_TNH = reference.packed(q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S)
    return out_TNH, q_TNH.new_empty(0, dtype=torch.float32)


@operator(
    "lockstep::attention_packed_backward",
    cuda="triton_backward:packed",
    fake=lambda grad_TNH, q_TNH, k_TKH, v_TKH, *_: (
        torch.empty_like(q_TNH),
        torch.empty_like(k_TKH),
        torch.empty_like(v_TKH),
    ),
)
def attention_packed_backward(
    grad_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    out_TNH: Tensor,
    lse_KTG: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, zero in padding rows. Not under the forward's contract, but the same every time.

    Args:
        grad_TNH: gradient of the output, contiguous.
        out_TNH, lse_KTG: what the forward returned; the others are what it was given.
    """
    return reference_backward.packed(
        grad_TNH, q_TNH, k_TKH, v_TKH, cu_seqlens, prefix_start_S, prefix_len_S, accumulate_rows
    )


@operator(
    "lockstep::attention_paged",
    cuda="triton:paged",
    fake=lambda q_TNH, *_: torch.empty_like(q_TNH),
)
def attention_paged(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_query_len: int,
    max_context_len: int,
    group_rows_CW: Tensor | None = None,
    shared_len_S: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over a paged cache that already holds their keys and values; [T, N, H].

    Args:
        k_cache, v_cache: [P, page_size, K, H].
        block_table: int32 [S, pages a sequence]; entry j holds positions `j * page_size` onwards.
        cu_seqlens: int32 [S + 1]; sequence s has the new tokens in rows `cu_seqlens[s]:cu_seqlens[s + 1]`, the last
            ones of its context.
        context_len_S: int32 [S], positions that exist, the new ones included.
        max_query_len, max_context_len: bounds on new tokens and on context over the sequences. With `max_query_len` 1
            and T = S every sequence has one new token.
        group_rows_CW, shared_len_S: for one new token a sequence, which sequences read the same first pages, so that a
            GPU reads those once a group; no bit depends on it. int32 [C, W], the group's sequences and then -1 (a group
            may be all -1), a sequence in one group at most; int32 [S], the positions that all of the sequence's group
            have in common and see, the same number for each of them, and 0 for a sequence without a group. Whole key
            tiles of them are shared.
    """
    if native.usable(q_TNH, k_cache, v_cache):
        return native.paged(q_TNH, k_cache, v_cache, block_table, cu_seqlens, context_len_S, max_context_len)
    return reference.paged(
        q_TNH, k_cache, v_cache, block_table, cu_seqlens, context_len_S, max_query_len, max_context_len
    )


@operator(
    "lockstep::write_kv",
    mutates=("k_cache", "v_cache"),
    native=native.write_kv,
    cuda=SAME,
)
def write_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """Store keys and values at `slots_T` (int64; page * page_size + offset) of caches [P, page_size, K, H]."""
    k_cache.flatten(0, 1).index_copy_(0, slots_T, k_TKH)
    v_cache.flatten(0, 1).index_copy_(0, slots_T, v_TKH)
