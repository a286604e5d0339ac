"""Causal latent attention (MLA, absorbed) for both roles: packed with shared prefixes, and paged.

All heads read one row per position, the latent and a rotated key; a score is the sum of both parts' products, and the
result is the weighted sum of the latents alone. Tiles, splits and their order are those of `ops/attention/operator.py`,
so a query's bits depend on the rows' absolute positions only. A CPU uses attention's own paths, with each row as key
and value: queries are float32 there, so that the scale is applied before any rounding; the result is rounded once.

Shape suffixes: T rows, S segments or sequences, N heads, R latent rank, P rotated dim, H = R + P.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..attention import reference
from ..operator import SAME, like, operator, save_inputs_and_results, saved_values
from ..records import KVPages, Latent, Packed, Paged


def mla_packed(x: Latent, layout: Packed) -> Tensor:
    """Latent attention over packed segments, each after an optional shared prefix; [T, N, R] in q's dtype, zero in
    padding. All parts have one dtype."""
    return _packed(x, layout)[0]


def _packed_fake(x, layout):
    statistics = x.q_TNR.shape[:2] if x.q_TNR.is_cuda else (0,)
    return x.q_TNR.new_empty(x.q_TNR.shape), x.q_TNR.new_empty(statistics, dtype=torch.float32)


def _backward(ctx, grad_TNR: Tensor, _):
    *inputs, out_TNR, lse_TN = saved_values(ctx)
    x, layout = Latent(*inputs[: len(Latent._fields)]), Packed(*inputs[len(Latent._fields) :])
    return mla_packed_backward(grad_TNR.contiguous(), x, layout, out_TNR, lse_TN)


def _attend_packed(attend: Callable[..., Tensor], x: Latent, layout: Packed) -> tuple[Tensor, Tensor]:
    q_TNH, k_T1H = _queries(x.q_TNR, x.q_rope_TNP, x.scale), _keys(x)
    return _drop_rotated(attend(q_TNH, k_T1H, k_T1H, layout), x.q_TNR), x.q_TNR.new_empty(0, dtype=torch.float32)


@operator(
    "lockstep::mla_packed",
    native=partial(_attend_packed, native.packed),
    cuda="triton:packed",
    fake=_packed_fake,
    setup=save_inputs_and_results,
    backward=_backward,
)
def _packed(x: Latent, layout: Packed) -> tuple[Tensor, Tensor]:
    """The output and, for the backward, log2 of each row's sum of exponentials, float32 [T, N]; empty on a CPU."""
    return _attend_packed(reference.packed, x, layout)


@operator(
    cuda="triton:packed_backward", fake=lambda grad_TNR, x, *_: tuple(part.new_empty(part.shape) for part in x[:4])
)
def mla_packed_backward(
    grad_TNR: Tensor, x: Latent, layout: Packed, out_TNR: Tensor, lse_TN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the first four fields of `x`, zero in padding rows. Not under the forward's contract, but
    deterministic. `out_TNR` and `lse_TN` are what the forward returned."""
    parts = (x.q_TNR.shape[2], x.q_rope_TNP.shape[2])
    q_TNH, k_T1H = _queries(x.q_TNR, x.q_rope_TNP, x.scale), _keys(x).float()
    grad_TNH = F.pad(grad_TNR.float(), (0, parts[1]))
    dq_TNH, dk_T1H, dv_T1H, _ = reference.packed_backward((grad_TNH, q_TNH, k_T1H, k_T1H), layout)
    dq_TNR, dq_rope_TNP = (dq_TNH * _query_factor(x.scale, sum(parts))).to(x.q_TNR.dtype).split(parts, dim=2)
    dlatent_TR, dk_rope_TP = (dk_T1H + dv_T1H).squeeze(1).to(x.latent_TR.dtype).split(parts, dim=1)
    return dq_TNR.contiguous(), dq_rope_TNP.contiguous(), dlatent_TR.contiguous(), dk_rope_TP.contiguous()


def _attend_paged(
    attend: Callable[..., Tensor], q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, layout: Paged
) -> Tensor:
    keys = cache.unsqueeze(2)
    return _drop_rotated(attend(_queries(q_TNR, q_rope_TNP, scale), KVPages(keys, keys), layout), q_TNR)


@operator(native=partial(_attend_paged, native.paged), cuda="triton:paged", fake=like(0, contiguous=True))
def mla_paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, layout: Paged) -> Tensor:
    """Latent attention of new tokens over a paged cache [pages, page_size, H] that already holds their rows;
    [T, N, R]."""
    return _attend_paged(reference.paged, q_TNR, q_rope_TNP, cache, scale, layout)


@operator(mutates=("cache",), cuda=SAME)
def mla_write(latent_TR: Tensor, k_rope_TP: Tensor, cache: Tensor, slots_T: Tensor) -> None:
    """Store rows at `slots_T` (int64; page * page_size + offset) of a cache [pages, page_size, H]."""
    cache.flatten(0, 1).index_copy_(0, slots_T, torch.cat((latent_TR, k_rope_TP), dim=1))


def _query_factor(scale: float, width: int) -> float:
    """The factor on the queries that turns attention's own scale, `width ** -0.5`, into `scale`."""
    return scale * width**0.5


def _queries(q_TNR: Tensor, q_rope_TNP: Tensor, scale: float) -> Tensor:
    q_TNH = torch.cat((q_TNR, q_rope_TNP), dim=2).float()
    return q_TNH * _query_factor(scale, q_TNH.shape[2])


def _keys(x: Latent) -> Tensor:
    return torch.cat((x.latent_TR, x.k_rope_TP), dim=1).unsqueeze(1)


def _drop_rotated(out_TNH: Tensor, like_TNR: Tensor) -> Tensor:
    """The result without the weighted sums of rotated keys."""
    return out_TNH[:, :, : like_TNR.shape[2]].to(like_TNR.dtype).contiguous()
