"""Gradients of RMSNorm on a GPU, as an operator of its own that a trace keeps whole.

On a CPU `operator.py` computes the same in plain torch. Neither is under the forward's contract; both give the same
bits every time.
"""

from __future__ import annotations

from torch import Tensor

from ..operator import operator


@operator(
    "lockstep::rms_norm_backward",
    gpu_only=True,
    fake=lambda grad_TD, x_TD, weight_D, eps: (x_TD.new_empty(x_TD.shape), weight_D.new_empty(weight_D.shape)),
)
def rms_norm(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of `norm.operator.rms_norm` for x, [T, D], and for the weight, [D]."""
    from . import triton_backward

    return triton_backward.rms_norm(grad_TD, x_TD, weight_D, eps)
