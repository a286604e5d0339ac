"""Backward of the log-probabilities, an operator of its own that a trace keeps whole: logits are computed again.

It is not under the forward's contract, and gives the same bits every time. Shape suffixes as in `operator.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.operator import linear_fp32, matmul
from .reference import divisor, unpack_support

CHUNK = 1024  # rows of logits at a time on a CPU
CHUNK_BYTES = 256 << 20  # of the logits' gradients at a time on a GPU
COLUMN_BLOCK = 2048  # the chunks there are ranges of the vocabulary, multiples of this


@torch.library.custom_op("lockstep::token_logprobs_backward", mutates_args=(), device_types="cpu")
def token_logprobs_backward(
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    support_CB: Tensor | None,
    lse_C: Tensor,
    sampled_lse_C: Tensor,
    threshold_C: Tensor,
    truncated: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients for the hidden rows and the LM head, [C, D] and [V, D] in the inputs' dtype. Without `grad_model_C`
    only the sampled distribution's log-probabilities were differentiated, without `grad_logprob_C` only the model's.

    On a CPU a chunk is a range of rows, and gradients of the weight add up in float32.
    """
    grad_hidden = torch.empty_like(hidden_CD)
    grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
    for i in range(0, hidden_CD.shape[0], CHUNK):
        c = slice(i, i + CHUNK)
        grad_CV = grad_logits(
            linear_fp32(hidden_CD[c], weight_VD),
            targets_C[c],
            temperature_C[c],
            lse_C[c],
            sampled_lse_C[c],
            threshold_C[c],
            None if support_CB is None else support_CB[c],
            None if grad_logprob_C is None else grad_logprob_C[c],
            None if grad_model_C is None else grad_model_C[c],
            truncated,
        ).to(hidden_CD.dtype)
        grad_hidden[c] = matmul(grad_CV, weight_VD)
        grad_weight += matmul(grad_CV.t(), hidden_CD[c])
    return grad_hidden, grad_weight.to(weight_VD.dtype)


@token_logprobs_backward.register_kernel("cuda")
def _(
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    support_CB: Tensor | None,
    lse_C: Tensor,
    sampled_lse_C: Tensor,
    threshold_C: Tensor,
    truncated: bool,
) -> tuple[Tensor, Tensor]:
    """A chunk is a range of the vocabulary over all rows: one kernel recomputes its gradients and two products use
    them, so the weight's gradient is written once and that of the hidden rows adds up in float32."""
    from .triton_backward import grad_logits

    hidden_CD = hidden_CD.contiguous()
    rows, vocabulary = hidden_CD.shape[0], weight_VD.shape[0]
    grad_hidden = torch.zeros_like(hidden_CD, dtype=torch.float32)
    if rows == 0:
        return torch.empty_like(hidden_CD), torch.zeros_like(weight_VD)
    grad_weight = torch.empty_like(weight_VD)
    step = max(CHUNK_BYTES // (rows * hidden_CD.element_size() * COLUMN_BLOCK), 1) * COLUMN_BLOCK
    for i in range(0, vocabulary, step):
        columns = slice(i, i + step)
        grad_CV = grad_logits(
            hidden_CD,
            weight_VD[columns],
            i,
            targets_C,
            temperature_C,
            lse_C,
            sampled_lse_C,
            threshold_C,
            support_CB,
            grad_logprob_C,
            grad_model_C,
            truncated,
        )
        torch.mm(grad_CV.t(), hidden_CD, out=grad_weight[columns])
        torch.addmm(grad_hidden, grad_CV, weight_VD[columns], out_dtype=torch.float32, out=grad_hidden)
        del grad_CV  # before the next chunk's
    return grad_hidden.to(hidden_CD.dtype), grad_weight


@token_logprobs_backward.register_fake
def _(grad_logprob_C, grad_model_C, hidden_CD, weight_VD, *_):
    return hidden_CD.new_empty(hidden_CD.shape), weight_VD.new_empty(weight_VD.shape)


def grad_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    lse_C: Tensor,
    sampled_lse_C: Tensor,
    threshold_C: Tensor,
    support_CB: Tensor | None,
    grad_logprob_C: Tensor | None,
    grad_model_C: Tensor | None,
    truncated: bool,
) -> Tensor:
    """`d/dlogits` of both log-probabilities: (one-hot - softmax), the sampled one over its support and temperature."""
    if grad_logprob_C is None:
        grad_logprob_C = torch.zeros_like(temperature_C)
    slope_C = torch.where(temperature_C > 0, grad_logprob_C / divisor(temperature_C), 0.0)
    z_CV = logits_CV / divisor(temperature_C).unsqueeze(1)
    sampled_CV = torch.exp(z_CV - sampled_lse_C.unsqueeze(1))
    if support_CB is not None:
        sampled_CV *= unpack_support(support_CB, z_CV.shape[1])
    elif truncated:
        sampled_CV.masked_fill_(z_CV < threshold_C.unsqueeze(1), 0.0)
    grad_CV = sampled_CV.mul_(-slope_C.unsqueeze(1))
    if grad_model_C is not None:
        grad_CV.sub_(torch.exp(logits_CV - lse_C.unsqueeze(1)).mul_(grad_model_C.unsqueeze(1)))
        slope_C = slope_C + grad_model_C
    return grad_CV.scatter_add_(1, targets_C.unsqueeze(1), slope_C.unsqueeze(1))
