"""Backward operators fused with their neighbours, GPU only: the bits of the separate operators in fewer kernels, except
for the sign of a zero where one says so.

Autograd calls the separate operators; captured graphs get these in their place (`graph/passes/fuse.py`).

Shape suffixes: T tokens, E = (N + 2K) * H fused projection, D model dim, N query heads, K key/value heads, G query
heads of a key/value head, H head dim, R table rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..operator import like, operator
from ..records import PLAIN, AttentionGradient, AttentionScores, Packed, Rotation


@operator(
    "lockstep::rms_norm_backward_add",
    gpu_only=True,
    cuda=".norm.triton:rms_norm_backward_add",
    fake=like(1, 2, contiguous=True),
)
def rms_norm_add(  # type: ignore[empty-body]
    grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, other_TD: Tensor, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """`norm.operator.rms_norm_backward` with another gradient of x added to its first result. Both that result and the
    sum are rounded."""


@operator(
    "lockstep::rotated_attention_packed_backward",
    gpu_only=True,
    cuda="triton_backward:rotated_attention",
    fake=lambda x, layout, qkv, rotation, *_: torch.ops.lockstep.qk_norm_rope_backward(x.grad_TNH, qkv, *rotation),
)
def rotated_attention_packed(  # type: ignore[empty-body]
    x: AttentionGradient,
    layout: Packed,
    qkv_TE: Tensor,
    rotation: Rotation,
    scores: AttentionScores = PLAIN,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention, whose queries and keys were rotated, for the fused projection [T, E] and for both norms'
    weights. Takes the arguments of `attention.operator.attention_packed_backward`, then those of
    `rope.operator.qk_norm_rope_backward` without its gradient. A gradient of -0 stays -0 here; no matrix product of it
    can tell."""


@operator(mutates=("total_RD",), gpu_only=True, cuda=".embedding.triton_backward:add_gathered_rows")
def add_gathered_rows(total_RD: Tensor, grad_TD: Tensor, rows_T: Tensor) -> None:
    """Add `embedding.operator.gather_rows_backward` to `total_RD`, another gradient of the table, of the same dtype;
    rows without a gradient are not touched. A row's own sum is rounded, and so is its total."""


@operator(mutates=("total",), gpu_only=True, cuda="triton_backward:add_gradient")
def add_gradient(total: Tensor, grad: Tensor) -> None:
    """`total.add_(grad)` for a float32 total of the same shape, at memory bandwidth whatever the dtype of grad."""
