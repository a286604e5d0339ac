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

from .. import native
from ..linear.operator import linear_fp32
from ..operator import SAME, operator
from . import reference
from .backward import token_logprobs_backward

CHUNK = 1024  # rows of logits at a time


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
        return native if native.usable(x) else reference
    from . import triton as logprobs_triton

    return logprobs_triton


def _setup(ctx, inputs, output) -> None:
    hidden_CD, weight_VD, targets_C, temperature_C, _, _, _, support_CB, ctx.truncated = inputs
    _, _, _, lse_C, sampled_lse_C, threshold_C = output
    ctx.save_for_backward(hidden_CD, weight_VD, targets_C, temperature_C, support_CB, lse_C, sampled_lse_C, threshold_C)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_logprob_C: Tensor | None, grad_model_C: Tensor | None, *_: Tensor):
    grads = token_logprobs_backward(grad_logprob_C, grad_model_C, *ctx.saved_tensors, ctx.truncated)
    return *grads, *([None] * 7)


@operator(
    "lockstep::token_logprobs",
    cuda=SAME,
    fake=lambda hidden_CD, weight_VD, targets_C, temperature_C, *_: tuple(
        torch.empty_like(temperature_C) for _ in range(6)
    ),
    setup=_setup,
    backward=_backward,
)
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
        scored = _rows(logits_CV).scores(
            logits_CV, targets_C[chunk], temperature_C[chunk], stats.lse_C, stats.sampled_lse_C
        )
        results.append((*scored, *stats))
    logprob, model_logprob, lse, sampled_lse, threshold, entropy = (torch.cat(r) for r in zip(*results, strict=True))
    return logprob, model_logprob, entropy, lse, sampled_lse, threshold


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
            z_CV = linear_fp32(hidden_CD[c], weight_VD) / reference.divisor(temperature_C[c]).unsqueeze(1)
            masks.append(reference.pack_support(z_CV >= threshold_C[c].unsqueeze(1)))
    return torch.cat(masks)


@operator(
    "lockstep::sample",
    cuda=SAME,
    fake=lambda hidden_CD, weight_VD, key_C4, position_C, temperature_C, *_: (
        torch.empty_like(position_C),
        torch.empty_like(temperature_C),
        torch.empty_like(temperature_C),
    ),
)
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
    return token_C, *rows.scores(logits_CV, token_C, temperature_C, stats.lse_C, stats.sampled_lse_C)
