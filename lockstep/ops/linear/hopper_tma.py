"""Matrix products whose tiles are copied by TMA and multiplied by `wgmma`: contract C1, for 8 rows and more.

With a few dozen rows, reading the weights takes less time than reading the rows, from the L2 cache, in every program.
Here one thread requests a whole tile, so a program can afford wide tiles, and there are fewer programs.

TMA is slow for rows that are out of bounds. So a block consists of two pieces, which overlap if there are fewer rows
than both hold; they are repeated if a block is larger still, and the last block begins early. Rows that are multiplied
twice have the same bits. With few rows, this kernel is for narrow weights, of which a program has little to read but
the whole chain of MMAs to compute. GATED, ADD and what `hopper_async` says of loading weights early hold here too.

Shape suffixes: M rows, N columns of the result, K depth.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import pdl
from ..records import PLAIN_EPILOGUE, Epilogue, peer_arguments
from .choice import Choice, Kind
from .hopper_common import (
    add_bias,
    apply_gate_rounded,
    barrier,
    loads_weights_early,
    operands,
    store_to_peers,
)
from .hopper_common import supports as supports

_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # depends on Triton's version
WEIGHTS, PIECES = gl.NVMMASharedLayout(128, 16, 2), gl.NVMMASharedLayout(128, 16, 4)


@gluon.jit
def _start_weights_copy(w, columns, first_n, k, tiles, stage, ready, GATED: gl.constexpr):
    """Start loading a step's weights; if GATED, both halves."""
    if GATED:
        _copy(w, [first_n, k], ready, tiles.index(2 * stage))
        _copy(w, [columns + first_n, k], ready, tiles.index(2 * stage + 1))
    else:
        _copy(w, [first_n, k], ready, tiles.index(stage))


