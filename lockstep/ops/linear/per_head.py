"""A matrix product a head, under contract C1: what moves latent attention's projections across the attention.

Shape suffixes: T tokens, N heads, M output columns, K contracted dim.
"""

from __future__ import annotations

from torch import Tensor

from ..operator import operator
from .operator import linear


def _backward(ctx, grad_TNM: Tensor):
    x_TNK, weight_NMK = ctx.saved_tensors
    grad_x_TNK = per_head_linear(grad_TNM, weight_NMK.transpose(1, 2))
    grad_w_MNK = per_head_linear(grad_TNM.permute(2, 1, 0), x_TNK.permute(1, 2, 0))  # contracts the tokens
    return grad_x_TNK, grad_w_MNK.transpose(0, 1)


@operator(
    "lockstep::per_head_linear",
    cuda="triton_per_head:per_head_linear",
    fake=lambda x_TNK, weight_NMK: x_TNK.new_empty(*x_TNK.shape[:2], weight_NMK.shape[1]),
    backward=_backward,
)
def per_head_linear(x_TNK: Tensor, weight_NMK: Tensor) -> Tensor:
    """`x[:, n] @ weight[n].T` for each head n, [T, N, M] in x's dtype; the bits of `linear` a head.

    Either may be a view with any strides, such as one projection's rows of a fused weight.
    """
    (tokens, heads, _), columns = x_TNK.shape, weight_NMK.shape[1]
    out_TNM = x_TNK.new_empty(tokens, heads, columns)
    for n in range(heads):
        out_TNM[:, n] = linear(x_TNK[:, n], weight_NMK[n])
    return out_TNM
