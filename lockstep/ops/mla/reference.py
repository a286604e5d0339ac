"""Latent attention on a CPU: attention's own paths, with each row as key and value, so the bits have their rules.

Queries are float32 here, so that the scale is applied before any rounding; the result is rounded once.

Shape suffixes as in `operator.py`; H = R + P.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention import reference, reference_backward
from ..records import KVPages, Latent, Packed, Paged


def packed(x: Latent, by: Packed, attention: Callable[..., Tensor] = reference.packed) -> tuple[Tensor, Tensor]:
    """See `mla.operator.mla_packed`; `attention` is of queries, keys and values."""
    q_TNH, k_T1H = _queries(x.q_TNR, x.q_rope_TNP, x.scale), _keys(x)
    out_TNH = attention(q_TNH, k_T1H, k_T1H, by)
    return _latents(out_TNH, x.q_TNR), x.q_TNR.new_empty(0, dtype=torch.float32)


def packed_backward(grad_TNR: Tensor, x: Latent, by: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mla.operator.mla_packed_backward`."""
    parts = (x.q_TNR.shape[2], x.q_rope_TNP.shape[2])
    q_TNH, k_T1H = _queries(x.q_TNR, x.q_rope_TNP, x.scale), _keys(x).float()
    grad_TNH = F.pad(grad_TNR.float(), (0, parts[1]))
    dq_TNH, dk_T1H, dv_T1H = reference_backward.packed(grad_TNH, q_TNH, k_T1H, k_T1H, by)
    dq_TNR, dq_rope_TNP = (dq_TNH * _factor(x.scale, sum(parts))).to(x.q_TNR.dtype).split(parts, dim=2)
    dlatent_TR, dk_rope_TP = (dk_T1H + dv_T1H).squeeze(1).to(x.latent_TR.dtype).split(parts, dim=1)
    return dq_TNR.contiguous(), dq_rope_TNP.contiguous(), dlatent_TR.contiguous(), dk_rope_TP.contiguous()


def paged(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    cache: Tensor,
    scale: float,
    by: Paged,
    attention: Callable[..., Tensor] = reference.paged,
) -> Tensor:
    """See `mla.operator.mla_paged`."""
    keys = cache.unsqueeze(2)
    return _latents(attention(_queries(q_TNR, q_rope_TNP, scale), KVPages(keys, keys), by), q_TNR)


def _factor(scale: float, width: int) -> float:
    """On the queries, as attention scales its scores by `width ** -0.5`."""
    return scale * width**0.5


def _queries(q_TNR: Tensor, q_rope_TNP: Tensor, scale: float) -> Tensor:
    q_TNH = torch.cat((q_TNR, q_rope_TNP), dim=2).float()
    return q_TNH * _factor(scale, q_TNH.shape[2])


def _keys(x: Latent) -> Tensor:
    return torch.cat((x.latent_TR, x.k_rope_TP), dim=1).unsqueeze(1)


def _latents(out_TNH: Tensor, like_TNR: Tensor) -> Tensor:
    """Without the sums of rotated keys."""
    return out_TNH[:, :, : like_TNR.shape[2]].to(like_TNR.dtype).contiguous()
