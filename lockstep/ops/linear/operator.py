"""Matrix products under contract C1: one float32 accumulator an output element, ascending K, one rounding.

What keeps a row's bits its own on a CPU was measured, not assumed (`docs/numerics.md`): products are made in blocks of
`ROW_BLOCK` rows, with at least `MIN_COLUMNS` columns and a depth of at least `MIN_DEPTH`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..operator import SAME, operator

ROW_BLOCK = 64  # one shape a weight: how a library cuts a product, and whether it splits the depth, follows the rows
MIN_COLUMNS = 16  # measured: with 12 and more a row's bits are its own; with fewer they change with rows and addresses
MIN_DEPTH = 32  # torch leaves bfloat16 products of 16 * 16 * 16 multiplications and fewer to other code


def _backward(ctx, grad_TN: Tensor):
    x_TK, weight_NK = ctx.saved_tensors
    return matmul(grad_TN, weight_NK), matmul(grad_TN.t(), x_TK)


@operator(
    "lockstep::linear",
    native=native.linear,
    cuda="kernels:linear",
    fake=lambda x_TK, weight_NK: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]),
    backward=_backward,
)
def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """`x @ weight.T`, [T, N] in x's dtype; a row's bits do not depend on how many rows there are."""
    (rows, depth), columns = x_TK.shape, weight_NK.shape[0]
    deeper, wider = max(MIN_DEPTH - depth, 0), max(MIN_COLUMNS - columns, 0)  # filled up with zeros
    if deeper or wider:
        weight_NK = F.pad(weight_NK, (0, deeper, 0, wider))
    padded = F.pad(x_TK, (0, deeper, 0, -rows % ROW_BLOCK))
    out = torch.cat([F.linear(block, weight_NK) for block in padded.split(ROW_BLOCK)])
    return out[:rows, :columns].contiguous()


@operator(
    "lockstep::linear_fp32",
    cuda="kernels:linear_fp32",
    fake=lambda x_TK, weight_NK: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0], dtype=torch.float32),
)
def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same product with the float32 accumulator as its result (logits, router scores). No autograd."""
    return linear.on_cpu[torch.float32](x_TK.float(), weight_NK.float())


@operator(
    "lockstep::matmul",
    native=native.matmul,
    cuda=SAME,
    fake=lambda a_RD, b_DC: a_RD.new_empty(a_RD.shape[0], b_DC.shape[1]),
)
def matmul(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    """`a @ b` for backward passes: under no contract, but the same every time."""
    return a_RD @ b_DC
