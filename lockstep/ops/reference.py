"""The reference path: every operator in plain torch, bitwise invariant to batch, position and padding on a CPU.

What makes it so was measured, not assumed (`docs/numerics.md`): matrix products are made in blocks of `ROW_BLOCK` rows,
with at least `MIN_COLUMNS` columns and a depth of at least `MIN_DEPTH`, attention sees fixed key tiles at absolute
positions, and no kernel whose vector body and scalar tail differ is used.

Shape suffixes as in `ops/rope/operator.py` and `ops/attention/operator.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .records import Rotation

ROW_BLOCK = 64  # one shape a weight: how a library cuts a product, and whether it splits the depth, follows the rows
MIN_COLUMNS = 16  # measured: with 12 and more a row's bits are its own; with fewer they change with rows and addresses
MIN_DEPTH = 32  # torch leaves bfloat16 products of 16 * 16 * 16 multiplications and fewer to other code


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """Matrix product in blocks of `ROW_BLOCK` rows; rows, columns and depth are filled up with zeros."""
    (rows, depth), columns = x_TK.shape, weight_NK.shape[0]
    deeper, wider = max(MIN_DEPTH - depth, 0), max(MIN_COLUMNS - columns, 0)
    if deeper or wider:
        weight_NK = F.pad(weight_NK, (0, deeper, 0, wider))
    padded = F.pad(x_TK, (0, deeper, 0, -rows % ROW_BLOCK))
    out = torch.cat([F.linear(block, weight_NK) for block in padded.split(ROW_BLOCK)])
    return out[:rows, :columns].contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim; float32 result."""
    x = x.float()
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight.float()


def head_weights(q_weight_H: Tensor, k_weight_H: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Norm weights a head, float32 [N + K, H]."""
    return torch.cat((q_weight_H.expand(num_heads, -1), k_weight_H.expand(num_kv_heads, -1))).float()


def qk_norm_rope(qkv_TE: Tensor, by: Rotation) -> Tensor:
    """See `rope.operator.qk_norm_rope`."""
    tokens, head_dim = by.cos_sin_TH.shape
    heads = by.num_heads + by.num_kv_heads
    qk = qkv_TE[:, : heads * head_dim].view(tokens, heads, head_dim)
    if by.q_weight_H is not None and by.k_weight_H is not None:
        qk = rms_norm(qk, head_weights(by.q_weight_H, by.k_weight_H, by.num_heads, by.num_kv_heads), by.eps)
    else:
        qk = qk.float()
    half = head_dim // 2
    cos, sin = by.cos_sin_TH[:, None, :half], by.cos_sin_TH[:, None, half:]
    first, second = qk[..., :half], qk[..., half:]
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float32)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half:])
    return out.to(qkv_TE.dtype)


def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """See `rope.operator.rope_table`."""
    angles = positions_T.to(torch.float32).unsqueeze(1) * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul`. `x / (1 + exp(-x))`: torch's own silu differs between its vector body and
    scalar tail."""
    gate, up = gate_up_TE.float().chunk(2, dim=1)
    return (gate / (torch.exp(-gate) + 1.0) * up).to(gate_up_TE.dtype)


def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul_backward`."""
    gate, up = gate_up_TE.float().chunk(2, dim=1)
    grad = grad_TF.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat((grad_gate, grad * silu), dim=1).to(gate_up_TE.dtype)
