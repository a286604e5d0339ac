"""Latent attention over packed segments and over a paged cache, by the kernel of `attention.triton`.

A token's heads are a group that reads the same keys, with a rotated part, and a tile of latents in shared memory is
both keys and values. Single queries are tiles like any others: a token's heads fill them.

Shape suffixes: T tokens, S sequences, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..attention.reference import KEY_SPLIT, KEY_TILE
from ..attention.triton import _attention_kernel
from ..attention.triton_tiles import MIN_BLOCK, rows_last


class LatentTile(NamedTuple):
    """How the kernel runs: query rows of a program, warps, pipeline stages."""

    query_rows: int
    warps: int
    stages: int


TILE = LatentTile(64, 8, 2)


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


def _launch(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_rows: Tensor,
    k_rope_rows: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    length_S: Tensor,
    table: Tensor,
    page_size: int,
    max_queries: int,
    max_context: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; `max_queries` bounds a sequence's query tokens, `max_context` its keys."""
    tokens, heads, rank = q_TNR.shape
    q_TNR, q_rope_TNP, latent_rows, k_rope_rows = map(rows_last, (q_TNR, q_rope_TNP, latent_rows, k_rope_rows))
    out_TNR = torch.empty((tokens, heads, rank), dtype=q_TNR.dtype, device=q_TNR.device)
    lse_TN = torch.empty((tokens, heads), dtype=torch.float32, device=q_TNR.device)
    block_m = min(block(max_queries * heads), TILE.query_rows)
    _attention_kernel[max(triton.cdiv(max_queries * heads, block_m), 1), 1, length_S.shape[0] + 1](
        q_TNR,
        latent_rows,
        latent_rows,
        out_TNR,
        lse_TN,
        cu_seqlens,
        length_S,
        table,
        tokens,
        table.stride(0),
        *q_TNR.stride()[:2],
        *(latent_rows.stride(0), 0) * 2,
        scale * math.log2(math.e),
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


def packed(
    q_TNR: Tensor,
    q_rope_TNP: Tensor,
    latent_TR: Tensor,
    k_rope_TP: Tensor,
    scale: float,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> tuple[Tensor, Tensor]:
    """See `mla.operator.latent_attention_packed`; also the rows' log-sum-exp of scaled scores in base 2, float32 [T,
    N]."""
    layout = cu_seqlens, prefix_len_S, prefix_start_S, 0, max_len, max_len
    return _launch(q_TNR, q_rope_TNP, latent_TR, k_rope_TP, scale, *layout)


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
    latent_rows, k_rope_rows = cache.flatten(0, 1).split((q_TNR.shape[2], q_rope_TNP.shape[2]), dim=1)
    layout = cu_seqlens, context_len_S, block_table, cache.shape[1], max_query_len, max_context_len
    return _launch(q_TNR, q_rope_TNP, latent_rows, k_rope_rows, scale, *layout)[0]
