"""Backward of packed latent attention, by the two kernels of `attention.triton_backward`.

The first does all heads of a token in one group. The second's programs do `GROUP` heads each, and what the groups found
is added last.

Shape suffixes: T tokens, S segments, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..attention.triton_backward import _key_kernel, _query_kernel
from ..attention.triton_tiles import AttentionTile, rows_last
from ..records import Latent, Packed
from .triton import block, rotated

QUERY_TILE, KEY_TILE = AttentionTile(32, 8, 1, keys=32), AttentionTile(32, 8, 1, keys=32)  # larger ones spill registers
GROUP = 16  # heads that a program of the second kernel does, if they divide by it


def packed(
    grad_TNR: Tensor, x: Latent, by: Packed, out_TNR: Tensor, lse_TN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mla.operator.mla_packed_backward`."""
    q_TNR, q_rope_TNP, latent_TR, k_rope_TP = map(rows_last, x[:4])
    (tokens, heads, rank), rope_dim, segments = q_TNR.shape, k_rope_TP.shape[1], by.prefix_len_S.shape[0]
    grad_TNR, out_TNR = grad_TNR.contiguous(), out_TNR.contiguous()
    group = GROUP if heads % GROUP == 0 else heads

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q_TNR.device)

    def options(tile: AttentionTile) -> dict[str, Any]:
        return {
            **rotated(q_rope_TNP, k_rope_TP),
            "HEAD_DIM": rank,
            "BLOCK_M": tile.query_rows,
            "BLOCK_L": tile.keys,
            "BLOCK_H": block(rank),
            "BLOCK_S": triton.next_power_of_2(segments + 1),
            "IS_LONG": False,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": True,
        }

    inputs = grad_TNR, q_TNR, latent_TR, latent_TR
    strides = *q_TNR.stride()[:2], *(latent_TR.stride(0), 0) * 2
    rest = *by[:3], tokens, segments, *strides, x.scale * math.log2(math.e)
    delta_TN, dq_TNR = floats(tokens, heads), q_TNR.new_empty(q_TNR.shape)
    dq_rope_TNP = q_TNR.new_empty(q_rope_TNP.shape)
    grid = (1, triton.cdiv(tokens * heads, QUERY_TILE.query_rows) + segments + 1)  # a segment's last tile may be short
    dq = {"dq_rope_ptr": dq_rope_TNP, "GROUP": heads}
    _query_kernel[grid](*inputs, out_TNR, lse_TN, delta_TN, dq_TNR, *rest, heads * rank, **dq, **options(QUERY_TILE))
    parts = floats(heads // group, tokens, rank), floats(heads // group, tokens, rope_dim)
    grid = (heads // group, triton.cdiv(tokens, KEY_TILE.keys) + segments + 1)
    heads_of = {"GROUP": group, "HEADS": heads}
    _key_kernel[grid](*inputs, lse_TN, delta_TN, *parts, *rest, rank, rope_dim, **heads_of, **options(KEY_TILE))
    dlatent_TR, dk_rope_TP = (part.sum(0).to(latent_TR.dtype) for part in parts)
    return dq_TNR, dq_rope_TNP, dlatent_TR, dk_rope_TP
