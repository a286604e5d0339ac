"""Causal attention for both roles: packed with shared prefixes (training) and paged (generation).

A query's result depends on the keys' absolute positions only: keys are taken in tiles of `KEY_TILE` at absolute
positions in ascending order, wherever they lie, with a fresh softmax every `KEY_SPLIT` keys whose results are merged in
that order. The two operators differ only in how they turn a position into an address. For one new token per sequence,
there are also operators that start from the fused projection: the bits of the separate ones in fewer kernels.

Shape suffixes: T rows, E fused projection, S segments or sequences, N query heads, K key/value heads, H head dim,
P pages, C groups of sequences, W rows of a group.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import native
from ..operator import SAME, like, operator, save_inputs_and_results, saved_values
from ..records import (
    NO_GROUPS,
    PLAIN,
    AttentionGradient,
    AttentionScores,
    Contexts,
    KVPages,
    Packed,
    Paged,
    PrefixGroups,
    Rotation,
)
from ..rope.operator import qk_norm_rope
from . import reference

KEY_TILE, KEY_SPLIT, MAX_SEQUENCES = reference.KEY_TILE, reference.KEY_SPLIT, reference.MAX_SEQUENCES


def attention_packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, scores: AttentionScores = PLAIN
) -> Tensor:
    """Attention over packed segments, each after an optional shared prefix; [T, N, H] in q's dtype, zero in padding.
    q, k and v have one dtype; N is a multiple of K. On a CPU, segments and prefixes outside the rows raise an
    IndexError, as do pages outside a float32 cache in `attention_paged`; on a GPU nothing checks them."""
    return _packed(q_TNH, k_TKH, v_TKH, layout, scores)[0]


def _packed_fake(q_TNH, k_TKH, *_):
    (tokens, heads, _), kv_heads = q_TNH.shape, k_TKH.shape[1]
    shape = (kv_heads, tokens, heads // kv_heads) if q_TNH.is_cuda else (0,)
    return torch.empty_like(q_TNH), q_TNH.new_empty(shape, dtype=torch.float32)


def _backward(ctx, grad_TNH: Tensor, _):
    q_TNH, k_TKH, v_TKH, *fields, out_TNH, lse_KTG = saved_values(ctx)
    x = AttentionGradient(grad_TNH.contiguous(), q_TNH, k_TKH, v_TKH, out_TNH, lse_KTG)
    layout, scores = Packed(*fields[: len(Packed._fields)]), AttentionScores(*fields[len(Packed._fields) :])
    if scores.sinks_N is None:
        return attention_packed_backward(x, layout, scores)
    *grads, grad_sinks_N = attention_sinks_packed_backward(x, layout, scores)
    return *grads, *[None] * len(layout), grad_sinks_N


@operator(
    "lockstep::attention_packed",
    native=lambda q_TNH, *others: (native.packed(q_TNH, *others), q_TNH.new_empty(0)),
    cuda="triton:packed",
    fake=_packed_fake,
    setup=save_inputs_and_results,
    backward=_backward,
)
def _packed(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, scores: AttentionScores = PLAIN
) -> tuple[Tensor, Tensor]:
    """The output and, for the backward, log2 of each row's sum of exponentials, float32 [K, T, N / K]; empty on a CPU,
    whose backward recomputes the softmax."""
    return reference.packed(q_TNH, k_TKH, v_TKH, layout, scores), q_TNH.new_empty(0, dtype=torch.float32)


@operator(cuda="triton_backward:packed", fake=lambda x, *_: tuple(map(torch.empty_like, x[1:4])))
def attention_packed_backward(
    x: AttentionGradient, layout: Packed, scores: AttentionScores = PLAIN
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for q, k and v, zero in padding rows. Not under the forward's contract, but deterministic."""
    return reference.packed_backward(x[:4], layout, scores)[:3]


