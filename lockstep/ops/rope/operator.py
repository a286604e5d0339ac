"""RMSNorm of queries and keys with the rotary embedding, and the table of its angles. Inputs are read as float32, and
the result is rounded once.

Shape suffixes: T rows, E a fused projection's output, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native, reference
from ..norm.operator import _norm_backward
from ..operator import operator
from ..records import Rotation
from . import backward


def _qk_setup(ctx, inputs, output) -> None:
    qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, ctx.num_heads, ctx.num_kv_heads, ctx.eps = inputs
    ctx.save_for_backward(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH)


def _qk_backward(ctx, grad: Tensor):
    qkv_TE, q_weight_H, k_weight_H, cos_sin_TH = ctx.saved_tensors
    if qkv_TE.is_cuda:
        by = Rotation(q_weight_H, k_weight_H, cos_sin_TH, ctx.num_heads, ctx.num_kv_heads, ctx.eps)
        grads = backward.qk_norm_rope(grad, qkv_TE, by)
        return *(g if x is not None else None for g, x in zip(grads, ctx.saved_tensors, strict=False)), *[None] * 4
    tokens, head_dim = cos_sin_TH.shape
    heads = ctx.num_heads + ctx.num_kv_heads
    cos, sin = cos_sin_TH.unsqueeze(1).chunk(2, dim=-1)
    first, second = grad.float().chunk(2, dim=-1)
    grad_qk = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    grad_q_weight = grad_k_weight = None
    if q_weight_H is not None and k_weight_H is not None:
        qk = qkv_TE[:, : heads * head_dim].view(tokens, heads, head_dim).float()
        weight = reference.head_weights(q_weight_H, k_weight_H, ctx.num_heads, ctx.num_kv_heads)
        grad_qk, grad_weight = _norm_backward(qk, weight, grad_qk, ctx.eps)
        grad_weight = grad_weight.sum(0)
        grad_q_weight = grad_weight[: ctx.num_heads].sum(0).to(q_weight_H.dtype)
        grad_k_weight = grad_weight[ctx.num_heads :].sum(0).to(k_weight_H.dtype)
    grad_qkv = torch.zeros_like(qkv_TE)
    grad_qkv[:, : heads * head_dim] = grad_qk.reshape(tokens, heads * head_dim).to(qkv_TE.dtype)
    return grad_qkv, grad_q_weight, grad_k_weight, None, None, None, None


@operator(
    "lockstep::qk_norm_rope",
    native=native.qk_norm_rope,
    cuda="triton:qk_norm_rope",
    fake=lambda qkv_TE, by: qkv_TE.new_empty(qkv_TE.shape[0], by.num_heads + by.num_kv_heads, by.cos_sin_TH.shape[1]),
    setup=_qk_setup,
    backward=_qk_backward,
)
def qk_norm_rope(
    qkv_TE: Tensor,
    by: Rotation,
) -> Tensor:
    """Queries and keys out of the fused projection: RMSNorm a head (when weights are given), then rotary embedding.

    Args:
        qkv_TE: [T, (N + 2K) * H], heads in the order q, k, v.

    Returns:
        [T, N + K, H] in qkv's dtype. Rotation pairs element i with i + H/2, as Hugging Face does (Su et al. 2021).
    """
    return reference.qk_norm_rope(qkv_TE, by)


@operator(
    "lockstep::rope_table",
    cuda="triton:rope_table",
    fake=lambda positions_T, inv_freq: inv_freq.new_empty(positions_T.shape[0], 2 * inv_freq.shape[0]),
)
def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """Cosines and sines of the rotary angles, float32 [T, H]; positions are int64, `inv_freq` is float32 [H/2]."""
    return (native if native.usable(inv_freq) else reference).rope_table(positions_T, inv_freq)
