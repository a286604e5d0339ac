"""Latent attention on a CPU: attention's own paths, with each row as key and value, so the bits have their rules.

Queries are float32 here, so that the scale is applied before any rounding; the result is rounded once.

Shape suffixes as in `operator.py`; H = R + P.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..attention import reference as attention_reference
from ..attention import reference_backward
from ..embedding.operator import accumulate_rows


def packed(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    scale: float,
    layout: tuple[Tensor, Tensor, Tensor],
    max_len: int,
) -> Tensor:
    """See `mla.operator.latent_attention_packed`; `layout` is cu_seqlens, prefix_start_S and prefix_len_S."""
    q_TNH, k_T1H = _queries(q_TNR, q_rope_TNP, scale), _keys(latent_TR, k_rope_TP)
    if native.usable(q_TNH, k_T1H):
        out_TNH = native.packed(q_TNH, k_T1H, k_T1H, *layout, max_len)
    else:
        out_TNH = attention_reference.packed(q_TNH, k_T1H, k_T1H, *layout)
    return _latents(out_TNH, q_TNR)


def packed_backward(
    grad_TNR: Tensor,
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    scale: float,
    layout: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mla.operator.latent_attention_packed_backward`."""
    parts = (q_TNR.shape[2], q_rope_TNP.shape[2])
    q_TNH, k_T1H = _queries(q_TNR, q_rope_TNP, scale), _keys(latent_TR, k_rope_TP).float()
    grad_TNH = F.pad(grad_TNR.float(), (0, parts[1]))
    dq_TNH, dk_T1H, dv_T1H = reference_backward.packed(grad_TNH, q_TNH, k_T1H, k_T1H, *layout, accumulate_rows)
    dq_TNR, dq_rope_TNP = (dq_TNH * _factor(scale, sum(parts))).to(q_TNR.dtype).split(parts, dim=2)
    dlatent_TR, dk_rope_TP = (dk_T1H + dv_T1H).squeeze(1).to(latent_TR.dtype).split(parts, dim=1)
    return dq_TNR.contiguous(), dq_rope_TNP.contiguous(), dlatent_TR.contiguous(), dk_rope_TP.contiguous()


def paged(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    cache: Tensor,
    scale: float,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_query_len: int,
    max_context_len: int,
) -> Tensor:
    """See `mla.operator.latent_attention_paged`."""
    q_TNH, keys = _queries(q_TNR, q_rope_TNP, scale), cache.unsqueeze(2)
    sequences = block_table, cu_seqlens, context_len_S
    if native.usable(q_TNH, keys):
        out_TNH = native.paged(q_TNH, keys, keys, *sequences, max_context_len)
    else:
        out_TNH = attention_reference.paged(q_TNH, keys, keys, *sequences, max_query_len, max_context_len)
    return _latents(out_TNH, q_TNR)


def _factor(scale: float, width: int) -> float:
    """On the queries, as attention scales its scores by `width ** -0.5`."""
    return scale * width**0.5


def _queries(q_TNR: Tensor, q_rope_TNP: Tensor, scale: float) -> Tensor:
    q_TNH = torch.cat((q_TNR, q_rope_TNP), dim=2).float()
    return q_TNH * _factor(scale, q_TNH.shape[2])


def _keys(latent_TR: Tensor, k_rope_TP: Tensor) -> Tensor:
    return torch.cat((latent_TR, k_rope_TP), dim=1).unsqueeze(1)


def _latents(out_TNH: Tensor, like_TNR: Tensor) -> Tensor:
    """Without the sums of rotated keys."""
    return out_TNH[:, :, : like_TNR.shape[2]].to(like_TNR.dtype).contiguous()
