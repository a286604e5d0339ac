"""RMSNorm of queries and keys with the rotary embedding, and the table of its angles. Inputs are read as float32, and
the result is rounded once.

Shape suffixes: T rows, E a fused projection's output, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..norm.operator import normalize, normalize_backward
from ..operator import operator, saved_values
from ..records import Rotation


def _backward(ctx, grad: Tensor):
    qkv_TE, *fields, offset = saved_values(ctx)
    rotation = Rotation(*fields)
    grads = qk_norm_rope_backward(grad, qkv_TE, rotation, offset)
    return grads if rotation.q_weight_H is not None else grads[:1]


def _native_backward(
    grad: Tensor, qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope_backward` in C, with its bits."""
    qkv_TE = qkv_TE.contiguous()
    grad_qkv, width = torch.empty_like(qkv_TE), grad.shape[1] * grad.shape[2]
    grad_qkv[:, width:] = 0
    if rotation.q_weight_H is None or rotation.k_weight_H is None:
        native.rotate_back(grad, rotation.cos_sin_TH, grad_qkv)
        return grad_qkv, qkv_TE.new_empty(0), qkv_TE.new_empty(0)
    rotated = torch.empty(grad.shape)
    native.rotate_back(grad, rotation.cos_sin_TH, rotated.flatten(1))
    grad_weight = native.norm_backward(qkv_TE, _head_weights(rotation, weight_offset), rotated, rotation.eps, grad_qkv)
    return grad_qkv, *_sum_weight_gradients(grad_weight, rotation)


def _sum_weight_gradients(grad_weight: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Sum weight gradients per token and head to those of both weights."""
    assert rotation.q_weight_H is not None and rotation.k_weight_H is not None
    grad_weight = grad_weight.sum(0)
    return (
        grad_weight[: rotation.num_heads].sum(0).to(rotation.q_weight_H.dtype),
        grad_weight[rotation.num_heads :].sum(0).to(rotation.k_weight_H.dtype),
    )


@operator(
    native=native.qk_norm_rope,
    cuda="triton:qk_norm_rope",
    fake=lambda qkv_TE, rotation, *_: qkv_TE.new_empty(
        qkv_TE.shape[0], rotation.num_heads + rotation.num_kv_heads, rotation.cos_sin_TH.shape[1]
    ),
    backward=_backward,
)
def qk_norm_rope(qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0) -> Tensor:
    """Queries and keys from the fused projection: per-head RMSNorm (if weights are given), then rotary embedding.

    Args:
        qkv_TE: [T, (N + 2K) * H], heads in the order q, k, v.
        weight_offset: added to the norm's weights, as in `rms_norm`.

    Returns:
        [T, N + K, H] in qkv's dtype. Rotation pairs element i with i + H/2, as Hugging Face does (Su et al. 2021).
    """
    tokens, head_dim = rotation.cos_sin_TH.shape
    heads = rotation.num_heads + rotation.num_kv_heads
    qk = qkv_TE[:, : heads * head_dim].view(tokens, heads, head_dim)
    plain = rotation.q_weight_H is None or rotation.k_weight_H is None
    qk = qk.float() if plain else normalize(qk, _head_weights(rotation, weight_offset), rotation.eps)
    cos, sin = rotation.cos_sin_TH.unsqueeze(1).chunk(2, dim=-1)
    first, second = qk.chunk(2, dim=-1)
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32)
    torch.sub(first * cos, second * sin, out=out[..., : head_dim // 2])
    torch.add(second * cos, first * sin, out=out[..., head_dim // 2 :])
    return out.to(qkv_TE.dtype)


def _head_weights(rotation: Rotation, offset: float) -> Tensor:
    """The factors on normalized heads, float32 [N + K, H]."""
    assert rotation.q_weight_H is not None and rotation.k_weight_H is not None
    q_weights = rotation.q_weight_H.expand(rotation.num_heads, -1)
    weights = torch.cat((q_weights, rotation.k_weight_H.expand(rotation.num_kv_heads, -1)))
    return weights.float() + offset if offset else weights.float()


def _backward_fake(grad, qkv_TE, rotation, *_):
    size = 0 if rotation.q_weight_H is None or rotation.k_weight_H is None else rotation.cos_sin_TH.shape[1]
    q_dtype, k_dtype = ((w if w is not None else qkv_TE).dtype for w in rotation[:2])
    return qkv_TE.new_empty(qkv_TE.shape), qkv_TE.new_empty(size, dtype=q_dtype), qkv_TE.new_empty(size, dtype=k_dtype)


@operator(native=_native_backward, cuda="triton:qk_norm_rope_backward", fake=_backward_fake)
def qk_norm_rope_backward(
    grad: Tensor, qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `qk_norm_rope` for qkv, [T, (N + 2K) * H] with zeros for v, and for both weights, [H], which are
    empty if there are no weights. Opaque to traces. Not under the forward's contract, but deterministic."""
    tokens, head_dim = rotation.cos_sin_TH.shape
    heads = rotation.num_heads + rotation.num_kv_heads
    cos, sin = rotation.cos_sin_TH.unsqueeze(1).chunk(2, dim=-1)
    first, second = grad.float().chunk(2, dim=-1)
    grad_qk = torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
    weight_grads = qkv_TE.new_empty(0), qkv_TE.new_empty(0)
    if rotation.q_weight_H is not None and rotation.k_weight_H is not None:
        qk = qkv_TE[:, : heads * head_dim].view(tokens, heads, head_dim).float()
        grad_qk, grad_weight = normalize_backward(qk, _head_weights(rotation, weight_offset), grad_qk, rotation.eps)
        weight_grads = _sum_weight_gradients(grad_weight, rotation)
    grad_qkv = torch.zeros_like(qkv_TE)
    grad_qkv[:, : heads * head_dim] = grad_qk.reshape(tokens, heads * head_dim).to(qkv_TE.dtype)
    return grad_qkv, *weight_grads


@operator(
    native=native.rope_table,
    cuda="triton:rope_table",
    fake=lambda positions_T, inv_freq: inv_freq.new_empty(positions_T.shape[0], 2 * inv_freq.shape[0]),
)
def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """Cosines and sines of the rotary angles, float32 [T, H]; positions are int64, `inv_freq` is float32 [H/2]."""
    angles = positions_T.to(torch.float32).unsqueeze(1) * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=1)
