"""Log-probabilities over a chunked LM head, and sampling from it: one code path for trainer and generator.

Two numbers a token: of the distribution that was sampled (temperature, top-k, top-p, min-p) and of the model's own
(temperature 1, untruncated). The [tokens, vocabulary] logits exist one chunk at a time.

Shape suffixes: C rows (one a token to score), D model dim, V vocabulary, B bytes of a support mask.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import logprobs_reference, native
from .linear import linear_fp32, matmul
from .operator import operator

CHUNK = 1024  # rows of logits at a time
BACKWARD_LOGITS_BYTES = 3 << 30  # of float32 logits at a time in the backward on a GPU; half as much again for bfloat16


class RowStatistics(NamedTuple):
    """Per row, float32: log-sum-exp of the logits; of logits / temperature over the support; the smallest
    logit / temperature in the support (-inf: all); entropy in nats at temperature 1, untruncated."""

    lse_C: Tensor
    sampled_lse_C: Tensor
    threshold_C: Tensor
    entropy_C: Tensor


def _rows(x: Tensor) -> ModuleType:
    """The implementation of the row functions for this device."""
    if not x.is_cuda:
        return native if native.usable(x) else logprobs_reference
    from .kernels import logprobs

    return logprobs


def _scores(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, stats: RowStatistics) -> tuple[Tensor, Tensor]:
    """Both log-probabilities of the targets."""
    path = native if not logits_CV.is_cuda and native.usable(logits_CV) else logprobs_reference
    return path.scores(logits_CV, targets_C, temperature_C, stats.lse_C, stats.sampled_lse_C)


@torch.library.custom_op("lockstep::token_logprobs", mutates_args=())
def _token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    top_k_C: Tensor,
    top_p_C: Tensor,
    min_p_C: Tensor,
    support_CB: Tensor | None,
    truncated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    results = []
    for i in range(0, hidden_CD.shape[0], CHUNK):
        chunk = slice(i, i + CHUNK)
        logits_CV = linear_fp32(hidden_CD[chunk], weight_VD)
        stats = RowStatistics(
            *_rows(logits_CV).statistics(
                logits_CV,
                temperature_C[chunk],
                top_k_C[chunk],
                top_p_C[chunk],
                min_p_C[chunk],
                None if support_CB is None else support_CB[chunk],
                truncated,
                True,
            )
        )
        results.append((*_scores(logits_CV, targets_C[chunk], temperature_C[chunk], stats), *stats))
    logprob, model_logprob, lse, sampled_lse, threshold, entropy = (torch.cat(r) for r in zip(*results, strict=True))
    return logprob, model_logprob, entropy, lse, sampled_lse, threshold


@_token_logprobs.register_fake
def _(hidden_CD, weight_VD, targets_C, temperature_C, top_k_C, top_p_C, min_p_C, support_CB, truncated):
    return tuple(torch.empty_like(temperature_C) for _ in range(6))


def _setup(ctx, inputs, output) -> None:
    hidden_CD, weight_VD, targets_C, temperature_C, _, _, _, support_CB, ctx.truncated = inputs
    _, _, _, lse_C, sampled_lse_C, threshold_C = output
    ctx.save_for_backward(hidden_CD, weight_VD, targets_C, temperature_C, support_CB, lse_C, sampled_lse_C, threshold_C)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx, grad_logprob_C: Tensor, grad_model_C: Tensor, *_: Tensor):
    """Recomputes the logits chunk by chunk. Gradients of the weight add up in float32."""
    hidden, weight, targets, temperature, support, lse, sampled_lse, threshold = ctx.saved_tensors
    if hidden.is_cuda:
        grads = _token_logprobs_backward(grad_logprob_C, grad_model_C, *ctx.saved_tensors, ctx.truncated)
        return *grads, *([None] * 7)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32)
    for i in range(0, hidden.shape[0], CHUNK):
        c = slice(i, i + CHUNK)
        logits_CV = linear_fp32(hidden[c], weight)
        stats = RowStatistics(lse[c], sampled_lse[c], threshold[c], lse[c])
        grad_logits = _grad_logits(
            logits_CV,
            targets[c],
            temperature[c],
            stats,
            None if support is None else support[c],
            grad_logprob_C[c],
            grad_model_C[c],
            ctx.truncated,
        ).to(hidden.dtype)
        grad_hidden[c] = matmul(grad_logits, weight)
        grad_weight += matmul(grad_logits.t(), hidden[c])
    return grad_hidden, grad_weight.to(weight.dtype), *([None] * 7)


@torch.library.custom_op("lockstep::token_logprobs_backward", mutates_args=(), device_types="cuda")
def _token_logprobs_backward(
    grad_logprob_C: Tensor,
    grad_model_C: Tensor,
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
    """What `_backward` computes, on a GPU: [C, D] and [V, D] in the inputs' dtype.

    Chunks are as large as `BACKWARD_LOGITS_BYTES` allows. Mostly there is one, whose product is the weight's gradient;
    those of several add up in float32 within the product.
    """
    from .kernels.logprobs_backward import grad_logits

    (rows, depth), vocabulary = hidden_CD.shape, weight_VD.shape[0]
    step = max(BACKWARD_LOGITS_BYTES // (4 * vocabulary), 1)
    grad_hidden = torch.empty((rows, depth), dtype=hidden_CD.dtype, device=hidden_CD.device)
    several = rows > step
    grad_weight = torch.zeros((vocabulary if several else 0, depth), dtype=torch.float32, device=hidden_CD.device)
    for i in range(0, max(rows, 1), step):
        c = slice(i, i + step)
        grad_CV = grad_logits(
            linear_fp32(hidden_CD[c], weight_VD),
            targets_C[c],
            temperature_C[c],
            lse_C[c],
            sampled_lse_C[c],
            threshold_C[c],
            None if support_CB is None else support_CB[c],
            grad_logprob_C[c],
            grad_model_C[c],
            truncated,
            hidden_CD.dtype,
        )
        torch.mm(grad_CV, weight_VD, out=grad_hidden[c])
        if not several:
            return grad_hidden, torch.mm(grad_CV.t(), hidden_CD)
        torch.addmm(grad_weight, grad_CV.t(), hidden_CD[c], out_dtype=torch.float32, out=grad_weight)
        del grad_CV  # before the next chunk's logits
    return grad_hidden, grad_weight.to(weight_VD.dtype)


@_token_logprobs_backward.register_fake
def _(grad_logprob_C, grad_model_C, hidden_CD, weight_VD, *_):
    return hidden_CD.new_empty(hidden_CD.shape), weight_VD.new_empty(weight_VD.shape)


def _grad_logits(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    stats: RowStatistics,
    support_CB: Tensor | None,
    grad_logprob_C: Tensor,
    grad_model_C: Tensor,
    truncated: bool,
) -> Tensor:
    """`d/dlogits` of both log-probabilities: (one-hot - softmax), the sampled one over its support and temperature."""
    slope_C = torch.where(temperature_C > 0, grad_logprob_C / logprobs_reference.divisor(temperature_C), 0.0)
    z_CV = logits_CV / logprobs_reference.divisor(temperature_C).unsqueeze(1)
    sampled_CV = torch.exp(z_CV - stats.sampled_lse_C.unsqueeze(1))
    if support_CB is not None:
        sampled_CV *= logprobs_reference.unpack_support(support_CB, z_CV.shape[1])
    elif truncated:
        sampled_CV.masked_fill_(z_CV < stats.threshold_C.unsqueeze(1), 0.0)
    grad_CV = sampled_CV.mul_(-slope_C.unsqueeze(1))
    grad_CV.sub_(torch.exp(logits_CV - stats.lse_C.unsqueeze(1)).mul_(grad_model_C.unsqueeze(1)))
    return grad_CV.scatter_add_(1, targets_C.unsqueeze(1), (slope_C + grad_model_C).unsqueeze(1))


_token_logprobs.register_autograd(_backward, setup_context=_setup)


class TokenLogprobs(NamedTuple):
    """Float32 [C] each: of the sampled distribution, of the model's own, entropy (nats; no gradient), and the
    support's threshold (`support_mask`)."""

    logprob_C: Tensor
    model_logprob_C: Tensor
    entropy_C: Tensor
    threshold_C: Tensor


