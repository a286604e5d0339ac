"""The operators, and their fallback by collectives.

In those of products and of attention, to which `graph.passes.fuse` joins one of these and its push, the kernel that
computes the words stores them in the other ranks' memory, so that they are on their way before it has ended. Where a
norm is all that reads what was pushed, the kernel that takes the words computes it.

Shape suffixes: T rows, K depth, N a rank's columns; D model dim, F a rank's feed-forward dim; S sequences, E a rank's
fused projection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.attention.operator import attention_decode
from ...ops.linear.operator import gate_up, linear_add
from ...ops.norm.operator import rms_norm
from ...ops.operator import operator
from ...ops.records import NO_GROUPS, PLAIN, SILU, AttentionScores, Contexts, KVPages, Norm, PrefixGroups, Rotation
from .. import torch_private


@operator(
    cuda="triton:push_columns",
    fake=lambda x, ranks, _, to_owners: x.new_empty(x.shape[0] // (ranks if to_owners else 1), ranks * x.shape[1]),
)
def push_columns(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """All ranks' columns side by side, in rank order: of all rows, or of this rank's share of the rows. Nothing is
    computed.

    Args:
        x: this rank's columns, [R, W].
        group: the name of the ranks' group in graphs (`Axis.group`).
        to_owners: whether to return this rank's share of the rows alone; `ranks` must divide R.

    Returns:
        [R, ranks * W], or [R / ranks, ranks * W] with `to_owners`.
    """
    return by_collective(x, ranks, group, to_owners)


def by_collective(x: Tensor, ranks: int, group: str, to_owners: bool) -> Tensor:
    """`push_columns` by an all-gather or an all-to-all."""
    rows, width = x.shape
    if to_owners:
        found = torch_private.all_to_all(x.reshape(-1), ranks, group)
    else:
        found = torch_private.all_gather(x.contiguous(), ranks, group)
    parts = torch_private.wait(found).view(ranks, -1, width)
    return torch.cat(parts.unbind(), dim=1)


def _results(rows: int, columns: int, ranks: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(rows, columns), like.new_empty(rows, ranks * columns)


@operator(
    cuda="triton_products:push_linear_add",
    fake=lambda x_TK, weight_NK, _, ranks, *__: _results(x_TK.shape[0], weight_NK.shape[0], ranks, x_TK),
)
def push_linear_add(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, ranks: int, group: str, bias_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`linear_add`, [T, N], and `push_columns` of it, [T, ranks * N]."""
    own_TN = linear_add.on_cpu[x_TK.dtype](x_TK, weight_NK, residual_TN, bias_N)
    return own_TN, by_collective(own_TN, ranks, group, False)


@operator(
    cuda="triton_products:push_linear_add_norm",
    fake=lambda x_TK, weight_NK, _, ranks, *__: _results(x_TK.shape[0], weight_NK.shape[0], ranks, x_TK),
)
def push_linear_add_norm(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, ranks: int, group: str, norm: Norm
) -> tuple[Tensor, Tensor]:
    """`linear_add`, [T, N], and `rms_norm` of `push_columns` of it, [T, ranks * N]."""
    own_TN = linear_add.on_cpu[x_TK.dtype](x_TK, weight_NK, residual_TN)
    return own_TN, rms_norm.on_cpu[x_TK.dtype](by_collective(own_TN, ranks, group, False), *norm)


@operator(
    cuda="triton_products:push_gate_up",
    fake=lambda x_TD, weight_ED, ranks, *_: _results(x_TD.shape[0], weight_ED.shape[0] // 2, ranks, x_TD),
)
def push_gate_up(
    x_TD: Tensor, weight_ED: Tensor, ranks: int, group: str, activation: str = SILU
) -> tuple[Tensor, Tensor]:
    """`gate_up`, [T, F], and `push_columns` of it, [T, ranks * F]."""
    own_TF = gate_up.on_cpu[x_TD.dtype](x_TD, weight_ED, activation)
    return own_TF, by_collective(own_TF, ranks, group, False)


def _attended(
    qkv_SE: Tensor, rotation: Rotation, cache: KVPages, slots_S: Tensor, contexts: Contexts, ranks: int, *_: object
) -> tuple[Tensor, Tensor]:
    heads, head_dim = rotation.num_heads, rotation.cos_sin_TH.shape[1]
    own, every = _results(qkv_SE.shape[0], heads * head_dim, ranks, qkv_SE)
    return own.view(-1, heads, head_dim), every


@operator(mutates=("k_cache", "v_cache"), cuda="triton_products:push_attention_decode", fake=_attended)
def push_attention_decode(
    qkv_SE: Tensor,
    rotation: Rotation,
    cache: KVPages,
    slots_S: Tensor,
    contexts: Contexts,
    ranks: int,
    group: str,
    groups: PrefixGroups = NO_GROUPS,
    scores: AttentionScores = PLAIN,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`attention_decode` of a rank's heads, [S, N, H], and `push_columns` of it, [S, ranks * N * H]."""
    attend = attention_decode.on_cpu[qkv_SE.dtype]
    own_SNH = attend(qkv_SE, rotation, cache, slots_S, contexts, groups, scores, weight_offset)
    return own_SNH, by_collective(own_SNH.flatten(1), ranks, group, False)
