"""Log-probabilities over a chunked LM head, and sampling from it: one code path for trainer and generator.

Each token has two: under the distribution that was sampled (temperature, top-k, top-p, min-p) and under the model's own
(temperature 1, no filters). The [tokens, vocabulary] logits exist one chunk at a time, unless a graph keeps them for
its backward pass (`score_logits`).

Shape suffixes: C rows (one per token to score), D model dim, V vocabulary, B bytes of a support mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import native
from ..linear.operator import linear_fp32, matmul
from ..native import library
from ..operator import SAME, operator, save, saved_values
from ..records import Filters, SampleKeys, ScoredRows, slice_rows
from . import reference
from .reference import divisor, pack_support, unpack_support

CHUNK = 1024  # rows of logits at a time


def _implementation(logits_CV: Tensor) -> ModuleType:
    """The implementation of the row functions for this device."""
    if not logits_CV.is_cuda:
        return reference if library.current is None else native
    from . import triton as logprobs_triton

    return logprobs_triton


@operator(
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
    scored: ScoredRows,
    logits_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients for the hidden rows and the LM head, [C, D] and [V, D] in the inputs' dtype. `grad_logprob_C` is the
    gradient of the log-probabilities under the sampled distribution, `grad_model_C` of those under the model's own;
    None if they have none. Logits, float32 [C, V], are recomputed a chunk at a time if they were not kept.

    On a CPU a chunk is a range of rows, and the weight's gradient accumulates in float32.
    """
    grad_hidden = torch.empty_like(hidden_CD)
    grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
    for i in range(0, hidden_CD.shape[0], CHUNK):
        c = slice(i, i + CHUNK)
        chunk_CV = linear_fp32(hidden_CD[c], weight_VD) if logits_CV is None else logits_CV[c]
        grads = (None if grad_C is None else grad_C[c] for grad_C in (grad_logprob_C, grad_model_C))
        grad_CV = grad_logits(chunk_CV, slice_rows(scored, c), *grads).to(hidden_CD.dtype)
        grad_hidden[c] = matmul(grad_CV, weight_VD)
        grad_weight += matmul(grad_CV.t(), hidden_CD[c])
    return grad_hidden, grad_weight.to(weight_VD.dtype)


def grad_logits(
    logits_CV: Tensor, scored: ScoredRows, grad_logprob_C: Tensor | None, grad_model_C: Tensor | None
) -> Tensor:
    """`d/dlogits` of both log-probabilities: (one-hot - softmax), for the sampled one over its support and divided by
    the temperature."""
    if grad_logprob_C is None:
        grad_logprob_C = torch.zeros_like(scored.temperature_C)
    slope_C = torch.where(scored.temperature_C > 0, grad_logprob_C / divisor(scored.temperature_C), 0.0)
    z_CV = logits_CV / divisor(scored.temperature_C).unsqueeze(1)
    sampled_CV = torch.exp(z_CV - scored.sampled_lse_C.unsqueeze(1))
    if scored.support_CB is not None:
        sampled_CV.masked_fill_(~unpack_support(scored.support_CB, z_CV.shape[1]), 0.0)  # may be infinite outside
    elif scored.truncated:
        sampled_CV.masked_fill_(z_CV < scored.threshold_C.unsqueeze(1), 0.0)
    grad_CV = sampled_CV.mul_(-slope_C.unsqueeze(1))
    if grad_model_C is not None:
        grad_CV.sub_(torch.exp(logits_CV - scored.lse_C.unsqueeze(1)).mul_(grad_model_C.unsqueeze(1)))
        slope_C = slope_C + grad_model_C
    return grad_CV.scatter_add_(1, scored.targets_C.unsqueeze(1), slope_C.unsqueeze(1))


def _setup(ctx, inputs, output) -> None:
    hidden_CD, weight_VD, targets_C, temperature_C, *_, support_CB, truncated = inputs
    save(ctx, [hidden_CD, weight_VD, targets_C, temperature_C, support_CB, *output[3:], truncated])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _scores_fake(*args):
    filters = args[-3]
    return tuple(torch.empty_like(filters.temperature_C) for _ in range(6))


def _backward(ctx, grad_logprob_C: Tensor | None, grad_model_C: Tensor | None, *_: Tensor):
    hidden_CD, weight_VD, *scored = saved_values(ctx)
    return token_logprobs_backward(grad_logprob_C, grad_model_C, hidden_CD, weight_VD, ScoredRows(*scored))


@operator(cuda=SAME, fake=_scores_fake, setup=_setup, backward=_backward)
def _token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    filters: Filters,
    support_CB: Tensor | None,
    truncated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    chunks = map(linear_fp32, hidden_CD.split(CHUNK), itertools.repeat(weight_VD))
    return _score_chunks(chunks, targets_C, filters, support_CB, truncated)


