"""cuBLAS's product, and the process-wide settings that the contract needs from it, set in this one place."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..activation.triton import silu_mul
from ..records import PLAIN_EPILOGUE, Epilogue
from .choice import Choice, Kind
from .triton import supports as supports

MIN_ROWS = 8  # below this cuBLAS may use matrix-vector kernels, which add in another order


@functools.cache
def configure_cuda() -> None:
    """Keep cuBLAS from splitting K: cuBLASLt with reduced-precision and split-K reductions off.

    These two settings are the one exception to "no global overrides": torch has no per-call form of them.
    """
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def cublaslt_linear(
    x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype = torch.bfloat16, bias_N: Tensor | None = None
) -> Tensor:
    """`x @ weight.T` under C1 for bfloat16 inputs, in `dtype` (bfloat16 or, without a bias, float32)."""
    configure_cuda()
    rows = x_TK.shape[0]
    if rows < MIN_ROWS:
        x_TK = torch.nn.functional.pad(x_TK, (0, 0, 0, MIN_ROWS - rows))
    weight_KN = weight_NK.t()
    if bias_N is not None:
        return torch.addmm(bias_N.contiguous(), x_TK, weight_KN)[:rows]
    return (torch.mm(x_TK, weight_KN) if dtype == x_TK.dtype else torch.mm(x_TK, weight_KN, out_dtype=dtype))[:rows]


def run(
    kind: Kind,
    choice: Choice,
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor | None = None,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> Tensor:
    out_MN = cublaslt_linear(x_MK, weight_NK, torch.float32 if kind == "linear_fp32" else x_MK.dtype, epilogue.bias_N)
    if kind == "norm_gate_up":
        return silu_mul(out_MN, epilogue.activation)
    return out_MN if residual_MN is None else out_MN.add_(residual_MN)
