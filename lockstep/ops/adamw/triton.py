"""AdamW in one pass, every element read once and written once, and sums of squares. Meaning:
`ops/adamw/operator.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import AdamWSettings, AdamWState, AdamWStep
from .operator import BLOCK as SQUARES

BLOCK = 2048
ROWS = 8  # blocks of squares that a program adds up
NUM_WARPS = 8


@triton.jit
def _square_sums_kernel(x_ptr, out_ptr, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(out_ptr + row, tl.sum(x * x, axis=1), mask=row * WIDTH < size)


def square_sums(x: Tensor) -> Tensor:
    """See `adamw.operator.square_sums`."""
    blocks = triton.cdiv(x.numel(), SQUARES)
    sums = torch.empty(blocks, dtype=torch.float32, device=x.device)
    _square_sums_kernel[(triton.cdiv(blocks, ROWS),)](x, sums, x.numel(), ROWS=ROWS, WIDTH=SQUARES, num_warps=NUM_WARPS)
    return sums


@triton.jit
def _adamw_kernel(
    weights_ptr,
    grad_ptr,
    master_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    lr_ptr,
    grad_scale_ptr,
    applied_ptr,
    correction_ptr,  # [2, 2]: 1 - beta ** step of both moments, for matrices and for vectors
    size,
    num_matrix_elements,
    beta1,
    beta2,
    epsilon,
    weight_decay,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if tl.load(applied_ptr) != 0:
        lr = tl.load(lr_ptr)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0) / tl.load(grad_scale_ptr)
        is_matrix = at < num_matrix_elements
        first = tl.where(is_matrix, tl.load(correction_ptr), tl.load(correction_ptr + 1))
        second = tl.where(is_matrix, tl.load(correction_ptr + 2), tl.load(correction_ptr + 3))
        master = tl.load(master_ptr + at, mask=inside, other=0.0)
        exp_avg = tl.load(exp_avg_ptr + at, mask=inside, other=0.0)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=inside, other=0.0)
        master -= tl.where(is_matrix, lr * weight_decay, 0.0) * master
        exp_avg += (1.0 - beta1) * (grad - exp_avg)
        exp_avg_sq = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
        master -= lr / first * exp_avg / (tl.sqrt(exp_avg_sq) / tl.sqrt(second) + epsilon)
        tl.store(master_ptr + at, master, mask=inside)
        tl.store(exp_avg_ptr + at, exp_avg, mask=inside)
        tl.store(exp_avg_sq_ptr + at, exp_avg_sq, mask=inside)
        if HAS_WEIGHTS:
            tl.store(weights_ptr + at, master.to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_ptr + at, 0.0, mask=inside)


def adamw(state: AdamWState, step: AdamWStep, settings: AdamWSettings) -> None:
    """See `adamw.operator.adamw`."""
    steps, size = state.steps.add_(step.applied), state.grad.numel()
    correction = torch.stack((1.0 - settings.beta1**steps, 1.0 - settings.beta2**steps))
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        state.master if state.weights is None else state.weights,
        *state[1:5],
        step.lr,
        step.grad_scale,
        step.applied.to(torch.int32),
        correction,
        size,
        *settings,
        HAS_WEIGHTS=state.weights is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
