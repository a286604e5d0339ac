"""AdamW in one pass that reads and writes every element once. Semantics: `ops/adamw/operator.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..records import AdamWSettings, AdamWState, AdamWStep

BLOCK = 2048
NUM_WARPS = 8


@triton.jit
def _adamw_kernel(
    weights_ptr,  # or None
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
        if weights_ptr is not None:
            tl.store(weights_ptr + at, master.to(weights_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_ptr + at, 0.0, mask=inside)


def adamw(state: AdamWState, step: AdamWStep, settings: AdamWSettings) -> None:
    steps, size = state.steps.add_(step.applied), state.grad.numel()
    correction = torch.stack((1.0 - settings.beta1**steps, 1.0 - settings.beta2**steps))
    _adamw_kernel[(triton.cdiv(size, BLOCK),)](
        *state[:5], step.lr, step.grad_scale, step.applied.to(torch.int32), correction, size, *settings,
        BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