@gluon.jit(do_not_specialize=["rows", "ahead", "rank"])
def _tma_kernel(
    x,  # [BLOCK_M // (2 * PIECE), 2, max(rows - PIECE, PIECE), DEPTH]: the rows, and those a piece later; repeated
    w,  # [columns, DEPTH], or [2 * columns, DEPTH] if GATED
    residual_ptr,  # [rows, columns], read if ADD
    out_ptr,  # [rows, columns], contiguous
    bias_ptr,  # [columns], or None
    rows,
    columns,
    residual_stride,
    ahead,  # load weights before the previous kernel has ended
    DEPTH: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,  # of the gate
    ADD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
    addresses_ptr=None,  # where the result is stored for other ranks
    state_ptr=None,
    rank=0,
    RANKS: gl.constexpr = 1,
):
    warps: gl.constexpr = gl.num_warps()
    steps: gl.constexpr = DEPTH // BLOCK_K
    lead: gl.constexpr = min(STAGES - 1, steps)
    parts: gl.constexpr = 2 if GATED else 1
    size: gl.constexpr = 2 * BLOCK_K * (BLOCK_M + parts * BLOCK_N)
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    pieces: gl.constexpr = BLOCK_M // (2 * PIECE)
    blocks_m = gl.cdiv(rows, BLOCK_M)
    first_m = min(gl.program_id(0) % blocks_m * BLOCK_M, max(rows - BLOCK_M, 0))
    first_n = gl.program_id(0) // blocks_m * BLOCK_N
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, pieces, 2, PIECE, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES * parts, BLOCK_N, BLOCK_K], w.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    if PDL:
        if RANKS == 1:
            pdl.gdc_launch_dependents()
        if ahead == 0:
            pdl.gdc_wait()
    for i in gl.static_range(lead):
        mbarrier.expect(ready.index(i), size)
        _start_weights_copy(w, columns, first_n, i * BLOCK_K, w_tiles, i, ready.index(i), GATED)
    if PDL:
        pdl.gdc_wait()
        if RANKS > 1:
            pdl.gdc_launch_dependents()  # the kernel that takes the words, see `push/triton`
    for i in gl.static_range(lead):
        _copy(x, [0, 0, first_m, i * BLOCK_K], ready.index(i), x_tiles.index(i))
    vector: gl.constexpr = 4 if RANKS > 1 else 8
    lanes: gl.constexpr = max(1, min(BLOCK_N // vector, 32 // vector))
    rowwise: gl.constexpr = gl.BlockedLayout([1, vector], [32 // lanes, lanes], [warps, 1], [1, 0])
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, rowwise))
    own = m < 2 * PIECE  # not repeated
    m = first_m + m // PIECE * min(PIECE, rows - PIECE) + m % PIECE
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, rowwise))
    exists = own & (m < rows)
    inside = gl.expand_dims(exists, 1) & gl.expand_dims(n < columns, 0)
    if ADD:
        at = residual_ptr + m.to(gl.int64)[:, None] * residual_stride + n[None, :]
        residual = gl.load(at, mask=inside, other=0.0)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=result)
    up = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=result)
    for step in range(steps):
        stage = step % STAGES
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        tile, weights = x_tiles.index(stage).reshape((BLOCK_M, BLOCK_K)), w_tiles.index(parts * stage)
        acc = hopper.warpgroup_mma(tile, weights.permute((1, 0)), acc, is_async=True)
        if GATED:
            weights = w_tiles.index(parts * stage + 1)
            up = hopper.warpgroup_mma(tile, weights.permute((1, 0)), up, is_async=True)
            acc, up = hopper.warpgroup_mma_wait(2, deps=(acc, up))
        else:
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
        barrier()  # all warps have multiplied the previous step's tiles, which may now be overwritten
        after = step + lead
        if after < steps:
            free = after % STAGES
            mbarrier.expect(ready.index(free), size)
            _start_weights_copy(w, columns, first_n, after * BLOCK_K, w_tiles, free, ready.index(free), GATED)
            _copy(x, [0, 0, first_m, after * BLOCK_K], ready.index(free), x_tiles.index(free))
    if GATED:
        acc, up = hopper.warpgroup_mma_wait(0, deps=(acc, up))
        value = gl.convert_layout(apply_gate_rounded(acc, up, ACTIVATION, dtype), rowwise)
    else:
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
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
    """As `hopper_async.run`, with blocks of 64 or 128 rows and at least two steps and stages."""
    x_MK, out_MN, residual = operands(kind, x_MK, weight_NK, residual_MN)
    (rows, depth), columns = x_MK.shape, out_MN.shape[1]
    piece = min(choice.block_m // 2, 1 << (rows.bit_length() - 1))  # two pieces cover all rows of a block
    assert depth % choice.block_k == 0 and depth > choice.block_k and choice.num_stages > 1
    further = min(piece, rows - piece) * x_MK.stride(0)
    shape = choice.block_m // (2 * piece), 2, max(rows - piece, piece), depth
    pieces = x_MK.as_strided(shape, (0, further, *x_MK.stride()))
    _tma_kernel[(triton.cdiv(rows, choice.block_m) * triton.cdiv(columns, choice.block_n),)](
        TensorDescriptor.from_tensor(pieces, [shape[0], 2, piece, choice.block_k], PIECES),
        TensorDescriptor.from_tensor(weight_NK, [choice.block_n, choice.block_k], WEIGHTS), residual, out_MN,
        epilogue.contiguous_bias, rows, columns, residual.stride(0), loads_weights_early(kind),
        DEPTH=depth, GATED=kind == "norm_gate_up", ACTIVATION=epilogue.activation, ADD=residual_MN is not None,
        BLOCK_M=choice.block_m, PIECE=piece, BLOCK_N=choice.block_n, BLOCK_K=choice.block_k, STAGES=choice.num_stages,
        **pdl.options(x_MK, num_warps=choice.num_warps), **peer_arguments(epilogue.peers),
    )  # fmt: skip
    return out_MN