def token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    temperature_C: Tensor,
    top_k_C: Tensor,
    top_p_C: Tensor,
    min_p_C: Tensor,
    support_CB: Tensor | None = None,
    truncated: bool = False,
) -> TokenLogprobs:
    """Score tokens.

    Args:
        hidden_CD: hidden states that predict the targets; weight_VD: LM head, same dtype.
        targets_C: int64 token ids.
        temperature_C, top_p_C, min_p_C: float32; top_k_C: int32. As in `types.SamplingParams`, one a row.
        support_CB: uint8 bits of the support to use in place of the filters (`support_mask`).
        truncated: whether any row has a filter on; False skips the search for the support.
    """
    logprob, model, entropy, _, _, threshold = _token_logprobs(
        hidden_CD, weight_VD, targets_C, temperature_C, top_k_C, top_p_C, min_p_C, support_CB, truncated
    )
    return TokenLogprobs(logprob, model, entropy, threshold)


def support_mask(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor, threshold_C: Tensor) -> Tensor:
    """The sampled support as bits, uint8 [C, ceil(V / 8)]: for updates after the first, when logits have moved."""
    masks = []
    with torch.no_grad():
        for i in range(0, hidden_CD.shape[0], CHUNK):
            c = slice(i, i + CHUNK)
            z_CV = linear_fp32(hidden_CD[c], weight_VD) / logprobs_reference.divisor(temperature_C[c]).unsqueeze(1)
            masks.append(logprobs_reference.pack_support(z_CV >= threshold_C[c].unsqueeze(1)))
    return torch.cat(masks)


@operator("lockstep::sample")
def sample(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    key_C4: Tensor,
    position_C: Tensor,
    temperature_C: Tensor,
    top_k_C: Tensor,
    top_p_C: Tensor,
    min_p_C: Tensor,
    truncated: bool,
    greedy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row and score it.

    Args:
        key_C4: int64 words of the sample's identity (`philox.sample_key`).
        position_C: int64, absolute position of the token that is drawn.
        truncated, greedy: whether any row has a filter on, or temperature 0.

    Returns:
        Token ids int64 [C], log-probability under the sampled distribution and under the model's own, float32 [C].
    """
    logits_CV = linear_fp32(hidden_CD, weight_VD)
    rows = _rows(logits_CV)
    stats = RowStatistics(*rows.statistics(logits_CV, temperature_C, top_k_C, top_p_C, min_p_C, None, truncated, False))
    token_C = rows.draw(logits_CV, temperature_C, stats.threshold_C, key_C4, position_C, greedy)
    return token_C, *_scores(logits_CV, token_C, temperature_C, stats)


sample.register_kernel("cuda")(sample.__wrapped__)


@sample.register_fake
def _(hidden_CD, weight_VD, key_C4, position_C, temperature_C, top_k_C, top_p_C, min_p_C, truncated, greedy):
    return torch.empty_like(position_C), torch.empty_like(temperature_C), torch.empty_like(temperature_C)
