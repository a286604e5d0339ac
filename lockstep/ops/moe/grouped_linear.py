"""Grouped matrix products under contract C1: each expert's rows times that expert's weights.

Shape suffixes: R rows sorted by group, G groups, N output columns, K contracted dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..linear.operator import linear, matmul
from ..operator import like, operator, saved_values


@operator(cuda="triton_grouped:grouped_linear_backward", fake=like(1, 2))
def grouped_linear_backward(
    grad_RN: Tensor, x_RK: Tensor, weight_GNK: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients for the input, [R, K], and the weights, [G, N, K] (zero for a group without rows); deterministic."""
    grad_x_RK, grad_w_GNK = torch.empty_like(x_RK), torch.zeros_like(weight_GNK)
    for g, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end > start:
            grad_x_RK[start:end] = matmul(grad_RN[start:end], weight_GNK[g])
            grad_w_GNK[g] = matmul(grad_RN[start:end].t(), x_RK[start:end])
    return grad_x_RK, grad_w_GNK


@operator(
    cuda="triton_grouped:grouped_sum", fake=lambda x_RN, offsets: x_RN.new_empty(offsets.shape[0] - 1, x_RN.shape[1])
)
def grouped_sum(x_RN: Tensor, offsets: Tensor) -> Tensor:
    """The sum of each group's rows, [G, N] in x's dtype, accumulated in float32 (zero for a group without rows);
    deterministic."""
    sums_GN = [x_RN[start:end].float().sum(0) for start, end in pairwise(offsets.tolist())]
    return torch.stack(sums_GN).to(x_RN.dtype)


def _backward(ctx, grad_RN: Tensor):
    x_RK, weight_GNK, offsets, bias_GN = saved_values(ctx)
    grad_RN = grad_RN.contiguous()
    grad_GN = None if bias_GN is None else grouped_sum(grad_RN, offsets)
    return *grouped_linear_backward(grad_RN, x_RK, weight_GNK, offsets), None, grad_GN


@operator(
    cuda="triton_grouped:grouped_linear",
    fake=lambda x_RK, weight_GNK, *_: x_RK.new_empty(x_RK.shape[0], weight_GNK.shape[1]),
    backward=_backward,
)
def grouped_linear(x_RK: Tensor, weight_GNK: Tensor, offsets: Tensor, bias_GN: Tensor | None = None) -> Tensor:
    """`x[r] @ weight[g].T + bias[g]` for each row r of group g, [R, N] in x's dtype, with weights [G, N, K] and biases
    [G, N]; each row has the bits of `linear`.
    `offsets`: int32 [G + 1], ascending from 0 to R; group g is rows `offsets[g]:offsets[g + 1]`, possibly none."""
    out_RN = x_RK.new_empty(x_RK.shape[0], weight_GNK.shape[1])
    for g, (start, end) in enumerate(pairwise(offsets.tolist())):
        if end > start:
            bias_N = None if bias_GN is None else bias_GN[g]
            out_RN[start:end] = linear(x_RK[start:end], weight_GNK[g], bias_N)
    return out_RN
