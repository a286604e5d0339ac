"""Sums over the tokens of each sequence, with their gradient.

Shape suffixes: C completion tokens, S sequences.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..operator import like, operator, save


def _backward(ctx, grad_C: Tensor):
    return sequence_sum(grad_C, *ctx.saved_tensors)  # the operator is its own transpose


@operator(
    cuda="triton:sequence_sum",
    fake=like(0, contiguous=True),
    setup=lambda ctx, inputs, output: save(ctx, inputs[1:2]),
    backward=_backward,
)
def sequence_sum(values_C: Tensor, cu_completions: Tensor) -> Tensor:
    """For each token, the sum of float32 values over its sequence, [C]; 0 for a token outside all sequences.

    Sequence s is rows `cu_completions[s]:cu_completions[s + 1]` (int32 [S + 1]). The order of additions depends on the
    sequence's length alone, so the bits do not depend on its place or its neighbours.
    """
    values_C = values_C.contiguous()
    out_C = torch.zeros_like(values_C)
    for start, end in pairwise(cu_completions.tolist()):
        out_C[start:end] = values_C[start:end].sum()
    return out_C
