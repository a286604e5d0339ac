"""Causal latent attention (MLA, absorbed) for both roles: packed with shared prefixes, and paged.

All heads read one row a position, the latent and a rotated key; a score is the sum of both parts' products, and the
result is the weighted sum of the latents alone. Tiles, splits and their order are those of `ops/attention/operator.py`,
so a query's bits depend on the rows' absolute positions only.

Shape suffixes: T rows, S segments or sequences, N heads, R latent rank, P rotated dim, H = R + P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import SAME, operator
from . import reference


def latent_attention_packed(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> Tensor:
    """Latent attention over packed segments, each after an optional shared prefix; [T, N, R] in q's dtype.

    Args:
        q_TNR, q_rope_TNP: absorbed queries, and their rotated parts.
        latent_TR, k_rope_TP: what all heads read of a row, in the same dtype.
        scale: on the scores.
        cu_seqlens, prefix_start_S, prefix_len_S, max_len: as in `attention_packed`.

    Rows after the last segment are padding; their output is zero.
    """
    layout = cu_seqlens, prefix_start_S, prefix_len_S, max_len
    return _packed(q_TNR, q_rope_TNP, latent_TR, k_rope_TP, scale, *layout)[0]


def _packed_fake(q_TNR, *_):
    statistics = q_TNR.shape[:2] if q_TNR.is_cuda else (0,)
    return q_TNR.new_empty(q_TNR.shape), q_TNR.new_empty(statistics, dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:
    q_TNR, q_rope_TNP, latent_TR, k_rope_TP, ctx.scale, *layout, ctx.max_len = inputs
    ctx.save_for_backward(q_TNR, q_rope_TNP, latent_TR, k_rope_TP, *output, *layout)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_TNR: Tensor, _):
    settings = ctx.scale, ctx.max_len
    return *latent_attention_packed_backward(grad_TNR.contiguous(), *ctx.saved_tensors, *settings), *[None] * 5


@operator(
    "lockstep::latent_attention_packed",
    cuda="triton:packed",
    fake=_packed_fake,
    setup=_setup,
    backward=_backward,
)
def _packed(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor]:
    """The output and, for the backward, log2 of each row's sum of exponentials, float32 [T, N]; empty on a CPU."""
    layout = cu_seqlens, prefix_start_S, prefix_len_S
    out_TNR = reference.packed(q_TNR, q_rope_TNP, latent_TR, k_rope_TP, scale, layout, max_len)
    return out_TNR, q_TNR.new_empty(0, dtype=torch.float32)


@operator(
    "lockstep::latent_attention_packed_backward",
    cuda="triton_backward:packed",
    fake=lambda grad_TNR, q_TNR, q_rope_TNP, latent_TR, k_rope_TP, *_: tuple(
        x.new_empty(x.shape) for x in (q_TNR, q_rope_TNP, latent_TR, k_rope_TP)
    ),
)
def latent_attention_packed_backward(
    grad_TNR: Tensor,
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    out_TNR: Tensor,
    lse_TN: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    scale: float,
    max_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the first four inputs, zero in padding rows. Not under the forward's contract, but the same every
    time. `out_TNR` and `lse_TN` are what the forward returned."""
    layout = cu_seqlens, prefix_start_S, prefix_len_S
    return reference.packed_backward(grad_TNR, q_TNR, q_rope_TNP, latent_TR, k_rope_TP, scale, layout)


@operator(
    "lockstep::latent_attention_paged",
    cuda="triton:paged",
    fake=lambda q_TNR, *_: q_TNR.new_empty(q_TNR.shape),
)
def latent_attention_paged(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    cache: Tensor,
    scale: float,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    """Latent attention of new tokens over a paged cache that already holds their rows; [T, N, R].

    Args:
        cache: [pages, page_size, H]; the arguments from `block_table` on are those of `attention_paged`.
    """
    sequences = block_table, cu_seqlens, context_len_S, max_query_len, max_context_len
    return reference.paged(q_TNR, q_rope_TNP, cache, scale, *sequences)


@operator(
    "lockstep::write_latent",
    mutates=("cache",),
    cuda=SAME,
)
def write_latent(latent_TR: Tensor, k_rope_TP: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store rows at `slots_T` (int64; page * page_size + offset) of a cache [pages, page_size, H]."""
    cache.flatten(0, 1).index_copy_(0, slots_T, torch.cat((latent_TR, k_rope_TP), dim=1))
