"""Matrix products that load weights while the previous kernel still runs: contract C1, for up to a few hundred rows.

A product of a decode step reads its weights, which no kernel before it writes, and its rows, which the previous kernel
writes. Launched early (`pdl`), a program here first requests the first stages of its weights, or all of them if they
fit, and only then waits. Between two kernels there remain only the loads of the rows, the chain of MMAs and the stores
of the result. Triton's pipeliner cannot separate the two kinds of loads; Gluon, the language below it, can.

Weights are loaded early only in a captured graph, and no graph that holds these products writes a weight (one that
gathers weights has the separate operators): whatever wrote it was complete before the graph began. Launched one by one,
a kernel waits first, and so does the kernel of a plain product, which any graph may hold.

GATED and ADD are those of `linear.triton`. Blocks of 16 rows use `mma.sync`, those of 64 or more `wgmma`, with the same
bits. A `wgmma` runs while the next tiles are requested.

Shape suffixes: M rows, N columns of the result, K depth.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from .. import pdl
from ..records import PLAIN_EPILOGUE, Epilogue, peer_arguments
from .choice import Choice, Kind
from .hopper_common import (
    WGMMA_ROWS,
    add_bias,
    apply_gate_rounded,
    barrier,
    loads_weights_early,
    operands,
    store_to_peers,
)
from .hopper_common import supports as supports

_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # depends on Triton's version

MIN_COPIED = 8  # the fewest rows that are copied: the period of the shared layouts


@gluon.jit
def _start_copy(
    to, ptr, stride, first, rows, start, BLOCK_R: gl.constexpr, BLOCK_K: gl.constexpr, PAIRED: gl.constexpr
):
    """Start loading `BLOCK_R` rows from `first` on, zeros past `rows`. PAIRED: each, then the one `rows` further on."""
    warps: gl.constexpr = gl.num_warps()
    lanes: gl.constexpr = min(BLOCK_K // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])
    r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(1, layout))
    k = start + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    if PAIRED:
        row = first + r // 2
        inside = row < rows
        row = row + (r % 2) * rows
    else:
        row = first + r
        inside = row < rows
    at = ptr + row.to(gl.int64)[:, None] * stride + k[None, :]
    _copy(to, at, mask=gl.expand_dims(inside, 1))


@gluon.jit
def _mma(a, b, acc):
    """`acc + a @ b.T` for tiles in shared memory."""
    left: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    return mma_v2(a.load(left), b.permute((1, 0)).load(right), acc)


@gluon.jit
def _start_wgmma(a, b, acc):
    """Begin the same asynchronously, by `wgmma`. The one begun before has completed in all warps, so its tiles may be
    overwritten."""
    hopper.fence_async_shared()
    barrier()
    acc = hopper.warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
    barrier()
    return acc


@gluon.jit(do_not_specialize=["rows", "ahead", "rank"])
def _async_kernel(
    x_ptr,  # [rows, DEPTH]
    w_ptr,  # [columns, DEPTH], or [2 * columns, DEPTH] if GATED
    residual_ptr,  # [rows, columns], read if ADD
    out_ptr,  # [rows, columns], contiguous
    bias_ptr,  # [columns], or None
    rows,
    columns,
    x_stride,
    w_stride,
    residual_stride,
    ahead,  # load weights before the previous kernel has ended
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,  # of the gate
    ADD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    COPIED: gl.constexpr,  # rows of a block that exist, rounded up to a power of two
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    WGMMA: gl.constexpr,
    PDL: gl.constexpr,
    addresses_ptr=None,  # where the result is stored for other ranks
    state_ptr=None,
    rank=0,
    RANKS: gl.constexpr = 1,
):
    warps: gl.constexpr = gl.num_warps()
    steps: gl.constexpr = DEPTH // BLOCK_K
    WIDE: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    if WGMMA:
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, WIDE, 16])
    else:
        shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        result: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, warps], [16, 8])
    x_lead: gl.constexpr = X_STAGES - 1  # steps by which the loads of rows run ahead
    w_lead: gl.constexpr = steps if steps <= W_STAGES else W_STAGES - 1
    gl.static_assert(x_lead >= 1 and w_lead >= min(x_lead, steps))  # waiting for a step's rows covers its weights
    blocks_m = gl.cdiv(rows, BLOCK_M)
    first_m, first_n = gl.program_id(0) % blocks_m * BLOCK_M, gl.program_id(0) // blocks_m * BLOCK_N
    w_shared = gl.allocate_shared_memory(dtype, [W_STAGES, WIDE, BLOCK_K], shared)
    if PDL:
        if RANKS == 1:
            pdl.gdc_launch_dependents()
        if ahead == 0:
            pdl.gdc_wait()
    for step in gl.static_range(w_lead):
        _start_copy(w_shared.index(step), w_ptr, w_stride, first_n, columns, step * BLOCK_K, WIDE, BLOCK_K, GATED)
    async_copy.commit_group()
    if PDL:
        pdl.gdc_wait()
        if RANKS > 1:
            pdl.gdc_launch_dependents()  # the kernel that takes the words, see `push/triton`
    x_shared = gl.allocate_shared_memory(dtype, [X_STAGES, BLOCK_M, BLOCK_K], shared)
    for step in gl.static_range(x_lead):
        if step < steps:
            to = x_shared.index(step).slice(0, COPIED, dim=0)
            _start_copy(to, x_ptr, x_stride, first_m, rows, step * BLOCK_K, COPIED, BLOCK_K, False)
        async_copy.commit_group()
    vector: gl.constexpr = 4 if RANKS > 1 else 8
    lanes: gl.constexpr = max(1, min(BLOCK_N // vector, 32 // vector))
    rowwise: gl.constexpr = gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])
    m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, rowwise))
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, rowwise))
    exists = m < rows
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(n < columns, 0)
    if ADD:
        at = residual_ptr + m.to(gl.int64)[:, None] * residual_stride + n[None, :]
        residual = gl.load(at, mask=inside, other=0.0)
    acc = gl.zeros([BLOCK_M, WIDE], gl.float32, layout=result)
    for step in range(steps):
        async_copy.wait_group(x_lead - 1)
        x, w = x_shared.index(step % X_STAGES), w_shared.index(step % W_STAGES)
        if WGMMA:
            acc = _start_wgmma(x, w, acc)
        if w_lead < steps:
            next_w = step + w_lead
            if next_w < steps:
                to_w = w_shared.index(next_w % W_STAGES)
                _start_copy(to_w, w_ptr, w_stride, first_n, columns, next_w * BLOCK_K, WIDE, BLOCK_K, GATED)
        if x_lead < steps:  # at compile time: Triton 3.6 fails on a branch that it finds dead only later
            next_x = step + x_lead
            if next_x < steps:
                to_x = x_shared.index(next_x % X_STAGES).slice(0, COPIED, dim=0)
                _start_copy(to_x, x_ptr, x_stride, first_m, rows, next_x * BLOCK_K, COPIED, BLOCK_K, False)
        async_copy.commit_group()
        if not WGMMA:
            acc = _mma(x, w, acc)
    if WGMMA:
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
    if GATED:
        gate, up = gl.split(gl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))
        value = gl.convert_layout(apply_gate_rounded(gate, up, ACTIVATION, dtype), rowwise)
    else:
        if bias_ptr is not None:
            acc = add_bias(acc, bias_ptr, first_n, columns)
        value = gl.convert_layout(acc.to(dtype), rowwise)
    if ADD:
        value = (residual.to(gl.float32) + value.to(gl.float32)).to(dtype)
    if RANKS > 1:
        store_to_peers(value, m, exists, first_n, columns, addresses_ptr, state_ptr, rank, RANKS)
    gl.store(out_ptr + m.to(gl.int64)[:, None] * columns + n[None, :], value, mask=inside)


def run(
    kind: Kind,
    choice: Choice,
    x_MK: Tensor,
    weight_NK: Tensor,
    residual_MN: Tensor | None = None,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> Tensor:
    """See `kernels.ProductKernel`; in bfloat16, with a depth that is a multiple of `choice.block_k`.

    Except for the plain product, the previous kernels must not write the weight, which a captured graph loads early.
    """
    x_MK, out_MN, residual = operands(kind, x_MK, weight_NK, residual_MN)
    (rows, depth), columns = x_MK.shape, out_MN.shape[1]
    copied = max(MIN_COPIED, triton.next_power_of_2(min(rows, choice.block_m)))
    _async_kernel[(triton.cdiv(rows, choice.block_m) * triton.cdiv(columns, choice.block_n),)](
        x_MK, weight_NK, residual, out_MN, epilogue.contiguous_bias, rows, columns, x_MK.stride(0), weight_NK.stride(0),
        residual.stride(0), loads_weights_early(kind),
        DEPTH=depth, GATED=kind == "norm_gate_up", ACTIVATION=epilogue.activation, ADD=residual_MN is not None,
        BLOCK_M=choice.block_m, BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, COPIED=copied, X_STAGES=choice.x_stages,
        W_STAGES=choice.num_stages, WGMMA=choice.block_m >= WGMMA_ROWS,
        **pdl.options(x_MK, num_warps=choice.num_warps), **peer_arguments(epilogue.peers),
    )  # fmt: skip
    return out_MN
