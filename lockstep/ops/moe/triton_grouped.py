"""Matrix products of rows sorted by group, each group with weights of its own, for groups of any sizes.

A program finds a tile's group from the offsets on the device. For groups with many rows the kernel is persistent: one
program per multiprocessor goes from tile to tile and copies blocks by tensor descriptors (TMA); the loops over tiles
and over K are one pipeline, so the next tile is read while the last one is stored. For groups with few rows, reading
weights dominates: the grid has a program for every tile that these rows could need in the worst case, and superfluous
programs return. The forward is under contract C1: `acc = tl.dot(a, b, acc)` over ascending K, K never split, so neither
tiles nor kernels change a bit.

Shape suffixes: R rows, G groups, K contracted dim, N columns of the result.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..linear.choice import Choice
from ..linear.triton import add_bias, swizzle

_SMALL = Choice("grouped", 16, 128, 128, 4, 4)
_MEDIUM = Choice("grouped", 64, 256, 64, 4, 4)
_LARGE = Choice("grouped", 128, 256, 64, 8, 4)
_WITHOUT_TMA = Choice("grouped", 64, 128, 64, 4, 3)  # for operands that no descriptor can describe
_SMALL_ROWS, _MEDIUM_ROWS = 16, 96  # the most rows per group, on average, for _SMALL and _MEDIUM
_SUM = Choice("grouped", 32, 128, 0, 4)  # block_m rows are added at a time, of block_n columns
_OUTER = Choice("grouped", 64, 128, 128, 8, 3)  # contracts block_m rows at a time, for a tile of block_n x block_k


def _choose_config(rows: int, groups: int) -> Choice:
    if rows <= _SMALL_ROWS * groups:
        return _SMALL
    return _MEDIUM if rows <= _MEDIUM_ROWS * groups else _LARGE


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _row_tiles(offsets_ptr, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """For each group: its first row, end row and number of row tiles, and the cumulative number of tiles."""
    g = tl.arange(0, GROUPS)
    start_G = tl.load(offsets_ptr + g, mask=g < groups, other=0)
    end_G = tl.load(offsets_ptr + g + 1, mask=g < groups, other=0)
    tiles_G = tl.where(g < groups, (end_G - start_G + BLOCK_M - 1) // BLOCK_M, 0)
    return start_G, end_G, tiles_G, tl.cumsum(tiles_G, axis=0)


@triton.jit
def _locate_tile(tile, offsets_ptr, groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr):
    """A row tile's group and first row, and the group's end row; the group is `groups` if there is no such tile."""
    start_G, end_G, tiles_G, last_G = _row_tiles(offsets_ptr, groups, BLOCK_M, GROUPS)
    g = tl.arange(0, GROUPS)
    group = tl.sum(((last_G <= tile) & (g < groups)).to(tl.int32), axis=0)
    is_it = g == group
    before = tl.sum(tl.where(is_it, last_G - tiles_G, 0), axis=0)
    first = tl.sum(tl.where(is_it, start_G, 0), axis=0) + (tile - before) * BLOCK_M
    return group, first, tl.sum(tl.where(is_it, end_G, 0), axis=0)


@triton.jit(do_not_specialize=["tiles_m"])
def _matmul_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    bias_ptr,  # [groups, columns], or None
    offsets_ptr,
    tiles_m,
    columns,
    depth,
    groups,
    w_group_stride,
    w_k_stride,
    w_n_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr,
):
    tile_m, tile_n = swizzle(tl.program_id(0), tiles_m, tl.cdiv(columns, BLOCK_N))
    group, first, end = _locate_tile(tile_m, offsets_ptr, groups, BLOCK_M, GROUPS)
    if group >= groups:
        return
    m = first + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    w = w_ptr + group.to(tl.int64) * w_group_stride + (n % columns)[None, :] * w_n_stride + k[:, None] * w_k_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(x), tl.load(w)
        else:
            a = tl.load(x, mask=k[None, :] < depth - start, other=0.0)
            b = tl.load(w, mask=k[:, None] < depth - start, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K * w_k_stride
    if bias_ptr is not None:
        acc = add_bias(acc, bias_ptr + group * columns, n, columns)
    out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < columns)[None, :])


@triton.jit
def _persistent_kernel(
    x_desc,
    w_desc,
    out_ptr,
    bias_ptr,  # [groups, columns], or None
    offsets_ptr,
    columns,
    depth,
    groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_INNERMOST: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A block may reach into the next group; the store masks such rows and columns."""
    _, _, tiles_G, last_G = _row_tiles(offsets_ptr, groups, BLOCK_M, GROUPS)
    tiles_m, tiles_n = tl.sum(tiles_G, axis=0), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n)
        passed_G = last_G <= tile_m
        group = tl.sum(passed_G.to(tl.int32), axis=0)
        before = tl.sum(tl.where(passed_G, tiles_G, 0), axis=0)
        first = tl.load(offsets_ptr + group) + (tile_m - before) * BLOCK_M
        end = tl.load(offsets_ptr + group + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, depth, BLOCK_K):
            a = x_desc.load([first, k])
            if K_INNERMOST:
                b = w_desc.load([group * columns + tile_n * BLOCK_N, k]).T
            else:
                b = w_desc.load([group * depth + k, tile_n * BLOCK_N])
            acc = tl.dot(a, b, acc, input_precision="ieee")
        m = first + tl.arange(0, BLOCK_M)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            acc = add_bias(acc, bias_ptr + group * columns, n, columns)
        out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < columns)[None, :])


