"""`AttentionScores` as the attention kernels see them: constants, which generate no code where a layer lacks them.

WINDOW is the window. With a soft cap, FACTOR is the scale divided by the cap: products become tanh(product * FACTOR),
which a kernel then multiplies by `scale`, in this case the cap. Sinks join a row's state last, after its splits are
merged, in whichever kernel does that.

Shape suffixes: N query heads, M query rows of a program, L keys of a tile, T tokens, K kv heads, G query heads of one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..records import AttentionGradient, AttentionScores, Packed
from ..rows import LOG2_E


def score_arguments(scores: AttentionScores, head_dim: int) -> tuple[float, dict[str, Any]]:
    """`scale`, without log2(e), and a kernel's constants, with no entry for what the layer lacks."""
    scale = scores.scale or head_dim**-0.5
    constants: dict[str, Any] = {}
    if scores.window:
        constants["WINDOW"] = scores.window
    if scores.softcap:
        scale, constants["FACTOR"] = scores.softcap, scale / scores.softcap
    return scale, constants


def sink_arguments(scores: AttentionScores) -> dict[str, Tensor]:
    """The additional arguments of the kernels that finish a row."""
    return {} if scores.sinks_N is None else {"sinks_ptr": scores.sinks_N.contiguous()}


@triton.jit
def first_tile(position, WINDOW: tl.constexpr, BLOCK_L: tl.constexpr):
    """Where the first tile begins in which a query at `position` sees a key."""
    return tl.maximum(position - WINDOW + 1, 0) // BLOCK_L * BLOCK_L


@triton.jit
def tanh(x):
    """Cephes' `tanhf`."""
    z = x * x
    p = -5.70498872745e-3 * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2_E)) + 1.0)
    return tl.where(size < 0.625, p * z * x + x, tl.where(x < 0.0, -far, far))


@triton.jit
def add_sinks(state, sinks_ptr, head_M, inside_M):
    """The rows' state with their heads' sinks joined; a sink has no value."""
    shift_M, sum_M, acc_MH = state
    sink_M = tl.load(sinks_ptr + head_M, mask=inside_M, other=0.0).to(tl.float32) * LOG2_E
    new_M = tl.maximum(shift_M, sink_M)
    alpha_M = tl.exp2(shift_M - new_M)
    return new_M, sum_M * alpha_M + tl.exp2(sink_M - new_M), acc_MH * alpha_M[:, None]


def sinks_gradient(x: AttentionGradient, layout: Packed, sinks_N: Tensor, delta_KTG: Tensor) -> Tensor:
    """The gradient for the sinks, [N]: the sum over rows of a sink's probability times -delta."""
    kv_heads, tokens, group = delta_KTG.shape
    took_KTG = torch.exp2(sinks_N.float().view(kv_heads, 1, group) * math.log2(math.e) - x.lse_KTG)
    inside_T1 = (torch.arange(tokens, device=delta_KTG.device) < layout.cu_seqlens[-1]).unsqueeze(1)
    return torch.where(inside_T1, took_KTG * -delta_KTG, 0.0).sum(1).flatten().to(sinks_N.dtype)
