"""A matrix product a head under contract C1: `acc = tl.dot(a, b, acc)` over ascending K, K never split.

Every operand has three strides, so one kernel does the product, both of its gradients, and views of fused weights.

Shape suffixes: T rows, N heads, M output columns, K contracted dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tables.linear_table import Choice

SMALL, LARGE = Choice("per_head", 16, 128, 64, 4, 4), Choice("per_head", 128, 128, 64, 8, 3)
MANY_ROWS = 64


def _tile(rows: int) -> Choice:
    return SMALL if rows < MANY_ROWS else LARGE


@triton.jit(do_not_specialize=["rows"])
def _head_linear_kernel(
    x_ptr,  # [T, N, K]
    w_ptr,  # [N, M, K]
    out_ptr,  # [T, N, M], contiguous
    rows,
    columns,
    depth,
    x_stride,
    x_head_stride,
    x_k_stride,
    w_head_stride,
    w_stride,
    w_k_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(columns, BLOCK_M)
    t = tl.program_id(0) // tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + tl.cast(head, tl.int64) * x_head_stride + t.to(tl.int64)[:, None] * x_stride
    w = w_ptr + tl.cast(head, tl.int64) * w_head_stride + m.to(tl.int64)[None, :] * w_stride
    acc = tl.zeros((BLOCK_T, BLOCK_M), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        offset = (start + k).to(tl.int64)
        a = tl.load(x + offset[None, :] * x_k_stride, mask=(t < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(w + offset[:, None] * w_k_stride, mask=inside[:, None] & (m < columns)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    out = out_ptr + (t.to(tl.int64)[:, None] * heads + head) * columns + m[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(t < rows)[:, None] & (m < columns)[None, :])


def per_head_linear(x_TNK: Tensor, weight_NMK: Tensor) -> Tensor:
    """See `per_head.per_head_linear`."""
    (rows, heads, depth), columns = x_TNK.shape, weight_NMK.shape[1]
    out_TNM = torch.empty((rows, heads, columns), dtype=x_TNK.dtype, device=x_TNK.device)
    tile = _tile(rows)
    _head_linear_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n), heads)](
        x_TNK,
        weight_NMK,
        out_TNM,
        rows,
        columns,
        depth,
        *x_TNK.stride(),
        *weight_NMK.stride(),
        BLOCK_T=tile.block_m,
        BLOCK_M=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TNM
