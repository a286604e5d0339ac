"""Causal latent attention (MLA, absorbed) for both roles: packed with shared prefixes, and paged.

All heads read one row a position, the latent and a rotated key; a score is the sum of both parts' products, and the
result is the weighted sum of the latents alone. Tiles, splits and their order are those of `ops/attention/operator.py`,
so a query's bits depend on the rows' absolute positions only.

Shape suffixes: T rows, S segments or sequences, N heads, R latent rank, P rotated dim, H = R + P.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import native
from ..operator import SAME, operator, save_inputs_and_results, saved
from ..records import Latent, Packed, Paged
from . import reference


def mla_packed(x: Latent, by: Packed) -> Tensor:
    """Latent attention over packed segments, each after an optional shared prefix; [T, N, R] in q's dtype, zero in
    padding."""
    return _packed(x, by)[0]


def _packed_fake(x, by):
    statistics = x.q_TNR.shape[:2] if x.q_TNR.is_cuda else (0,)
    return x.q_TNR.new_empty(x.q_TNR.shape), x.q_TNR.new_empty(statistics, dtype=torch.float32)


def _backward(ctx, grad_TNR: Tensor, _):
    *inputs, out_TNR, lse_TN = saved(ctx)
    return mla_packed_backward(grad_TNR.contiguous(), *inputs, out_TNR, lse_TN)


@operator(
    "lockstep::mla_packed",
    native=partial(reference.packed, attention=native.packed),
    cuda="triton:packed",
    fake=_packed_fake,
    setup=save_inputs_and_results,
    backward=_backward,
)
def _packed(x: Latent, by: Packed) -> tuple[Tensor, Tensor]:
    """The output and, for the backward, log2 of each row's sum of exponentials, float32 [T, N]; empty on a CPU."""
    return reference.packed(x, by)


@operator(
    "lockstep::mla_packed_backward",
    cuda="triton:packed_backward",
    fake=lambda grad_TNR, x, *_: tuple(part.new_empty(part.shape) for part in x[:4]),
)
def mla_packed_backward(
    grad_TNR: Tensor, x: Latent, by: Packed, out_TNR: Tensor, lse_TN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the first four inputs, zero in padding rows. Not under the forward's contract, but the same every
    time. `out_TNR` and `lse_TN` are what the forward returned."""
    return reference.packed_backward(grad_TNR, x, by)


@operator(
    "lockstep::mla_paged",
    native=partial(reference.paged, attention=native.paged),
    cuda="triton:paged",
    fake=lambda q_TNR, *_: q_TNR.new_empty(q_TNR.shape),
)
def mla_paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, by: Paged) -> Tensor:
    """Latent attention of new tokens over a paged cache [pages, page_size, H] that already holds their rows;
    [T, N, R]."""
    return reference.paged(q_TNR, q_rope_TNP, cache, scale, by)


@operator(
    "lockstep::mla_write",
    mutates=("cache",),
    cuda=SAME,
)
def mla_write(latent_TR: Tensor, k_rope_TP: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store rows at `slots_T` (int64; page * page_size + offset) of a cache [pages, page_size, H]."""
    cache.flatten(0, 1).index_copy_(0, slots_T, torch.cat((latent_TR, k_rope_TP), dim=1))
