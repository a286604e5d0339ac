"""Gradients of the normalized and rotated queries and keys on a GPU, as an operator of its own that a trace keeps
whole.

On a CPU `operator.py` computes the same in plain torch. Neither is under the forward's contract; both give the same
bits every time.
"""

from __future__ import annotations

from torch import Tensor

from ..operator import operator
from ..records import Rotation


def _fake(grad, qkv_TE, by):
    size = 0 if by.q_weight_H is None or by.k_weight_H is None else by.cos_sin_TH.shape[1]
    q_dtype, k_dtype = ((w if w is not None else qkv_TE).dtype for w in by[:2])
    return qkv_TE.new_empty(qkv_TE.shape), qkv_TE.new_empty(size, dtype=q_dtype), qkv_TE.new_empty(size, dtype=k_dtype)


@operator(
    "lockstep::qk_norm_rope_backward",
    gpu_only=True,
    fake=_fake,
)
def qk_norm_rope(
    grad: Tensor,
    qkv_TE: Tensor,
    by: Rotation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rope.operator.qk_norm_rope` for qkv, [T, (N + 2K) * H] with zeros for v, and for both weights, [H];
    the latter are empty where there are no weights."""
    from . import triton_backward

    return triton_backward.qk_norm_rope(grad, qkv_TE, by)