@operator(cuda=SAME, fake=_scores_fake)
def score_logits(
    logits_CV: Tensor, targets_C: Tensor, filters: Filters, support_CB: Tensor | None, truncated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`_token_logprobs` from the head's products (logits), float32 [C, V]. No autograd."""
    return _score_chunks(logits_CV.split(CHUNK), targets_C, filters, support_CB, truncated)


def _score_chunks(
    chunks: Iterable[Tensor], targets_C: Tensor, filters: Filters, support_CB: Tensor | None, truncated: bool
) -> Any:
    """Both log-probabilities, entropies, and the first three of `RowStatistics`, from logits in chunks."""
    results = []
    for i, logits_CV in enumerate(chunks):
        c = slice(i * CHUNK, (i + 1) * CHUNK)
        rows, chunk_filters = _implementation(logits_CV), slice_rows(filters, c)
        chunk_support_CB = None if support_CB is None else support_CB[c]
        stats = rows.statistics(logits_CV, chunk_filters, chunk_support_CB, truncated, True)
        scores = rows.scores(logits_CV, targets_C[c], chunk_filters.temperature_C, stats)
        results.append((*scores, stats.entropy_C, *stats[:3]))
    return tuple(map(torch.cat, zip(*results, strict=True)))


class TokenLogprobs(NamedTuple):
    """Float32 [C] each: log-probability under the sampled distribution and under the model's own, entropy (nats; no
    gradient), and the support's threshold (`support_mask`)."""

    logprob_C: Tensor
    model_logprob_C: Tensor
    entropy_C: Tensor
    threshold_C: Tensor


def token_logprobs(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    targets_C: Tensor,
    filters: Filters,
    support_CB: Tensor | None = None,
    truncated: bool = False,
) -> TokenLogprobs:
    """Score tokens (int64 ids) by the hidden states that predict them, [C, D], and the LM head, [V, D], of one dtype.

    Args:
        support_CB: uint8 bits of the support to use in place of the filters (`support_mask`).
        truncated: whether any row has a filter on; False skips the search for the support.

    On a CPU, a target outside the vocabulary raises an IndexError; on a GPU nothing checks it.
    """
    scored = _token_logprobs(hidden_CD, weight_VD, targets_C, filters, support_CB, truncated)
    logprob, model, entropy, _, _, threshold = scored
    return TokenLogprobs(logprob, model, entropy, threshold)


def support_mask(hidden_CD: Tensor, weight_VD: Tensor, temperature_C: Tensor, threshold_C: Tensor) -> Tensor:
    """The sampled support as bits, uint8 [C, ceil(V / 8)], for updates after the first, when logits have changed."""
    masks = []
    with torch.no_grad():
        parts = (x.split(CHUNK) for x in (hidden_CD, temperature_C, threshold_C))
        for hidden, temperature, threshold in zip(*parts, strict=True):
            z_CV = linear_fp32(hidden, weight_VD) / divisor(temperature).unsqueeze(1)
            masks.append(pack_support(z_CV >= threshold.unsqueeze(1)))
    return torch.cat(masks)


def _sample_fake(*args):
    keys, filters, _, _ = args[-4:]
    return torch.empty_like(keys.position_C), *(torch.empty_like(filters.temperature_C) for _ in range(2))


@operator(cuda=SAME, fake=_sample_fake)
def sample(
    hidden_CD: Tensor, weight_VD: Tensor, keys: SampleKeys, filters: Filters, truncated: bool, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row and score it. Returns token ids, int64 [C], and their log-probabilities under the sampled
    distribution and under the model's own, float32 [C]. `truncated`, `greedy`: whether any row has a filter on, or
    temperature 0."""
    return _draw_and_score(linear_fp32(hidden_CD, weight_VD), keys, filters, truncated, greedy)


@operator(cuda=SAME, fake=_sample_fake)
def sample_logits(
    logits_CV: Tensor, keys: SampleKeys, filters: Filters, truncated: bool, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample` from the head's products (logits), float32 [C, V]."""
    return _draw_and_score(logits_CV, keys, filters, truncated, greedy)


def _draw_and_score(
    logits_CV: Tensor, keys: SampleKeys, filters: Filters, truncated: bool, greedy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _implementation(logits_CV)
    stats = rows.statistics(logits_CV, filters, None, truncated, False)
    token_C = rows.draw(logits_CV, filters.temperature_C, stats.threshold_C, keys, greedy)
    return token_C, *rows.scores(logits_CV, token_C, filters.temperature_C, stats)
