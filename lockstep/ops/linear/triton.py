"""Matrix products under contract C1: `acc = tl.dot(a, b, acc)` over ascending K, K never split.

As measured on an H200, tiles, warps and stages do not change a bit, so the configuration may follow the shape. One
kernel computes the plain product and two fused forms, which round where the separate operators round, so they have the
same bits:

- GATED: the weight holds gate rows and up rows, a program computes a tile of both, and the result is their gated
  product, such as `silu(gate) * up`;
- ADD: the product is added to a residual.

A bias is added to the accumulator before it is rounded.

Per-head products have three strides per operand, so one kernel computes the product, both of its gradients, and
products of views of fused weights.

Shape suffixes: M rows, N columns of the result, K depth; of per-head products: T rows, N heads, M columns, K depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import pdl
from ..activation.triton import apply_gate
from ..records import PLAIN_EPILOGUE, Epilogue, peer_arguments
from ..rows import unit_inner
from ..triton_peers import store_pairs
from .choice import CHAIN, Choice, Kind, weight_tiles

SMALL, LARGE = Choice("per_head", 16, 128, 64, 4, 4), Choice("per_head", 128, 128, 64, 8, 3)
MANY_ROWS = 64  # from this many rows on, per-head products use LARGE


@triton.jit
def swizzle(program, blocks_m, blocks_n, GROUP: tl.constexpr = 8):
    """A program's block of rows and of columns, ordered so that `GROUP` successive programs, each with other rows,
    share the weights of a block of columns in the L2 cache."""
    first_m = program // (GROUP * blocks_n) * GROUP
    group = tl.minimum(blocks_m - first_m, GROUP)
    within = program % (GROUP * blocks_n)
    return first_m + within % group, within // group


@triton.jit
def add_bias(acc, bias_ptr, n, columns):
    """The accumulator plus the bias of its columns."""
    return acc + tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "early", "rank"])
def _linear_kernel(
    x_ptr,  # [rows, depth]
    w_ptr,  # [columns, depth], or [2 * columns, depth] if GATED
    residual_ptr,  # [rows, columns], read if ADD
    out_ptr,  # [rows, columns], contiguous
    bias_ptr,  # [columns], or None
    rows,
    columns,
    depth,
    x_stride,
    w_stride,
    residual_stride,
    early,  # release the dependents at the start, not after the loop
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of the gate
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
    addresses_ptr=None,  # where the result is stored for other ranks
    state_ptr=None,
    rank=0,
    RANKS: tl.constexpr = 1,
):
    block_m, block_n = swizzle(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    m, n = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = (m < rows)[:, None]
    inside_out = inside & (n < columns)[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
    w = (w_ptr + (n % columns).to(tl.int64) * w_stride)[None, :] + k[:, None]  # columns past the end wrap
    up_offset = tl.cast(columns, tl.int64) * w_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PDL:
        if early and RANKS == 1:
            pdl.gdc_launch_dependents()
        pdl.gdc_wait()
        if RANKS > 1:
            pdl.gdc_launch_dependents()  # the kernel that takes the words, see `push/triton`
    if ADD:
        residual = residual_ptr + m.to(tl.int64)[:, None] * residual_stride + n[None, :]
        residual = tl.load(residual, mask=inside_out, other=0.0)
    for start in range(0, depth, BLOCK_K):
        inside_a = inside if EVEN_K else inside & (k < depth - start)[None, :]
        inside_b = (k < depth - start)[:, None]
        a = tl.load(x, mask=inside_a, other=0.0)
        b = tl.load(w) if EVEN_K else tl.load(w, mask=inside_b, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        if GATED:
            b_up = tl.load(w + up_offset) if EVEN_K else tl.load(w + up_offset, mask=inside_b, other=0.0)
            acc_up = tl.dot(a, b_up, acc_up, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K
    if PDL:
        pdl.gdc_launch_dependents()  # no effect if they were released early
    dtype = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        acc = add_bias(acc, bias_ptr, n, columns)
    if GATED:
        acc = apply_gate(acc.to(dtype).to(tl.float32), acc_up.to(dtype).to(tl.float32), ACTIVATION)
    if ADD:
        acc = residual.to(tl.float32) + acc.to(dtype).to(tl.float32)
    acc = acc.to(dtype)
    if RANKS > 1:
        low, high = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        word, width = block_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2), columns // 2
        at, exists = m.to(tl.int64)[:, None] * width + word[None, :], inside & (word < width)[None, :]
        store_pairs(low, high, at, exists, addresses_ptr, state_ptr, rank, RANKS)
    tl.store(out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :], acc, mask=inside_out)


def supports(choice: Choice, weight_NK: Tensor) -> bool:
    """Always: a weight in another layout is copied."""
    return True


def run(
    kind: Kind,
    choice: Choice,
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor | None = None,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> Tensor:
    """See `kernels.ProductKernel`; computes in the dtype of x."""
    x_MK, w_NK = unit_inner(x_MK), unit_inner(weight_NK)
    is_gated, dtype = kind == "norm_gate_up", torch.float32 if kind == "linear_fp32" else x_MK.dtype
    (rows, depth), columns = x_MK.shape, w_NK.shape[0] // weight_tiles(kind)
    out_MN = torch.empty((rows, columns), dtype=dtype, device=x_MK.device)
    residual = out_MN if residual_MN is None else unit_inner(residual_MN)
    _linear_kernel[(triton.cdiv(rows, choice.block_m) * triton.cdiv(columns, choice.block_n),)](
        x_MK, w_NK, residual, out_MN, epilogue.contiguous_bias, rows, columns, depth, x_MK.stride(0), w_NK.stride(0),
        residual.stride(0), choice.early,
        GATED=is_gated, ACTIVATION=epilogue.activation, ADD=residual_MN is not None, BLOCK_M=choice.block_m,
        BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, EVEN_K=depth % choice.block_k == 0,
        **pdl.options(x_MK, num_warps=choice.num_warps, num_stages=choice.num_stages), **peer_arguments(epilogue.peers),
    )  # fmt: skip
    return out_MN


def chain(x_MK: Tensor, weight_NK: Tensor, kind: Kind = "linear", bias_N: Tensor | None = None) -> Tensor:
    """The product by `CHAIN`, whose bits every other choice must have; rounded, or for "linear_fp32" not."""
    return run(kind, CHAIN, x_MK, weight_NK, None, Epilogue(bias_N))


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
    (rows, heads, depth), columns = x_TNK.shape, weight_NMK.shape[1]
    out_TNM = torch.empty((rows, heads, columns), dtype=x_TNK.dtype, device=x_TNK.device)
    tile = SMALL if rows < MANY_ROWS else LARGE
    _head_linear_kernel[(triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n), heads)](
        x_TNK, weight_NMK, out_TNM, rows, columns, depth, *x_TNK.stride(), *weight_NMK.stride(),
        BLOCK_T=tile.block_m, BLOCK_M=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return out_TNM
