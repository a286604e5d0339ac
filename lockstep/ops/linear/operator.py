"""Matrix products under contract C1: one float32 accumulator per output element, ascending K, one rounding. A bias is
added to the accumulator in float32, before that rounding, as in cuBLAS's epilogue and therefore in `F.linear`.

What makes a row's bits independent of other rows on a CPU was measured, not assumed (`docs/numerics.md`): products are
computed in blocks of `ROW_BLOCK` rows and a multiple of `COLUMN_BLOCK` columns, at a depth of at least `MIN_DEPTH`.

Products fused with their neighbours have the same bits as the separate operators, in fewer kernels: each rounds where
those round. With gradients enabled the separate ones run, because their backward passes are separate; otherwise one
operator runs, and on a GPU the shape decides how much of it is one kernel.

Shape suffixes: T rows, D model dim, E fused projection, F feed-forward dim, K depth, N columns;
of per-head products: N heads, M columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from ..activation.operator import silu_mul
from ..norm.operator import rms_norm
from ..operator import SAME, operator
from ..records import SILU

ROW_BLOCK = 64  # one shape per weight: a library cuts a product, and may split its depth, according to the rows
COLUMN_BLOCK = 16  # measured: where a thread has fewer than 12, bits change with a row's place and with addresses
MIN_DEPTH = 32  # torch has other code for bfloat16 products of at most 16 * 16 * 16 multiplications


def _backward(ctx, grad_TN: Tensor):
    x_TK, weight_NK, bias_N = ctx.saved_tensors
    grad_N = None if bias_N is None else grad_TN.sum(0)  # in an order that depends on the shape alone
    return matmul(grad_TN, weight_NK), matmul(grad_TN.t(), x_TK), grad_N


@operator(
    native=native.linear,
    cuda="kernels:linear",
    fake=lambda x_TK, weight_NK, *_: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]),
    backward=_backward,
)
def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, [T, N] in the dtype of both, with weights [N, K]; a row's bits do not depend on the number
    of rows."""
    if bias_N is not None:
        return (linear_fp32.on_cpu[x_TK.dtype](x_TK, weight_NK) + bias_N.float()).to(x_TK.dtype)
    (rows, depth), columns = x_TK.shape, weight_NK.shape[0]
    deeper, last = max(MIN_DEPTH - depth, 0), columns % COLUMN_BLOCK
    if deeper:
        weight_NK = F.pad(weight_NK, (0, deeper))
    weights = [weight_NK[: columns - last]] if last < columns else []
    if last:  # only these columns are copied
        weights.append(F.pad(weight_NK[columns - last :], (0, 0, 0, COLUMN_BLOCK - last)))
    blocks = F.pad(x_TK, (0, deeper, 0, -rows % ROW_BLOCK)).split(ROW_BLOCK)
    parts = [torch.cat([F.linear(block, weight) for block in blocks]) for weight in weights]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return out[:rows, :columns].contiguous()


