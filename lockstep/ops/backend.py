"""Process-wide settings that the contract needs from libraries, set in this one place, and the CUDA matrix product."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MIN_ROWS = 8  # below this cuBLAS may use matrix-vector kernels, whose order of additions is another


@functools.cache
def configure_cuda() -> None:
    """Keep cuBLAS from splitting K: cuBLASLt with reduced-precision and split-K reductions off.

    These two settings are the one exception to "no global overrides": torch has no per-call form of them.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def cuda_linear(x_TK: Tensor, weight_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`x @ weight.T` under C1 for bfloat16 inputs; float32 inputs have no such contract and are refused."""
    if x_TK.dtype != torch.bfloat16:
        raise TypeError(f"the GPU path computes in bfloat16, got {x_TK.dtype}")
    configure_cuda()
    rows = x_TK.shape[0]
    if rows < MIN_ROWS:
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, MIN_ROWS - rows))
    if out_dtype == x_TK.dtype:
        return torch.mm(x_TK, weight_NK.t())[:rows]
    from .kernels.linear import linear_fp32

    return linear_fp32(x_TK, weight_NK)[:rows]
