"""Gradients of both log-probabilities for the logits, and from these for the LM head and the hidden rows.

The logits were kept, or are recomputed for a range of the vocabulary at a time, with the forward's bits (C1), so that
each is on the same side of the threshold. Semantics: `ops/logprobs/operator.py`, `grad_logits`; an element is a
function of its own logit and its row's numbers.

Shape suffixes: C rows, D model dim, V columns of the vocabulary, B bytes of a support mask, L columns of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.kernels import linear_fp32
from ..records import ScoredRows
from ..rows import LOG2_E
from .triton_topk_topp import apply_temperature, undo_temperature

CHUNK_BYTES = 256 << 20  # bytes of the logits' gradients at a time
COLUMN_BLOCK = 2048  # chunks are ranges of the vocabulary, a multiple of this wide

BLOCK, NUM_WARPS = 2048, 8


@triton.jit
def _grad_logits_kernel(
    logits_ptr,
    target_ptr,
    temperature_ptr,
    lse_ptr,
    sampled_lse_ptr,
    threshold_ptr,
    support_ptr,  # or None, like the next two
    grad_logprob_ptr,
    grad_model_ptr,
    out_ptr,
    columns,
    first_column,  # column of the vocabulary at which `logits_ptr` and `out_ptr` start
    logits_stride,
    support_stride,
    TRUNCATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_L = n < columns
    out = out_ptr + row * columns + n
    temperature = tl.load(temperature_ptr + row)
    grad_model = 0.0
    if grad_model_ptr is not None:
        grad_model = tl.load(grad_model_ptr + row)
    slope = 0.0
    if grad_logprob_ptr is not None:
        slope = tl.where(temperature > 0, apply_temperature(tl.load(grad_logprob_ptr + row), temperature), 0.0)
    if (slope == 0) & (grad_model == 0):  # such as padding, whose numbers may not be finite
        tl.store(out, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=inside_L)
        return
    x_L = tl.load(logits_ptr + row * logits_stride + n, mask=inside_L, other=0.0)
    target = tl.load(target_ptr + row) - first_column
    grad_L = tl.where(n == target, slope + grad_model, 0.0)
    if grad_logprob_ptr is not None:
        shift = tl.load(sampled_lse_ptr + row) * LOG2_E
        scale = tl.div_rn(LOG2_E, tl.where(temperature > 0, temperature, 1.0))
        sampled_L = tl.exp2(x_L * scale - shift)
        if support_ptr is not None:
            column_L = first_column + n
            byte_L = tl.load(support_ptr + row * support_stride + column_L // 8, mask=inside_L, other=0).to(tl.int32)
            sampled_L = tl.where(((byte_L >> (column_L % 8)) & 1) != 0, sampled_L, 0.0)
        elif TRUNCATED:
            sampled_L = tl.where(x_L >= undo_temperature(tl.load(threshold_ptr + row), temperature), sampled_L, 0.0)
        grad_L -= sampled_L * slope
    if grad_model_ptr is not None:
        grad_L -= tl.exp2(x_L * LOG2_E - tl.load(lse_ptr + row) * LOG2_E) * grad_model
    tl.store(out, grad_L.to(out_ptr.dtype.element_ty), mask=inside_L)


def grad_logits(
    logits_CV: Tensor,
    first_column: int,
    scored: ScoredRows,
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`d/dlogits` of the two log-probabilities for the columns from `first_column` on, whose logits are given: [C, V]
    in `dtype`. All other arguments refer to the whole vocabulary."""
    rows, columns = logits_CV.shape
    out_CV = torch.empty((rows, columns), dtype=dtype, device=logits_CV.device)
    _grad_logits_kernel[(rows, triton.cdiv(columns, BLOCK))](
        logits_CV, scored.targets_C, scored.temperature_C, scored.lse_C, scored.sampled_lse_C, scored.threshold_C,
        scored.support_CB,
        *(None if grad_C is None else grad_C.contiguous() for grad_C in (grad_logprob_C, grad_model_C)), out_CV,
        columns, first_column, logits_CV.stride(0), 0 if scored.support_CB is None else scored.support_CB.stride(0),
        TRUNCATED=scored.truncated, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out_CV


def token_logprobs_backward(
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    scored: ScoredRows,
    logits_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `logprobs.operator.token_logprobs_backward`. A chunk is a range of the vocabulary over all rows. Two products
    use its gradients: the weight's is written once, and that of the hidden rows accumulates in float32."""
    hidden_CD = hidden_CD.contiguous()
    rows, vocabulary = hidden_CD.shape[0], weight_VD.shape[0]
    grad_hidden = torch.zeros_like(hidden_CD, dtype=torch.float32)
    if rows == 0:
        return torch.empty_like(hidden_CD), torch.zeros_like(weight_VD)
    grad_weight = torch.empty_like(weight_VD)
    step = max(CHUNK_BYTES // (rows * hidden_CD.element_size() * COLUMN_BLOCK), 1) * COLUMN_BLOCK
    for i in range(0, vocabulary, step):
        columns = slice(i, i + step)
        chunk_CV = linear_fp32(hidden_CD, weight_VD[columns]) if logits_CV is None else logits_CV[:, columns]
        grad_CV = grad_logits(chunk_CV, i, scored, grad_logprob_C, grad_model_C, hidden_CD.dtype)
        torch.mm(grad_CV.t(), hidden_CD, out=grad_weight[columns])
        torch.addmm(grad_hidden, grad_CV, weight_VD[columns], out_dtype=torch.float32, out=grad_hidden)
        del chunk_CV, grad_CV  # before the next chunk's are allocated
    return grad_hidden.to(hidden_CD.dtype), grad_weight
