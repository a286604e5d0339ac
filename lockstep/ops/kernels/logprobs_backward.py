"""Gradient of both log-probabilities for the logits, in one pass: float32 logits in, the hidden dtype out.

Meaning: `ops/logprobs.py`, `_grad_logits`. Every element is a function of its own logit and its row's numbers.

Shape suffixes: C rows, V vocabulary, B bytes of a support mask, L logits of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .support import tempered

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _grad_logits_kernel(
    logits_ptr,
    target_ptr,
    temperature_ptr,
    lse_ptr,
    sampled_lse_ptr,
    threshold_ptr,
    support_ptr,
    grad_logprob_ptr,
    grad_model_ptr,
    out_ptr,
    vocabulary,
    support_stride,
    HAS_SUPPORT: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column_L = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_L = column_L < vocabulary
    temperature = tl.load(temperature_ptr + row)
    grad_model = tl.load(grad_model_ptr + row)
    slope = tl.where(temperature > 0, tempered(tl.load(grad_logprob_ptr + row), temperature), 0.0)
    x_L = tl.load(logits_ptr + row * vocabulary + column_L, mask=inside_L, other=float("-inf"))
    z_L = tempered(x_L, temperature)
    sampled_L = tl.exp(z_L - tl.load(sampled_lse_ptr + row))
    if HAS_SUPPORT:
        byte_L = tl.load(support_ptr + row * support_stride + column_L // 8, mask=inside_L, other=0)
        sampled_L = tl.where(((byte_L.to(tl.int32) >> (column_L % 8)) & 1) != 0, sampled_L, 0.0)
    elif TRUNCATED:
        sampled_L = tl.where(z_L >= tl.load(threshold_ptr + row), sampled_L, 0.0)
    grad_L = -slope * sampled_L - grad_model * tl.exp(x_L - tl.load(lse_ptr + row))
    grad_L += tl.where(column_L == tl.load(target_ptr + row), slope + grad_model, 0.0)
    tl.store(out_ptr + row * vocabulary + column_L, grad_L.to(out_ptr.dtype.element_ty), mask=inside_L)


def grad_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    lse_C: Tensor,
    sampled_lse_C: Tensor,
    threshold_C: Tensor,
    support_CB: Tensor | None,
    grad_logprob_C: Tensor,
    grad_model_C: Tensor,
    truncated: bool,
    dtype: torch.dtype,
) -> Tensor:
    """`d/dlogits` of the two log-probabilities, [C, V] in `dtype`; `logits_CV` is contiguous float32."""
    rows, vocabulary = logits_CV.shape
    out_CV = torch.empty((rows, vocabulary), dtype=dtype, device=logits_CV.device)
    _grad_logits_kernel[(rows, triton.cdiv(vocabulary, BLOCK))](
        logits_CV,
        targets_C,
        temperature_C,
        lse_C,
        sampled_lse_C,
        threshold_C,
        threshold_C if support_CB is None else support_CB,  # read if HAS_SUPPORT
        grad_logprob_C.contiguous(),
        grad_model_C.contiguous(),
        out_CV,
        vocabulary,
        0 if support_CB is None else support_CB.stride(0),
        HAS_SUPPORT=support_CB is not None,
        TRUNCATED=truncated,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out_CV
