"""Latent attention over packed segments and over a paged cache, by the kernel of `attention.triton`.

A token's heads are a group that reads the same keys, with a rotated part, and a tile of latents in shared memory is
both keys and values. Single queries are tiles like any others: a token's heads fill them.

Shape suffixes: T tokens, S sequences, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ..attention.reference import KEY_SPLIT, KEY_TILE
from ..attention.triton import _attention_kernel
from ..attention.triton_tiles import MIN_BLOCK, AttentionTile, rows_last
from ..records import Latent, Packed, Paged

TILE = AttentionTile(64, 8, 2)


def block(width: int) -> int:
    """A power of two that holds so many elements, and that `tl.dot` takes."""
    return max(triton.next_power_of_2(width), MIN_BLOCK)


def rotated(q_rope_TNP: Tensor, k_rope_rows: Tensor) -> dict[str, Any]:
    """What the kernels of `attention` are given of the rotated parts."""
    return {
        "q_rope_ptr": q_rope_TNP,
        "q_rope_stride": q_rope_TNP.stride(0),
        "q_rope_head_stride": q_rope_TNP.stride(1),
        "k_rope_ptr": k_rope_rows,
        "k_rope_stride": k_rope_rows.stride(0),
        "ROPE_DIM": q_rope_TNP.shape[2],
        "BLOCK_P": block(q_rope_TNP.shape[2]),
    }


def _launch(x: Latent, at: tuple[Tensor, ...], page_size: int, bounds: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; rows of latents and of rotated keys lie anywhere. The rest is as in attention's own."""
    max_queries, max_context = bounds
    tokens, heads, rank = x.q_TNR.shape
    q_TNR, q_rope_TNP, latent_rows, k_rope_rows = map(rows_last, x[:4])
    out_TNR = torch.empty((tokens, heads, rank), dtype=q_TNR.dtype, device=q_TNR.device)
    lse_TN = torch.empty((tokens, heads), dtype=torch.float32, device=q_TNR.device)
    block_m = min(block(max_queries * heads), TILE.query_rows)
    _attention_kernel[max(triton.cdiv(max_queries * heads, block_m), 1), 1, at[1].shape[0] + 1](
        q_TNR,
        latent_rows,
        latent_rows,
        out_TNR,
        lse_TN,
        *at,
        tokens,
        at[2].stride(0),
        *q_TNR.stride()[:2],
        *(latent_rows.stride(0), 0) * 2,
        x.scale * math.log2(math.e),
        PAGE_SIZE=page_size,
        SPLIT=KEY_SPLIT if max_context > KEY_SPLIT else 0,
        IS_LONG=False,
        GROUP=heads,
        HEAD_DIM=rank,
        BLOCK_M=block_m,
        BLOCK_L=KEY_TILE,
        BLOCK_H=block(rank),
        **rotated(q_rope_TNP, k_rope_rows),
        num_warps=TILE.warps,
        num_stages=TILE.stages,
        enable_fp_fusion=False,
    )
    return out_TNR, lse_TN


def packed(x: Latent, by: Packed) -> tuple[Tensor, Tensor]:
    """See `mla.operator.mla_packed`; also the rows' log-sum-exp of scaled scores in base 2, float32 [T,
    N]."""
    return _launch(x, (by.cu_seqlens, by.prefix_len_S, by.prefix_start_S), 0, (by.max_len,) * 2)


def paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, by: Paged) -> Tensor:
    """See `mla.operator.mla_paged`."""
    rows = cache.flatten(0, 1).split((q_TNR.shape[2], q_rope_TNP.shape[2]), dim=1)
    at, bounds = (by.cu_seqlens, by.context_len_S, by.block_table), (by.max_query_len, by.max_context_len)
    return _launch(Latent(q_TNR, q_rope_TNP, *rows, scale), at, cache.shape[1], bounds)[0]
