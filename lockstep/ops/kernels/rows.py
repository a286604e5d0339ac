"""Row operators: float32 inside, one rounding to the input's dtype. Meaning and rounding points: `ops/rows.py`.

A program does one row (one token), so the order of a row's sum is a function of its width.

Shape suffixes: T rows, D model dim, E a fused projection's output, F feed-forward dim, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # Triton compiles a kernel anew for pointers and strides that are multiples of this
SILU_BLOCK = 1024


def aligned_rows(x: Tensor) -> Tensor:
    """`x` ([rows, width] or [width]) with unit inner stride and an alignment that its width decides, copied if need be.

    Triton vectorizes loads, and so lays out the reduction after them, by the alignment that it sees.
    """
    width, stride = x.shape[-1], x.stride(0) if x.dim() == 2 else x.shape[-1]
    regular = stride == width or (stride % ALIGNMENT == 0 and width % ALIGNMENT == 0)
    in_place = x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT == 0 and regular
    return x if in_place else x.clone(memory_format=torch.contiguous_format)


def _warps(elements: int, per_thread: int) -> int:
    """Warps for a tile of so many elements."""
    return min(max(triton.next_power_of_2(elements) // (32 * per_thread), 1), 16)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    x = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `rows.rms_norm`."""
    x_TD, weight_D = aligned_rows(x_TD), aligned_rows(weight_D)
    rows, width = x_TD.shape
    out_TD = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    _rms_norm_kernel[(rows,)](
        x_TD,
        weight_D,
        out_TD,
        x_TD.stride(0),
        eps,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width, 8),
        enable_fp_fusion=False,
    )
    return out_TD


@triton.jit
def _qk_norm_rope_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    out_ptr,
    qkv_stride,
    cos_sin_stride,
    eps,
    NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # query and key heads
    HALF: tl.constexpr,  # of the head dim
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < HALF
    mask = (head < HEADS) & inside
    offset = head * (2 * HALF) + column
    first = tl.load(qkv_ptr + token * qkv_stride + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + token * qkv_stride + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        q_first = tl.load(q_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        q_second = tl.load(q_weight_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
        k_first = tl.load(k_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        k_second = tl.load(k_weight_ptr + column + HALF, mask=inside, other=0.0).to(tl.float32)
        first = first * rstd * tl.where(head < NUM_HEADS, q_first, k_first)
        second = second * rstd * tl.where(head < NUM_HEADS, q_second, k_second)
    cos = tl.load(cos_sin_ptr + token * cos_sin_stride + column, mask=inside, other=0.0)
    sin = tl.load(cos_sin_ptr + token * cos_sin_stride + column + HALF, mask=inside, other=0.0)
    out = out_ptr + token * (HEADS * 2 * HALF) + offset
    tl.store(out, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=mask)


def qk_norm_rope(
    qkv_TE: Tensor,
    q_weight_H: Tensor | None,
    k_weight_H: Tensor | None,
    cos_sin_TH: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """See `rows.qk_norm_rope`."""
    qkv_TE, cos_sin_TH = aligned_rows(qkv_TE), aligned_rows(cos_sin_TH)
    tokens, head_dim = cos_sin_TH.shape
    heads, half = num_heads + num_kv_heads, head_dim // 2
    out = torch.empty((tokens, heads, head_dim), dtype=qkv_TE.dtype, device=qkv_TE.device)
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(half)
    norm = q_weight_H is not None and k_weight_H is not None
    weights = (aligned_rows(q_weight_H), aligned_rows(k_weight_H)) if norm else (qkv_TE, qkv_TE)  # read if NORM
    _qk_norm_rope_kernel[(tokens,)](
        qkv_TE,
        *weights,
        cos_sin_TH,
        out,
        qkv_TE.stride(0),
        cos_sin_TH.stride(0),
        eps,
        NORM=norm,
        NUM_HEADS=num_heads,
        HEADS=heads,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=_warps(2 * block_heads * block_half, 32),
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, gate_up_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(gate_up_ptr + row * gate_up_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    out = tl.div_rn(gate, tl.exp(-gate) + 1.0) * up
    tl.store(out_ptr + row * WIDTH + column, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """See `rows.silu_mul`."""
    gate_up_TE = aligned_rows(gate_up_TE)
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    out_TF = torch.empty((rows, width), dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    _silu_mul_kernel[(rows, triton.cdiv(width, SILU_BLOCK))](
        gate_up_TE,
        out_TF,
        gate_up_TE.stride(0),
        WIDTH=width,
        BLOCK=SILU_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TF