def grouped_matmul(x_RK: Tensor, w_GKN: Tensor, offsets: Tensor, bias_GN: Tensor | None = None) -> Tensor:
    """`x[r] @ w[g] + bias[g]` for each row r of group g, [R, N] in x's dtype; `w` may be a transposed view."""
    x_RK = x_RK.contiguous()
    (rows, depth), (groups, _, columns) = x_RK.shape, w_GKN.shape
    out_RN = torch.empty((rows, columns), dtype=x_RK.dtype, device=x_RK.device)
    bias_GN = None if bias_GN is None else bias_GN.contiguous()
    c = _choose_config(rows, groups)
    described = None if c is _SMALL else _descriptors(x_RK, w_GKN, c)
    if not described and c is not _SMALL:
        c = _WITHOUT_TMA
    tiles, tiles_n = triton.cdiv(rows, c.block_m) + min(groups, rows), triton.cdiv(columns, c.block_n)
    constants = {
        **{"BLOCK_M": c.block_m, "BLOCK_N": c.block_n, "BLOCK_K": c.block_k},
        **{"GROUPS": triton.next_power_of_2(groups), "num_warps": c.num_warps, "num_stages": c.num_stages},
    }
    if described:
        grid = (min(tiles * tiles_n, _multiprocessors(x_RK.device)),)
        arguments = (*described, out_RN, bias_GN, offsets, columns, depth, groups)
        _persistent_kernel[grid](*arguments, K_INNERMOST=w_GKN.stride(1) == 1, **constants)
    else:
        arguments = (x_RK, w_GKN, out_RN, bias_GN, offsets, tiles, columns, depth, groups, *w_GKN.stride())
        _matmul_kernel[(tiles * tiles_n,)](*arguments, EVEN_K=depth % c.block_k == 0, **constants)
    return out_RN


def _descriptors(x_RK: Tensor, w_GKN: Tensor, c: Choice) -> tuple[TensorDescriptor, TensorDescriptor] | None:
    """Descriptors of the rows and of all groups' weights, stacked, contiguous along K or N; None if there can be none.

    Weights contiguous along N need a depth of whole blocks: a block that reached into the next group would multiply
    its weights by zero, and not every product with zero is zero.
    """
    groups, depth, columns = w_GKN.shape
    if w_GKN.element_size() != 2 or depth % 8 or x_RK.data_ptr() % 16 or w_GKN.data_ptr() % 16:
        return None
    if w_GKN.transpose(1, 2).is_contiguous():
        shape, block = [groups * columns, depth], [c.block_n, c.block_k]
    elif w_GKN.is_contiguous() and columns % 8 == 0 and depth % c.block_k == 0:
        shape, block = [groups * depth, columns], [c.block_k, c.block_n]
    else:
        return None
    rows = TensorDescriptor.from_tensor(x_RK, [c.block_m, c.block_k])
    return rows, TensorDescriptor(w_GKN, shape, [shape[1], 1], block)


