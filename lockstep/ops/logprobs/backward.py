"""Backward of the log-probabilities, an operator of its own that a trace keeps whole: logits are computed again.

It is not under the forward's contract, and gives the same bits every time. Shape suffixes as in `operator.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..linear.operator import linear_fp32, matmul
from ..operator import operator
from .reference import divisor, unpack_support

CHUNK = 1024  # rows of logits at a time on a CPU


@operator(
    "lockstep::token_logprobs_backward",
    cuda="triton_backward:token_logprobs_backward",
    fake=lambda grad_logprob_C, grad_model_C, hidden_CD, weight_VD, *_: (
        hidden_CD.new_empty(hidden_CD.shape),
        weight_VD.new_empty(weight_VD.shape),
    ),
)
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
