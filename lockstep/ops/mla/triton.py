"""Latent attention over packed segments and over a paged cache, by the kernel of `attention.triton`.

A token's heads are a group that reads the same keys, with a rotated part, and a tile of latents in shared memory is
both keys and values. Single queries are tiles like any others: a token's heads fill them.

Shape suffixes: T tokens, S sequences, N heads, R latent rank, P rotated dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..attention.triton import launch
from ..attention.triton_tiles import AttentionTile, block
from ..records import Latent, Packed, Paged
from ..row_alignment import unit_inner

TILE = AttentionTile(64, 8, 2)


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


def as_keys(latent_rows: Tensor) -> Tensor:
    """Rows of latents as a kv head's, [rows, 1, R]; the next head's, if a program asks for them, are the same."""
    x = unit_inner(latent_rows)
    return x.as_strided((x.shape[0], 1, x.shape[1]), (x.stride(0), 0, 1))


def _launch(x: Latent, by: Packed | Paged, page_size: int, max_queries: int) -> tuple[Tensor, Tensor]:
    """Rows of latents and of rotated keys lie anywhere."""
    latent = as_keys(x.latent_TR)
    tile = TILE._replace(query_rows=min(block(max_queries * x.q_TNR.shape[1]), TILE.query_rows))
    parts = rotated(unit_inner(x.q_rope_TNP), unit_inner(x.k_rope_TP))
    return launch((x.q_TNR, latent, latent), x.scale, by, page_size, tile, **parts)


def packed(x: Latent, by: Packed) -> tuple[Tensor, Tensor]:
    """See `mla.operator.mla_packed`; also the rows' log-sum-exp of scaled scores in base 2, float32 [T,
    N]."""
    out_TNR, lse_1TN = _launch(x, by, 0, by.max_len)
    return out_TNR, lse_1TN[0]


def paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, by: Paged) -> Tensor:
    """See `mla.operator.mla_paged`."""
    rows = cache.flatten(0, 1).split((q_TNR.shape[2], q_rope_TNP.shape[2]), dim=1)
    return _launch(Latent(q_TNR, q_rope_TNP, *rows, scale), by, cache.shape[1], by.max_query_len)[0]
