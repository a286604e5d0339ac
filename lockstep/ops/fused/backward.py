"""Backward operators fused with their neighbours, on a GPU alone: the bits of the separate ones, in fewer kernels, but
for the sign of a zero where one says so.

Autograd calls the separate ones; captured graphs get these in their place (`graph/passes/fuse.py`).

Shape suffixes: T tokens, E = (N + 2K) * H fused projection, D model dim, N query heads, K key/value heads, G query
heads of a key/value head, H head dim, R table rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import operator
from ..records import Rotation


@operator(
    "lockstep::rms_norm_backward_add",
    gpu_only=True,
    fake=lambda grad_TD, x_TD, weight_D, eps, other_TD: (
        x_TD.new_empty(x_TD.shape),
        weight_D.new_empty(weight_D.shape),
    ),
)
def rms_norm_add(
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, other_TD: Tensor
) -> tuple[Tensor, Tensor]:
    """`norm.backward.rms_norm` with another gradient of x added to its first result; that is rounded, and so is the
    sum."""
    from ..norm import triton_backward as norm_triton_backward

    return norm_triton_backward.rms_norm(grad_TD, x_TD, weight_D, eps, other_TD)


@operator(
    "lockstep::rotated_attention_packed_backward",
    gpu_only=True,
    fake=lambda grad_TNH, *others: torch.ops.lockstep.qk_norm_rope_backward(grad_TNH, others[9], *others[10]),
)
def rotated_attention_packed(
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
    qkv_TE: Tensor,
    by: Rotation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention over rotated queries and keys for the fused projection that these and the values are of,
    [T, E], and for both norms' weights: the arguments of `attention.operator.attention_packed_backward`, then those of
    `rope.backward.qk_norm_rope` but for its gradient. A -0 stays one, which no product of it can tell from 0."""
    from . import triton_backward

    layout = cu_seqlens, prefix_start_S, prefix_len_S, max_len
    return triton_backward.rotated_attention(grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_KTG, layout, qkv_TE, by)


@operator(
    "lockstep::add_gathered_rows",
    mutates=("total_RD",),
    gpu_only=True,
)
def add_gathered_rows(total_RD: Tensor, grad_TD: Tensor, rows_T: Tensor) -> None:
    """Add `embedding.backward.gather_rows` to another gradient of the table, of the same dtype; rows without a gradient
    are not touched. A row's sum is rounded, as is what it makes with the other."""
    from ..embedding import triton_backward as embedding_triton_backward

    embedding_triton_backward.add_gathered_rows(total_RD, grad_TD, rows_T)


@operator(
    "lockstep::add_gradient",
    mutates=("total",),
    gpu_only=True,
)
def add_gradient(total: Tensor, grad: Tensor) -> None:
    """`total.add_(grad)` for a float32 total of the same shape, at the speed of memory whatever grad's dtype."""
    from . import triton_backward

    triton_backward.add_gradient(total, grad)
