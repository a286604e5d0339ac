"""Matrix products under contract C1: `acc = tl.dot(a, b, acc)` over ascending K, K never split.

Measured on an H200: tiles, warps and stages do not change a bit, so the configuration follows the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_M = 8  # row blocks that share a column block's weights in the L2 cache


class _Config(NamedTuple):
    """Tile sizes (block_k is a multiple of 16), warps, and depth of the software pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_CONFIGS = (  # (rows up to, configuration)
    (16, _Config(16, 128, 128, 4, 4)),
    (32, _Config(32, 128, 128, 4, 4)),
    (64, _Config(64, 128, 64, 4, 5)),
    (512, _Config(128, 128, 64, 8, 4)),
)
_LARGE = _Config(128, 256, 64, 8, 3)


def _config(rows: int) -> _Config:
    return next((config for bound, config in _CONFIGS if rows <= bound), _LARGE)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    blocks_m, blocks_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP * blocks_n) * GROUP
    group = tl.minimum(blocks_m - first_m, GROUP)
    within = program % (GROUP * blocks_n)
    m = (first_m + within % group) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // group * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + (m % rows).to(tl.int64)[:, None] * x_stride + k[None, :]  # rows and columns past the end wrap
    w = w_ptr + (n % columns).to(tl.int64)[None, :] * w_stride + k[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(x), tl.load(w)
        else:
            a = tl.load(x, mask=k[None, :] < depth - start, other=0.0)
            b = tl.load(w, mask=k[:, None] < depth - start, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K
    out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def _linear(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    w_NK = w_NK if w_NK.stride(1) == 1 else w_NK.contiguous()
    (rows, depth), columns = x_MK.shape, w_NK.shape[0]
    out_MN = torch.empty((rows, columns), dtype=out_dtype, device=x_MK.device)
    config = _config(rows)
    _linear_kernel[(triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n),)](
        x_MK,
        w_NK,
        out_MN,
        rows,
        columns,
        depth,
        x_MK.stride(0),
        w_NK.stride(0),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        EVEN_K=depth % config.block_k == 0,
        GROUP=GROUP_M,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_MN


def linear_fp32(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """`x @ w.T` with the float32 accumulators as the result, [M, N]."""
    return _linear(x_MK, w_NK, torch.float32)


def linear_bf16(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """`x @ w.T` rounded once to bfloat16, [M, N]: what cuBLASLt is held to."""
    return _linear(x_MK, w_NK, torch.bfloat16)
