"""Linear layers fused with their neighbours: the same bits as the separate operators, in fewer kernels.

Each rounds where the separate operators round (`docs/numerics.md`). With gradients enabled those run, because their
backward passes are separate; without, one operator runs, and on a GPU the shape decides how much of it is one kernel.

Shape suffixes: T rows, D model dim, E fused projection, F feed-forward dim, N query heads, K key/value heads or depth,
H head dim, P pages, S sequences, C groups of sequences, W rows of a group.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import native, reference
from .attention import attention_paged, write_kv
from .linear import linear
from .operator import operator
from .rows import rms_norm, silu_mul


def norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """`linear(rms_norm(x, norm, eps), weight)`, [T, E]."""
    if torch.is_grad_enabled():
        return linear(rms_norm(x_TD, norm_D, eps), weight_ED)
    return _norm_linear(x_TD, norm_D, weight_ED, eps)


def norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    """`silu_mul(linear(rms_norm(x, norm, eps), weight))`: the weight is [2F, D], gate rows first; [T, F]."""
    if torch.is_grad_enabled():
        return silu_mul(linear(rms_norm(x_TD, norm_D, eps), weight_ED))
    return _norm_gate_up(x_TD, norm_D, weight_ED, eps)


def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    """`residual + linear(x, weight)`, [T, N]: both the product and the sum are rounded."""
    if torch.is_grad_enabled():
        return residual_TN + linear(x_TK, weight_NK)
    return _linear_add(x_TK, weight_NK, residual_TN)


def _cpu_norm_linear(path: ModuleType, x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return path.linear(path.rms_norm(x_TD, norm_D, eps).to(x_TD.dtype), weight_ED)


@operator("lockstep::norm_linear")
def _norm_linear(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return _cpu_norm_linear(native if native.usable(x_TD, weight_ED) else reference, x_TD, norm_D, weight_ED, eps)


@_norm_linear.register_kernel("cuda")
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    from .kernels import fused

    return fused.norm_linear(x_TD, norm_D, weight_ED, eps)


@_norm_linear.register_fake
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0])


@operator("lockstep::norm_gate_up")
def _norm_gate_up(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    path = native if native.usable(x_TD, weight_ED) else reference
    return path.silu_mul(_cpu_norm_linear(path, x_TD, norm_D, weight_ED, eps))


@_norm_gate_up.register_kernel("cuda")
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    from .kernels import fused

    return fused.norm_gate_up(x_TD, norm_D, weight_ED, eps)


@_norm_gate_up.register_fake
def _(x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float) -> Tensor:
    return x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0] // 2)


@operator("lockstep::linear_add")
def _linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    path = native if native.usable(x_TK, weight_NK) else reference
    return path.linear(x_TK, weight_NK).add_(residual_TN)


@_linear_add.register_kernel("cuda")
def _(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    from .kernels import fused

    return fused.linear_add(x_TK, weight_NK, residual_TN)


@_linear_add.register_fake
def _(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor) -> Tensor:
    return x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])


@operator("lockstep::qk_norm_rope_write_kv", mutates_args=("k_cache", "v_cache"))
def qk_norm_rope_write_kv(
    qkv_TE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """`qk_norm_rope`, then `write_kv` of the keys and of the projection's values; the queries, [T, N, H]. No autograd.

    Args:
        k_cache, v_cache: [P, page_size, K, H], written at `slots_T`, as in `write_kv`; the others as in `qk_norm_rope`.
    """
    path = native if native.usable(qkv_TE) else reference
    qk = path.qk_norm_rope(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps)
    v_TKH = qkv_TE[:, qk.shape[1] * qk.shape[2] :].unflatten(1, (num_kv_heads, qk.shape[2]))
    write_kv(qk[:, num_heads:], v_TKH, k_cache, v_cache, slots_T)
    return qk[:, :num_heads]


@qk_norm_rope_write_kv.register_kernel("cuda")
def _(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps, k_cache, v_cache, slots_T):
    from .kernels import rows

    cache = k_cache, v_cache, slots_T
    return rows.qk_norm_rope(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps, cache)


@qk_norm_rope_write_kv.register_fake
def _(qkv_TE, q_weight_H, k_weight_H, cos_sin_TH, num_heads, num_kv_heads, eps, k_cache, v_cache, slots_T):
    heads = num_heads if qkv_TE.is_cuda else num_heads + num_kv_heads  # strides as the implementations leave them
    return qkv_TE.new_empty(qkv_TE.shape[0], heads, cos_sin_TH.shape[1])[:, :num_heads]


@operator("lockstep::attention_decode", mutates_args=("k_cache", "v_cache"))
def attention_decode(
    qkv_SE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_SH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    slots_S: Tensor,
    block_table: Tensor,
    context_len_S: Tensor,
    max_context_len: int,
    group_rows_CW: Tensor | None = None,
    shared_len_S: Tensor | None = None,
) -> Tensor:
    """`qk_norm_rope_write_kv` and `attention_paged` of one new token a sequence, [S, N, H]. No autograd.

    Args:
        qkv_SE: the tokens' fused projections; arguments up to `slots_S` are as in `qk_norm_rope_write_kv`.
        slots_S: where each sequence's last position lies by its block table. Elsewhere for a row that is idle: what it
            attends to means nothing.
        block_table: and the others are as in `attention_paged`.
    """
    rotation = q_weight_H, k_weight_H, cos_sin_SH, num_heads, num_kv_heads, eps
    q_SNH = qk_norm_rope_write_kv(qkv_SE, *rotation, k_cache, v_cache, slots_S)
    cu_seqlens = torch.arange(qkv_SE.shape[0] + 1, dtype=torch.int32)
    return attention_paged(q_SNH, k_cache, v_cache, block_table, cu_seqlens, context_len_S, 1, max_context_len)


@attention_decode.register_kernel("cuda")
def _(
    qkv_SE,
    q_weight_H,
    k_weight_H,
    cos_sin_SH,
    num_heads,
    num_kv_heads,
    eps,
    k_cache,
    v_cache,
    slots_S,
    block_table,
    context_len_S,
    max_context_len,
    group_rows_CW=None,
    shared_len_S=None,
):
    from .kernels import attention_decode, rows

    rotation, cache = (q_weight_H, k_weight_H, cos_sin_SH, num_heads, num_kv_heads, eps), (k_cache, v_cache)
    paged = *cache, block_table, context_len_S, max_context_len
    if group_rows_CW is None or group_rows_CW.numel() == 0:
        return attention_decode.decode(qkv_SE, *paged, projected=attention_decode.Projected(*rotation, slots_S))
    q_SNH = rows.qk_norm_rope(qkv_SE, *rotation, (*cache, slots_S))  # each query is in two programs
    return attention_decode.decode(q_SNH, *paged, group_rows_CW, shared_len_S)


@attention_decode.register_fake
def _(qkv_SE, q_weight_H, k_weight_H, cos_sin_SH, num_heads, *_):
    return qkv_SE.new_empty(qkv_SE.shape[0], num_heads, cos_sin_SH.shape[1])