@operator(
    cuda="kernels:linear_fp32",
    fake=lambda x_TK, weight_NK: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0], dtype=torch.float32),
)
def linear_fp32(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same product without a bias, whose result is the accumulator, float32 [T, N] (for logits and routers). No
    autograd."""
    return linear.on_cpu[torch.float32](x_TK.float(), weight_NK.float())


@operator(native=native.matmul, cuda=SAME, fake=lambda a_RD, b_DC: a_RD.new_empty(a_RD.shape[0], b_DC.shape[1]))
def matmul(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    """`a @ b`, [R, C], both of one dtype, for backward passes: under no contract, but deterministic."""
    return a_RD @ b_DC


@operator(
    cuda="kernels:norm_linear",
    fake=lambda x_TD, norm_D, weight_ED, *_: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0]),
    composed=lambda x_TD, norm_D, weight_ED, eps, bias_E=None, weight_offset=0.0: linear(
        rms_norm(x_TD, norm_D, eps, weight_offset), weight_ED, bias_E
    ),
)
def norm_linear(
    x_TD: Tensor,
    norm_D: Tensor,
    weight_ED: Tensor,
    eps: float,
    bias_E: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """`linear(rms_norm(x, norm, eps, weight_offset), weight, bias)`, [T, E]."""
    normed_TD = rms_norm.on_cpu[x_TD.dtype](x_TD, norm_D, eps, weight_offset)
    return linear.on_cpu[x_TD.dtype](normed_TD, weight_ED, bias_E)


@operator(
    cuda="kernels:normed_linear",
    fake=lambda x_TD, weight_ED, *_: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0]),
    composed=linear,
)
def normed_linear(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """`linear(x, weight, bias)`, [T, E]: `norm_linear` without a norm."""
    return linear.on_cpu[x_TD.dtype](x_TD, weight_ED, bias_E)


@operator(
    cuda="kernels:norm_gate_up",
    fake=lambda x_TD, norm_D, weight_ED, *_: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0] // 2),
    composed=lambda x_TD, norm_D, weight_ED, eps, weight_offset=0.0, activation=SILU: silu_mul(
        linear(rms_norm(x_TD, norm_D, eps, weight_offset), weight_ED), activation
    ),
)
def norm_gate_up(
    x_TD: Tensor, norm_D: Tensor, weight_ED: Tensor, eps: float, weight_offset: float = 0.0, activation: str = SILU
) -> Tensor:
    """`silu_mul(linear(rms_norm(x, norm, eps, weight_offset), weight), activation)`, [T, F]; the weight is [2F, D],
    gate rows first."""
    normed_TD = rms_norm.on_cpu[x_TD.dtype](x_TD, norm_D, eps, weight_offset)
    return silu_mul.on_cpu[x_TD.dtype](linear.on_cpu[x_TD.dtype](normed_TD, weight_ED), activation)


@operator(
    cuda="kernels:gate_up",
    fake=lambda x_TD, weight_ED, *_: x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0] // 2),
    composed=lambda x_TD, weight_ED, activation=SILU: silu_mul(linear(x_TD, weight_ED), activation),
)
def gate_up(x_TD: Tensor, weight_ED: Tensor, activation: str = SILU) -> Tensor:
    """`silu_mul(linear(x, weight), activation)`, [T, F]: `norm_gate_up` without a norm."""
    return silu_mul.on_cpu[x_TD.dtype](linear.on_cpu[x_TD.dtype](x_TD, weight_ED), activation)


@operator(
    cuda="kernels:linear_add",
    fake=lambda x_TK, weight_NK, *_: x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0]),
    composed=lambda x_TK, weight_NK, residual_TN, bias_N=None: residual_TN + linear(x_TK, weight_NK, bias_N),
)
def linear_add(x_TK: Tensor, weight_NK: Tensor, residual_TN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`residual + linear(x, weight, bias)`, [T, N]: both the product with its bias and the sum are rounded."""
    return linear.on_cpu[x_TK.dtype](x_TK, weight_NK, bias_N).add_(residual_TN)


def _per_head_backward(ctx, grad_TNM: Tensor):
    x_TNK, weight_NMK = ctx.saved_tensors
    grad_x_TNK = per_head_linear(grad_TNM, weight_NMK.transpose(1, 2))
    grad_w_MNK = per_head_linear(grad_TNM.permute(2, 1, 0), x_TNK.permute(1, 2, 0))  # contracts the tokens
    return grad_x_TNK, grad_w_MNK.transpose(0, 1)


@operator(
    cuda="triton:per_head_linear",
    fake=lambda x_TNK, weight_NMK: x_TNK.new_empty(*x_TNK.shape[:2], weight_NMK.shape[1]),
    backward=_per_head_backward,
)
def per_head_linear(x_TNK: Tensor, weight_NMK: Tensor) -> Tensor:
    """`x[:, n] @ weight[n].T` for each head n, [T, N, M] in x's dtype; each head has the bits of `linear`. Either may
    be a view with any strides, such as one projection's rows of a fused weight."""
    (tokens, heads, _), columns = x_TNK.shape, weight_NMK.shape[1]
    out_TNM = x_TNK.new_empty(tokens, heads, columns)
    for n in range(heads):
        out_TNM[:, n] = linear(x_TNK[:, n], weight_NMK[n])
    return out_TNM
