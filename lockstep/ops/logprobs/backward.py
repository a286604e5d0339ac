"""Backward of the log-probabilities, an operator of its own that a trace keeps whole: logits are computed again.

It is not under the forward's contract, and gives the same bits every time. Shape suffixes as in `operator.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.operator import linear_fp32, matmul
from ..operator import operator
from ..records import ScoredRows, cut
from .reference import divisor, unpack_support

CHUNK = 1024  # rows of logits at a time on a CPU


@operator(
    "lockstep::token_logprobs_backward",
    cuda="triton_backward:token_logprobs_backward",
    fake=lambda grad_logprob_C, grad_model_C, hidden_CD, weight_VD, by: (
        hidden_CD.new_empty(hidden_CD.shape),
        weight_VD.new_empty(weight_VD.shape),
    ),
)
def token_logprobs_backward(
    grad_logprob_C: Tensor | None, grad_model_C: Tensor | None, hidden_CD: Tensor, weight_VD: Tensor, by: ScoredRows
) -> tuple[Tensor, Tensor]:
    """Gradients for the hidden rows and the LM head, [C, D] and [V, D] in the inputs' dtype. Without `grad_model_C`
    only the sampled distribution's log-probabilities were differentiated, without `grad_logprob_C` only the model's.

    On a CPU a chunk is a range of rows, and gradients of the weight add up in float32.
    """
    grad_hidden = torch.empty_like(hidden_CD)
    grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
    for i in range(0, hidden_CD.shape[0], CHUNK):
        c = slice(i, i + CHUNK)
        logits_CV = linear_fp32(hidden_CD[c], weight_VD)
        grads = (None if grad_C is None else grad_C[c] for grad_C in (grad_logprob_C, grad_model_C))
        grad_CV = grad_logits(logits_CV, cut(by, c), *grads).to(hidden_CD.dtype)
        grad_hidden[c] = matmul(grad_CV, weight_VD)
        grad_weight += matmul(grad_CV.t(), hidden_CD[c])
    return grad_hidden, grad_weight.to(weight_VD.dtype)


def grad_logits(
    logits_CV: Tensor, by: ScoredRows, grad_logprob_C: Tensor | None, grad_model_C: Tensor | None
) -> Tensor:
    """`d/dlogits` of both log-probabilities: (one-hot - softmax), the sampled one over its support and temperature."""
    if grad_logprob_C is None:
        grad_logprob_C = torch.zeros_like(by.temperature_C)
    slope_C = torch.where(by.temperature_C > 0, grad_logprob_C / divisor(by.temperature_C), 0.0)
    z_CV = logits_CV / divisor(by.temperature_C).unsqueeze(1)
    sampled_CV = torch.exp(z_CV - by.sampled_lse_C.unsqueeze(1))
    if by.support_CB is not None:
        sampled_CV *= unpack_support(by.support_CB, z_CV.shape[1])
    elif by.truncated:
        sampled_CV.masked_fill_(z_CV < by.threshold_C.unsqueeze(1), 0.0)
    grad_CV = sampled_CV.mul_(-slope_C.unsqueeze(1))
    if grad_model_C is not None:
        grad_CV.sub_(torch.exp(logits_CV - by.lse_C.unsqueeze(1)).mul_(grad_model_C.unsqueeze(1)))
        slope_C = slope_C + grad_model_C
    return grad_CV.scatter_add_(1, by.targets_C.unsqueeze(1), slope_C.unsqueeze(1))
