"""Latent attention over packed segments and over a paged cache, by the kernel of `attention.triton`, and its backward,
by those of `attention.triton_backward`.

A token's heads are a group that reads the same keys, which have a rotated part, and a tile of latents in shared memory
serves as keys and values. Single queries need no kernel of their own: a token's heads fill a tile. The backward's first
kernel is the same in this; programs of its second handle `GROUP` heads each, and the groups' sums are added last.

Shape suffixes: T tokens, S sequences, N heads, R latent rank, P rotated dim, C groups of heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.triton import launch
from ..attention.triton_backward import launch as launch_backward
from ..attention.triton_tiles import AttentionTile, block_size
from ..records import AttentionGradient, Latent, Packed, Paged
from ..rows import unit_inner

TILE = AttentionTile(64, 8, 2)
QUERY_TILE, KEY_TILE = AttentionTile(32, 8, 1, keys=32), AttentionTile(32, 8, 1, keys=32)  # larger ones spill registers
GROUP = 16  # heads per program of the second kernel, if it divides their number


def rope_arguments(q_rope_TNP: Tensor, k_rope_rows: Tensor) -> dict[str, Any]:
    """Arguments of the kernels of `attention` for the rotated parts."""
    stride, head_stride, _ = q_rope_TNP.stride()
    return {
        **{"q_rope_ptr": q_rope_TNP, "q_rope_stride": stride, "q_rope_head_stride": head_stride},
        **{"k_rope_ptr": k_rope_rows, "k_rope_stride": k_rope_rows.stride(0)},
        **{"ROPE_DIM": q_rope_TNP.shape[2], "BLOCK_P": block_size(q_rope_TNP.shape[2])},
    }


def latents_as_keys(latent_rows: Tensor) -> Tensor:
    """Rows of latents as the rows of one kv head, [rows, 1, R]; with head stride 0, any other head reads the same."""
    x = unit_inner(latent_rows)
    return x.as_strided((x.shape[0], 1, x.shape[1]), (x.stride(0), 0, 1))


def _launch(x: Latent, layout: Packed | Paged, page_size: int, max_queries: int) -> tuple[Tensor, Tensor]:
    """The rows of latents and rotated keys are the tokens' own or a cache's."""
    latent = latents_as_keys(x.latent_TR)
    tile = TILE._replace(query_rows=min(block_size(max_queries * x.q_TNR.shape[1]), TILE.query_rows))
    parts = rope_arguments(unit_inner(x.q_rope_TNP), unit_inner(x.k_rope_TP))
    return launch((x.q_TNR, latent, latent), x.scale, layout, page_size, tile, **parts)


def packed(x: Latent, layout: Packed) -> tuple[Tensor, Tensor]:
    """See `mla.operator.mla_packed`; also returns each row's log2-sum-exp2 of scaled scores, float32 [T, N]."""
    out_TNR, lse_1TN = _launch(x, layout, 0, layout.max_len)
    return out_TNR, lse_1TN[0]


def paged(q_TNR: Tensor, q_rope_TNP: Tensor, cache: Tensor, scale: float, layout: Paged) -> Tensor:
    rows = cache.flatten(0, 1).split((q_TNR.shape[2], q_rope_TNP.shape[2]), dim=1)
    return _launch(Latent(q_TNR, q_rope_TNP, *rows, scale), layout, cache.shape[1], layout.max_query_len)[0]


def packed_backward(
    grad_TNR: Tensor, x: Latent, layout: Packed, out_TNR: Tensor, lse_TN: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_rope_TNP, k_rope_TP, latent = unit_inner(x.q_rope_TNP), unit_inner(x.k_rope_TP), latents_as_keys(x.latent_TR)
    tokens, heads, rank = x.q_TNR.shape
    group = GROUP if heads % GROUP == 0 else heads
    dq_TNR, dq_rope_TNP = (x.q_TNR.new_empty(part.shape) for part in (x.q_TNR, q_rope_TNP))
    dlatent_CTR, dk_rope_CTP = (
        torch.empty((heads // group, tokens, width), dtype=torch.float32, device=q_rope_TNP.device)
        for width in (rank, k_rope_TP.shape[1])
    )
    parts = rope_arguments(q_rope_TNP, k_rope_TP)
    launch_backward(
        (dq_TNR, dlatent_CTR, dk_rope_CTP),
        AttentionGradient(grad_TNR, x.q_TNR, latent, latent, out_TNR, lse_TN),
        layout,
        x.scale,
        (QUERY_TILE, KEY_TILE),
        ({"dq_rope_ptr": dq_rope_TNP, **parts}, {"GROUP": group, **parts}),
    )
    dlatent_TR, dk_rope_TP = (part.sum(0).to(latent.dtype) for part in (dlatent_CTR, dk_rope_CTP))
    return dq_TNR, dq_rope_TNP, dlatent_TR, dk_rope_TP
