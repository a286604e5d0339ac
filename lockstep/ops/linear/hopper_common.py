"""Shared by the Hopper kernels for products: where they run, their operands, their epilogue.

Shape suffixes: M rows, N columns of the result, K depth.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import pdl
from ..activation.triton import apply_gate
from ..rows import aligned_rows
from ..triton_peers import store_pairs
from .choice import Choice, Kind, weight_tiles

barrier = getattr(gl, "barrier", None) or gl.thread_barrier

ALIGNMENT = 16  # bytes that one instruction copies
WGMMA_ROWS = 64  # blocks with at least this many rows use wgmma


@gluon.jit
def apply_gate_rounded(gate, up, ACTIVATION: gl.constexpr, dtype: gl.constexpr):
    """`apply_gate` of two accumulators, rounded where the separate operators round."""
    return apply_gate(gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32), ACTIVATION).to(dtype)


@gluon.jit
def add_bias(acc, bias_ptr, first_n, columns):
    """The accumulator plus the bias of its columns, from `first_n` on."""
    n = first_n + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    return acc + gl.expand_dims(gl.load(bias_ptr + n, mask=n < columns, other=0.0).to(gl.float32), 0)


@gluon.jit
def store_to_peers(value, m, exists, first_n, columns, addresses_ptr, state_ptr, rank, RANKS: gl.constexpr):
    """Store a tile for the other ranks, in pairs of columns: rows `m` that exist, and columns from `first_n` on."""
    low, high = gl.split(gl.reshape(value, (value.shape[0], value.shape[1] // 2, 2)))
    pairs: gl.constexpr = low.type.layout
    row = gl.convert_layout(m, gl.SliceLayout(1, pairs))
    exists = gl.convert_layout(exists, gl.SliceLayout(1, pairs))
    word, width = first_n // 2 + gl.arange(0, low.shape[1], layout=gl.SliceLayout(0, pairs)), columns // 2
    at = gl.expand_dims(row.to(gl.int64) * width, 1) + gl.expand_dims(word, 0)
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(word < width, 0)
    store_pairs(low, high, at, inside, addresses_ptr, state_ptr, rank, RANKS)


def supports(choice: Choice, weight_NK: Tensor) -> bool:
    has = pdl.has_wgmma(weight_NK) if choice.block_m >= WGMMA_ROWS else pdl.is_supported(weight_NK)
    return has and weight_NK.is_contiguous() and weight_NK.data_ptr() % ALIGNMENT == 0


def operands(kind: Kind, x_MK: Tensor, weight_NK: Tensor, residual_MN: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The rows as kernels take them, memory for the result, and the residual; without a residual, that memory again."""
    x_MK = aligned_rows(x_MK)
    out_MN = x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0] // weight_tiles(kind))
    return x_MK, out_MN, out_MN if residual_MN is None else aligned_rows(residual_MN)


def loads_weights_early(kind: Kind) -> bool:
    """Whether weights are loaded before the previous kernel has ended: in a captured graph, for kinds that allow it."""
    return kind != "linear" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
