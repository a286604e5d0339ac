"""Pushed products and attention on GPUs: the kernel that computes words stores them for the other ranks, and a second
one takes theirs, and may normalize the rows."""

from __future__ import annotations

from torch import Tensor

from ...ops.attention.triton_decode import attention_decode
from ...ops.linear import kernels
from ...ops.linear.choice import Kind, weight_tiles
from ...ops.norm.triton import rms_norm
from ...ops.records import (
    NO_GROUPS,
    PLAIN,
    SILU,
    SLOT,
    AttentionScores,
    Contexts,
    Epilogue,
    KVPages,
    Norm,
    PrefixGroups,
    Rotation,
)
from ...ops.rows import aligned_rows
from .memory import shared_memory
from .triton import launch_push, push_columns
from .triton_norm import has_words_of_norm, take_norm


def push_linear_add(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, ranks: int, group: str, bias_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _push_product("linear_add", (x_TK, weight_NK, residual_TN), Epilogue(bias_N), ranks, group)


def push_linear_add_norm(
    x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, ranks: int, group: str, norm: Norm
) -> tuple[Tensor, Tensor]:
    rows, columns = residual_TN.shape
    if not (_stores("linear_add", rows, weight_NK, False) and has_words_of_norm(columns, ranks)):
        own_TN, all_TN = push_linear_add(x_TK, weight_NK, residual_TN, ranks, group)
        return own_TN, rms_norm(all_TN, *norm)
    memory = shared_memory(group)
    # Both before the product: what takes the words loads the weights at once, and may not write into its operands.
    norm = norm._replace(weight_D=aligned_rows(norm.weight_D))
    normed_TN = x_TK.new_empty(rows, ranks * columns)
    own_TN = kernels.product("linear_add", x_TK, weight_NK, residual_TN, Epilogue(peers=memory.peers))
    return own_TN, take_norm(normed_TN, norm, memory)


def push_gate_up(
    x_TD: Tensor, weight_ED: Tensor, ranks: int, group: str, activation: str = SILU
) -> tuple[Tensor, Tensor]:
    return _push_product("norm_gate_up", (x_TD, weight_ED, None), Epilogue(activation=activation), ranks, group)


def _push_product(
    kind: Kind, operands: tuple[Tensor, Tensor, Tensor | None], epilogue: Epilogue, ranks: int, group: str
) -> tuple[Tensor, Tensor]:
    """The product and all ranks' columns of it. A kernel that cannot store them, or has more than a slot holds, is
    followed by a whole push."""
    x_TK, weight_NK, residual_TN = operands
    rows, columns = x_TK.shape[0], weight_NK.shape[0] // weight_tiles(kind)
    if not _stores(kind, rows, weight_NK, epilogue.bias_N is not None):
        own_TN = kernels.product(kind, x_TK, weight_NK, residual_TN, epilogue)
        return own_TN, push_columns(own_TN, ranks, group, False)
    memory = shared_memory(group)
    all_TN = x_TK.new_empty(rows, ranks * columns)  # before the product, in whose operands' memory it may not lie
    own_TN = kernels.product(kind, x_TK, weight_NK, residual_TN, epilogue._replace(peers=memory.peers))
    return own_TN, launch_push(own_TN, False, memory, store=False, out=all_TN)


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
    rows, columns = qkv_SE.shape[0], rotation.num_heads * rotation.cos_sin_TH.shape[1]
    arguments = qkv_SE, rotation, cache, slots_S, contexts, groups, scores, weight_offset
    if not _fits(rows, columns):
        own_SNH = attention_decode(*arguments)
        return own_SNH, push_columns(own_SNH.flatten(1), ranks, group, False)
    memory, all_SE = shared_memory(group), qkv_SE.new_empty(rows, ranks * columns)  # before attention, as above
    own_SNH = attention_decode(*arguments, memory.peers)
    return own_SNH, launch_push(own_SNH.flatten(1), False, memory, store=False, out=all_SE)


def _stores(kind: Kind, rows: int, weight_NK: Tensor, biased: bool) -> bool:
    """Whether the product's kernel stores its words, and a slot holds them."""
    fits = _fits(rows, weight_NK.shape[0] // weight_tiles(kind))
    return fits and kernels.stores_to_peers(kind, rows, weight_NK, biased)


def _fits(rows: int, columns: int) -> bool:
    """Whether a slot holds so many elements of 16 bits, of which it takes pairs."""
    return columns % 2 == 0 and 0 < rows * columns // 2 <= SLOT