@triton.jit
def _outer_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    offsets_ptr,
    a_width,
    b_width,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    group = tl.program_id(1)
    tiles_b = tl.cdiv(b_width, BLOCK_B)
    a = tl.program_id(0) // tiles_b * BLOCK_A + tl.arange(0, BLOCK_A)
    b = tl.program_id(0) % tiles_b * BLOCK_B + tl.arange(0, BLOCK_B)
    start, end = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    acc = tl.zeros((BLOCK_A, BLOCK_B), dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        row = r.to(tl.int64)[:, None]
        a_RA = tl.load(a_ptr + row * a_width + a[None, :], mask=(r < end)[:, None] & (a < a_width)[None, :], other=0.0)
        b_RB = tl.load(b_ptr + row * b_width + b[None, :], mask=(r < end)[:, None] & (b < b_width)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a_RA), b_RB, acc, input_precision="ieee")
    out = out_ptr + (group.to(tl.int64) * a_width + a[:, None]) * b_width + b[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(a < a_width)[:, None] & (b < b_width)[None, :])


def grouped_outer(a_RN: Tensor, b_RK: Tensor, offsets: Tensor) -> Tensor:
    """`a[rows of g].T @ b[rows of g]` for each group g, [G, N, K] in b's dtype; zero for a group without rows."""
    a_RN, b_RK = a_RN.contiguous(), b_RK.contiguous()
    groups, a_width, b_width = offsets.shape[0] - 1, a_RN.shape[1], b_RK.shape[1]
    out_GNK = torch.empty((groups, a_width, b_width), dtype=b_RK.dtype, device=b_RK.device)
    c = _OUTER
    _outer_kernel[(triton.cdiv(a_width, c.block_n) * triton.cdiv(b_width, c.block_k), groups)](
        a_RN, b_RK, out_GNK, offsets, a_width, b_width,
        BLOCK_R=c.block_m, BLOCK_A=c.block_n, BLOCK_B=c.block_k, num_warps=c.num_warps, num_stages=c.num_stages,
    )  # fmt: skip
    return out_GNK


@triton.jit
def _sum_kernel(x_ptr, out_ptr, offsets_ptr, columns, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    group, n = tl.program_id(1), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = tl.load(offsets_ptr + group), tl.load(offsets_ptr + group + 1)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        r = (first + tl.arange(0, BLOCK_R))[:, None]
        x = tl.load(x_ptr + r.to(tl.int64) * columns + n[None, :], mask=(r < end) & (n < columns)[None, :], other=0.0)
        total += x.to(tl.float32)
    out = out_ptr + group.to(tl.int64) * columns + n
    tl.store(out, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=n < columns)


def grouped_sum(x_RN: Tensor, offsets: Tensor) -> Tensor:
    x_RN, groups, columns = x_RN.contiguous(), offsets.shape[0] - 1, x_RN.shape[1]
    out_GN = torch.empty((groups, columns), dtype=x_RN.dtype, device=x_RN.device)
    rows, width = _SUM.block_m, _SUM.block_n
    grid = triton.cdiv(columns, width), groups
    _sum_kernel[grid](x_RN, out_GN, offsets, columns, BLOCK_R=rows, BLOCK_N=width, num_warps=_SUM.num_warps)
    return out_GN


def grouped_linear(x_RK: Tensor, weight_GNK: Tensor, offsets: Tensor, bias_GN: Tensor | None = None) -> Tensor:
    return grouped_matmul(x_RK, weight_GNK.transpose(1, 2), offsets, bias_GN)


def grouped_linear_backward(
    grad_RN: Tensor, x_RK: Tensor, weight_GNK: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return grouped_matmul(grad_RN, weight_GNK, offsets), grouped_outer(grad_RN, x_RK, offsets)
