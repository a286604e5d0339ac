"""Backward of packed latent attention, by the two kernels of `attention.triton_backward`.

The first does all heads of a token in one group. The second's programs do `GROUP` heads each, and what the groups found
is added last.

Shape suffixes: T tokens, S segments, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.triton_backward import launch
from ..attention.triton_tiles import AttentionTile
from ..records import AttentionGradient, Latent, Packed
from ..row_alignment import unit_inner
from .triton import as_keys, rotated

QUERY_TILE, KEY_TILE = AttentionTile(32, 8, 1, keys=32), AttentionTile(32, 8, 1, keys=32)  # larger ones spill registers
GROUP = 16  # heads that a program of the second kernel does, if they divide by it


def packed(
    grad_TNR: Tensor, x: Latent, by: Packed, out_TNR: Tensor, lse_TN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mla.operator.mla_packed_backward`."""
    q_rope_TNP, k_rope_TP, latent = unit_inner(x.q_rope_TNP), unit_inner(x.k_rope_TP), as_keys(x.latent_TR)
    tokens, heads, rank = x.q_TNR.shape
    group = GROUP if heads % GROUP == 0 else heads
    dq_TNR, dq_rope_TNP = (x.q_TNR.new_empty(part.shape) for part in (x.q_TNR, q_rope_TNP))
    dlatent_CTR, dk_rope_CTP = (
        torch.empty((heads // group, tokens, width), dtype=torch.float32, device=q_rope_TNP.device)
        for width in (rank, k_rope_TP.shape[1])
    )
    parts = rotated(q_rope_TNP, k_rope_TP)
    launch(
        (dq_TNR, dlatent_CTR, dk_rope_CTP),
        AttentionGradient(grad_TNR, x.q_TNR, latent, latent, out_TNR, lse_TN),
        by,
        x.scale,
        (QUERY_TILE, KEY_TILE),
        ({"dq_rope_ptr": dq_rope_TNP, **parts}, {"GROUP": group, "HEADS": heads, **parts}),
    )
    dlatent_TR, dk_rope_TP = (part.sum(0).to(latent.dtype) for part in (dlatent_CTR, dk_rope_CTP))
    return dq_TNR, dq_rope_TNP, dlatent_TR, dk_rope_TP
