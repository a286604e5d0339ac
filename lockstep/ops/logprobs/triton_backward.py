"""Gradient of both log-probabilities for the logits: the LM head's product again, the gradient as its epilogue.

Float32 logits exist in registers alone. Meaning: `ops/logprobs/operator.py`, `grad_logits`; an element is a function
of its own logit and its row's numbers, and the logit has the forward's bits (C1), so it is on the same side of the
threshold.

Shape suffixes: C rows, D model dim, V columns of the vocabulary, B bytes of a support mask; a tile's rows M, columns N.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.triton import swizzled
from ..records import ScoredRows
from ..rows import LOG2_E
from .triton_topk_topp import tempered, untempered

CHUNK_BYTES = 256 << 20  # of the logits' gradients at a time
COLUMN_BLOCK = 2048  # the chunks are ranges of the vocabulary, multiples of this

BLOCK_M, BLOCK_N, BLOCK_K = tl.constexpr(128), tl.constexpr(256), tl.constexpr(64)
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit
def _row_values(ptr, m, wanted_M):
    return tl.load(ptr + m, mask=wanted_M, other=0.0)


@triton.jit
def _grad_logits_kernel(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    temperature_ptr,
    lse_ptr,
    sampled_lse_ptr,
    threshold_ptr,
    support_ptr,  # or None, and so the next two
    grad_logprob_ptr,
    grad_model_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    first_column,  # of the vocabulary, that `weight_ptr` and `out_ptr` start at
    hidden_stride,
    weight_stride,
    support_stride,
    TRUNCATED: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    block_m, block_n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    m, n = block_m * BLOCK_M + tl.arange(0, BLOCK_M), block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside_M = m < rows
    temperature_M = tl.load(temperature_ptr + m, mask=inside_M, other=1.0)
    grad_model_M = tl.zeros((BLOCK_M,), tl.float32)
    if grad_model_ptr is not None:
        grad_model_M = _row_values(grad_model_ptr, m, inside_M)
    slope_M = tl.zeros((BLOCK_M,), tl.float32)
    if grad_logprob_ptr is not None:
        slope_M = tl.where(temperature_M > 0, tempered(_row_values(grad_logprob_ptr, m, inside_M), temperature_M), 0.0)
    wanted_M = (slope_M != 0) | (grad_model_M != 0)  # padding has no gradient: a tile of it costs its zeros alone

    x = hidden_ptr + m.to(tl.int64)[:, None] * hidden_stride + k[None, :]
    w = weight_ptr + (n % columns).to(tl.int64)[None, :] * weight_stride + k[:, None]  # columns past the end wrap
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.where(tl.max(wanted_M.to(tl.int32), axis=0) > 0, depth, 0), BLOCK_K):
        if EVEN_K:
            a, b = tl.load(x, mask=wanted_M[:, None], other=0.0), tl.load(w)
        else:
            a = tl.load(x, mask=wanted_M[:, None] & (k < depth - start)[None, :], other=0.0)
            b = tl.load(w, mask=(k < depth - start)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x += BLOCK_K
        w += BLOCK_K

    column_N = first_column + n
    target_M = tl.load(target_ptr + m, mask=wanted_M, other=-1) - first_column
    one_hot = tl.where(n[None, :] == target_M[:, None], (slope_M + grad_model_M)[:, None], 0.0)
    grad = one_hot
    if grad_logprob_ptr is not None:
        shift_M = _row_values(sampled_lse_ptr, m, wanted_M) * LOG2_E
        scale_M = tl.div_rn(LOG2_E, tl.where(temperature_M > 0, temperature_M, 1.0))
        sampled = tl.exp2(acc * scale_M[:, None] - shift_M[:, None])
        if support_ptr is not None:
            byte = support_ptr + m.to(tl.int64)[:, None] * support_stride + column_N[None, :] // 8
            bits = tl.load(byte, mask=inside_M[:, None] & (n < columns)[None, :], other=0).to(tl.int32)
            sampled = tl.where(((bits >> (column_N % 8)[None, :]) & 1) != 0, sampled, 0.0)
        elif TRUNCATED:
            least_M = untempered(_row_values(threshold_ptr, m, wanted_M), temperature_M)
            sampled = tl.where(acc >= least_M[:, None], sampled, 0.0)
        grad -= sampled * slope_M[:, None]
    if grad_model_ptr is not None:
        model_shift_M = _row_values(lse_ptr, m, wanted_M) * LOG2_E
        grad -= tl.exp2(acc * LOG2_E - model_shift_M[:, None]) * grad_model_M[:, None]
    out = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out, grad.to(out_ptr.dtype.element_ty), mask=inside_M[:, None] & (n < columns)[None, :])


def grad_logits(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    first_column: int,
    by: ScoredRows,
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
) -> Tensor:
    """`d/dlogits` of the two log-probabilities for columns `first_column` onwards, [C, V] in the hidden rows' dtype.

    `weight_VD` holds the LM head's rows of those columns; everything else is of the whole vocabulary.
    """
    (rows, depth), columns = hidden_CD.shape, weight_VD.shape[0]
    out_CV = torch.empty((rows, columns), dtype=hidden_CD.dtype, device=hidden_CD.device)
    _grad_logits_kernel[(triton.cdiv(rows, BLOCK_M) * triton.cdiv(columns, BLOCK_N),)](
        hidden_CD, weight_VD, by.targets_C, by.temperature_C, by.lse_C, by.sampled_lse_C, by.threshold_C,
        by.support_CB, *(None if grad_C is None else grad_C.contiguous() for grad_C in (grad_logprob_C, grad_model_C)),
        out_CV, rows, columns, depth, first_column, hidden_CD.stride(0), weight_VD.stride(0),
        0 if by.support_CB is None else by.support_CB.stride(0),
        TRUNCATED=by.truncated, EVEN_K=depth % BLOCK_K.value == 0, num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out_CV


def token_logprobs_backward(
    grad_logprob_C: Tensor | None, grad_model_C: Tensor | None, hidden_CD: Tensor, weight_VD: Tensor, by: ScoredRows
) -> tuple[Tensor, Tensor]:
    """See `logprobs.operator.token_logprobs_backward`. A chunk is a range of the vocabulary over all rows: one kernel
    recomputes its gradients and two products use them, so the weight's gradient is written once and that of the hidden
    rows adds up in float32."""
    hidden_CD = hidden_CD.contiguous()
    rows, vocabulary = hidden_CD.shape[0], weight_VD.shape[0]
    grad_hidden = torch.zeros_like(hidden_CD, dtype=torch.float32)
    if rows == 0:
        return torch.empty_like(hidden_CD), torch.zeros_like(weight_VD)
    grad_weight = torch.empty_like(weight_VD)
    step = max(CHUNK_BYTES // (rows * hidden_CD.element_size() * COLUMN_BLOCK), 1) * COLUMN_BLOCK
    for i in range(0, vocabulary, step):
        columns = slice(i, i + step)
        grad_CV = grad_logits(hidden_CD, weight_VD[columns], i, by, grad_logprob_C, grad_model_C)
        torch.mm(grad_CV.t(), hidden_CD, out=grad_weight[columns])
        torch.addmm(grad_hidden, grad_CV, weight_VD[columns], out_dtype=torch.float32, out=grad_hidden)
        del grad_CV  # before the next chunk's
    return grad_hidden.to(hidden_CD.dtype), grad_weight
