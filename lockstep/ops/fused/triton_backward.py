"""Backward passes that write directly where the next one reads. Semantics: `ops/fused/backward.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention import triton_backward as attention_triton_backward
from ..records import PLAIN, AttentionGradient, AttentionScores, Packed, Rotation
from ..rope import triton as rope_triton

ADD_BLOCK, ADD_WARPS = 4096, 8


def rotated_attention(
    x: AttentionGradient,
    layout: Packed,
    qkv_TE: Tensor,
    rotation: Rotation,
    scores: AttentionScores = PLAIN,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fused.backward.rotated_attention_packed`. Gradients of the values are written to their final place, those of
    queries and keys to where the rotation's backward reads them."""
    (tokens, num_heads, head_dim), kv_heads = x.q_TNH.shape, x.k_TKH.shape[1]
    grad_qkv_TE = torch.empty((tokens, qkv_TE.shape[1]), dtype=qkv_TE.dtype, device=qkv_TE.device)
    grad_qk = torch.empty((tokens, num_heads + kv_heads, head_dim), dtype=x.q_TNH.dtype, device=qkv_TE.device)
    dq_TNH, dk_TKH = grad_qk.split((num_heads, kv_heads), dim=1)
    dv_TKH = grad_qkv_TE.unflatten(1, (-1, head_dim)).narrow(1, num_heads + kv_heads, kv_heads)
    attention_triton_backward.packed_into((dq_TNH, dk_TKH, dv_TKH), x, layout, scores)
    return rope_triton.qk_norm_rope_backward(grad_qk, qkv_TE, rotation, weight_offset, grad_qkv_TE)


@triton.jit
def _add_gradient_kernel(total_ptr, grad_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + at, tl.load(total_ptr + at, mask=inside, other=0.0) + grad, mask=inside)


def add_gradient(total: Tensor, grad: Tensor) -> None:
    if not (total.is_contiguous() and grad.is_contiguous()):
        total.add_(grad)
        return
    size = total.numel()
    _add_gradient_kernel[(triton.cdiv(size, ADD_BLOCK),)](total, grad, size, BLOCK=ADD_BLOCK, num_warps=ADD_WARPS)