@operator(
    cuda="triton_backward:packed",
    fake=lambda x, _, scores: (*map(torch.empty_like, x[1:4]), torch.empty_like(scores.sinks_N)),
)
def attention_sinks_packed_backward(
    x: AttentionGradient, layout: Packed, scores: AttentionScores
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_packed_backward`, and the gradient for the sinks, [N]."""
    return reference.packed_backward(x[:4], layout, scores)


@operator(native=native.paged, cuda="triton:paged", fake=like(0))
def attention_paged(
    q_TNH: Tensor, cache: KVPages, layout: Paged, groups: PrefixGroups = NO_GROUPS, scores: AttentionScores = PLAIN
) -> Tensor:
    """Attention of new tokens over a paged cache that already holds their keys and values; [T, N, H]. With groups, the
    first `groups.sequences` sequences have one new token each. With a window, pages before it are not read."""
    return reference.paged(q_TNH, cache, layout, scores)


@operator(mutates=("k_cache", "v_cache"), native=native.write_kv, cuda=SAME)
def write_kv(k_TKH: Tensor, v_TKH: Tensor, cache: KVPages, slots_T: Tensor) -> None:
    """Store keys and values [T, K, H], in the cache's dtype, at its `slots_T` (int64; page * page_size + offset)."""
    for pages, x_TKH in zip(cache, (k_TKH, v_TKH), strict=True):
        pages.flatten(0, 1).index_copy_(0, slots_T, x_TKH)


def _queries_fake(qkv_TE, rotation, *_):
    heads = rotation.num_heads + (0 if qkv_TE.is_cuda else rotation.num_kv_heads)  # for the implementation's strides
    return qkv_TE.new_empty(qkv_TE.shape[0], heads, rotation.cos_sin_TH.shape[1])[:, : rotation.num_heads]


@operator(mutates=("k_cache", "v_cache"), cuda=".rope.triton:qk_norm_rope_write_kv", fake=_queries_fake)
def qk_norm_rope_write_kv(
    qkv_TE: Tensor, rotation: Rotation, cache: KVPages, slots_T: Tensor, weight_offset: float = 0.0
) -> Tensor:
    """`qk_norm_rope`, then `write_kv` of the keys and of the projection's values. Returns the queries, [T, N, H]. No
    autograd."""
    qk = qk_norm_rope.on_cpu[qkv_TE.dtype](qkv_TE, rotation, weight_offset)
    tokens, heads, head_dim = qk.shape
    q_TNH, k_TKH = qk.split_with_sizes((rotation.num_heads, rotation.num_kv_heads), 1)
    v_TKH = qkv_TE[:, heads * head_dim :].view(tokens, rotation.num_kv_heads, head_dim)
    write_kv.on_cpu[qk.dtype](k_TKH, v_TKH, cache, slots_T)
    return q_TNH


@operator(
    mutates=("k_cache", "v_cache"),
    cuda="triton_decode:attention_decode",
    fake=lambda qkv_SE, rotation, *_: qkv_SE.new_empty(
        qkv_SE.shape[0], rotation.num_heads, rotation.cos_sin_TH.shape[1]
    ),
)
def attention_decode(
    qkv_SE: Tensor,
    rotation: Rotation,
    cache: KVPages,
    slots_S: Tensor,
    contexts: Contexts,
    groups: PrefixGroups = NO_GROUPS,
    scores: AttentionScores = PLAIN,
    weight_offset: float = 0.0,
) -> Tensor:
    """`qk_norm_rope_write_kv` of the tokens' fused projections, then `attention_paged` of one new token per sequence:
    [S, N, H], without autograd. `slots_S` are the cache slots of each sequence's last position in its block table; an
    idle row's slot may be elsewhere, as its result is meaningless."""
    q_SNH = qk_norm_rope_write_kv.on_cpu[qkv_SE.dtype](qkv_SE, rotation, cache, slots_S, weight_offset)
    table, context_len_S, max_context_len = contexts
    paged = Paged(table, _single_token_cu_seqlens(q_SNH.shape[0]), context_len_S, 1, max_context_len)
    return attention_paged.on_cpu[q_SNH.dtype](q_SNH, cache, paged, groups, scores)


@functools.lru_cache
def _single_token_cu_seqlens(sequences: int) -> Tensor:
    """`Paged.cu_seqlens`."""
    return torch.arange(sequences + 1, dtype=torch.int32)
