"""Row-wise operators: gather, RMSNorm, q/k-norm with RoPE, SiLU-gated product.

Each element is a function of its own row only. Rounding points: inputs are read as float32, everything in between
is float32, and the result is rounded once to the input's dtype.

Shape suffixes: T rows, D model dim, F feed-forward dim, N query heads, K key/value heads, H head dim, R table rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native, reference, rows_backward
from .operator import operator


@operator("lockstep::gather_rows")
def gather_rows(table_RD: Tensor, rows_T: Tensor) -> Tensor:
    """Rows of a table (embedding lookup, logit positions), [T, D]. The backward adds duplicates in a fixed order."""
    return table_RD.index_select(0, rows_T)


@gather_rows.register_kernel("cuda")
def _(table_RD: Tensor, rows_T: Tensor) -> Tensor:
    return table_RD.index_select(0, rows_T)


@gather_rows.register_fake
def _(table_RD: Tensor, rows_T: Tensor) -> Tensor:
    return table_RD.new_empty(rows_T.shape[0], table_RD.shape[1])


def _gather_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.table_rows = inputs[0].shape[0]


def _gather_backward(ctx, grad_TD: Tensor):
    (rows_T,) = ctx.saved_tensors
    if grad_TD.is_cuda:
        return rows_backward.gather_rows(grad_TD, rows_T, ctx.table_rows), None
    total_RD = torch.zeros(ctx.table_rows, grad_TD.shape[1], dtype=torch.float32, device=grad_TD.device)
    return accumulate_rows(total_RD, rows_T, grad_TD.float()).to(grad_TD.dtype), None


def accumulate_rows(total_RD: Tensor, rows_T: Tensor, values_TD: Tensor) -> Tensor:
    """`total[rows[t]] += values[t]` in place, in an order that is the same every time."""
    if total_RD.is_cuda:  # sorts by row; index_add_ would use atomics
        return total_RD.index_put_((rows_T,), values_TD, accumulate=True)
    return total_RD.index_add_(0, rows_T, values_TD)  # serial; index_put_ would use atomics


gather_rows.register_autograd(_gather_backward, setup_context=_gather_setup)


@operator("lockstep::rms_norm")
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim (Zhang and Sennrich 2019)."""
    if native.usable(x_TD, weight_D):
        return native.rms_norm(x_TD, weight_D, eps)
    return reference.rms_norm(x_TD, weight_D, eps).to(x_TD.dtype)


@rms_norm.register_kernel("cuda")
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    from .kernels import rows

    return rows.rms_norm(x_TD, weight_D, eps)


@rms_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x_TD)


def _rms_setup(ctx, inputs, output) -> None:
    x_TD, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x_TD, weight_D)


def _rms_backward(ctx, grad_TD: Tensor):
    x_TD, weight_D = ctx.saved_tensors
    if x_TD.is_cuda:
        return *rows_backward.rms_norm(grad_TD, x_TD, weight_D, ctx.eps), None
    grad_x, grad_w = _norm_backward(x_TD.float(), weight_D.float(), grad_TD.float(), ctx.eps)
    return grad_x.to(x_TD.dtype), grad_w.sum(0).to(weight_D.dtype), None


rms_norm.register_autograd(_rms_backward, setup_context=_rms_setup)


def _norm_backward(x: Tensor, weight: Tensor, grad: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm for the input and, per row and still unreduced, for the weight (float32)."""
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    normed = x * rstd
    weighted = grad * weight
    grad_x = rstd * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return grad_x, grad * normed


@operator("lockstep::qk_norm_rope")
def qk_norm_rope(
    qkv_TE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """Queries and keys out of the fused projection: RMSNorm a head (when weights are given), then rotary embedding.

    Args:
        qkv_TE: [T, (N + 2K) * H], heads in the order q, k, v.
        q_weight_H, k_weight_H: norm weights, both or neither.
        cos_sin_TH: float32 [T, H]; cosines in the first half, sines in the second (`rope_table`).

    Returns:
        [T, N + K, H] in qkv's dtype. Rotation pairs element i with i + H/2, as Hugging Face does (Su et al. 2021).
    """
    path = native if native.usable(qkv_TE) else reference
    return path.qk_norm_rope(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps)


@qk_norm_rope.register_kernel("cuda")
def _(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps):
    from .kernels import rows

    return rows.qk_norm_rope(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps)


@qk_norm_rope.register_fake
def _(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps):
    return qkv_TE.new_empty(qkv_TE.shape[0], num_heads + num_kv_heads, cos_sin_TH.shape[1])


def _qk_setup(ctx, inputs, output) -> None:
    qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, ctx.num_heads, ctx.num_kv_heads, ctx.eps = inputs
    ctx.save_for_backward(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH)


def _qk_backward(ctx, grad: Tensor):
    qkv_TE, q_weight_H, k_weight_H, cos_sin_TH = ctx.saved_tensors
    if qkv_TE.is_cuda:
        settings = ctx.num_heads, ctx.num_kv_heads, ctx.eps
        grads = rows_backward.qk_norm_rope(grad, qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, *settings)
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


qk_norm_rope.register_autograd(_qk_backward, setup_context=_qk_setup)


@operator("lockstep::rope_table")
def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """Cosines and sines of the rotary angles, float32 [T, H]; positions are int64, `inv_freq` is float32 [H/2]."""
    return (native if native.usable(inv_freq) else reference).rope_table(positions_T, inv_freq)


@rope_table.register_kernel("cuda")
def _(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    from .kernels import rows

    return rows.rope_table(positions_T, inv_freq)


@rope_table.register_fake
def _(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    return inv_freq.new_empty(positions_T.shape[0], 2 * inv_freq.shape[0])


@operator("lockstep::silu_mul")
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """`silu(gate) * up` of a fused [T, 2F] projection (gate first), [T, F] (Shazeer 2020)."""
    return (native if native.usable(gate_up_TE) else reference).silu_mul(gate_up_TE)


@silu_mul.register_kernel("cuda")
def _(gate_up_TE: Tensor) -> Tensor:
    from .kernels import rows

    return rows.silu_mul(gate_up_TE)


@silu_mul.register_fake
def _(gate_up_TE: Tensor) -> Tensor:
    return gate_up_TE.new_empty(gate_up_TE.shape[0], gate_up_TE.shape[1] // 2)


def _silu_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


def _silu_backward(ctx, grad_TF: Tensor):
    (gate_up_TE,) = ctx.saved_tensors
    return silu_mul_backward(grad_TF, gate_up_TE)


silu_mul.register_autograd(_silu_backward, setup_context=_silu_setup)


@operator("lockstep::silu_mul_backward")
def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """Gradient of `silu_mul` for its input, [T, 2F]."""
    path = native if native.usable(grad_TF, gate_up_TE) else reference
    return path.silu_mul_backward(grad_TF, gate_up_TE)


@silu_mul_backward.register_kernel("cuda")
def _(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    from .kernels import rows_backward

    return rows_backward.silu_mul(grad_TF, gate_up_TE)


@silu_mul_backward.register_fake
def _(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    return torch.empty_like(gate_up_TE)
