"""The CPU operators in C, for float32; other dtypes, and machines without a compiler, take the reference path.

The two paths agree closely but not bit for bit, so a process stays on one. Functions have the reference's names,
arguments and semantics; the expressions are in the C sources.

Shape suffixes as in the operators and in `logprobs.reference`.
"""

from __future__ import annotations

import ctypes
import math
from functools import partial

import torch
from torch import Tensor

from ..logprobs import reference as logprobs_reference
from ..records import (
    ACTIVATIONS,
    NO_GROUPS,
    PLAIN,
    SILU,
    AttentionScores,
    Filters,
    KVPages,
    Packed,
    Paged,
    PrefixGroups,
    Rotation,
    RowStatistics,
    SampleKeys,
)
from . import library

FLOAT, LONG = torch.float32, torch.int64
THREAD_WORK = 1 << 24  # multiplications that are worth a thread
ELEMENT, EXPONENTIAL = 32, 96  # cost of an element, without and with an exponential, in a product's multiplications
TILE = 64  # keys that attention takes at a time (product.h)


def _addresses(*tensors: Tensor | torch.dtype | None) -> list[int]:
    """Data addresses of contiguous tensors; 0 for None. A dtype among the arguments is required of the tensors after
    it, float32 of the first ones. The caller keeps the tensors alive."""
    dtype, addresses = FLOAT, []
    for x in tensors:
        if x is None:
            addresses.append(0)
        elif isinstance(x, torch.dtype):
            dtype = x
        elif x.dtype is dtype and x.is_contiguous():
            addresses.append(x.data_ptr())
        else:
            raise TypeError(f"expected a contiguous {dtype} tensor, got {x.dtype} with strides {x.stride()}")
    return addresses


def linear(a_RD: Tensor, b: Tensor, bias: Tensor | None = None, transposed: bool = True) -> Tensor:
    """`a @ b.T + bias`, or `a @ b + bias` if not `transposed`; a may have any strides. See `linear.operator.linear`."""
    b, (rows, dim), (columns, stride) = b.contiguous(), a_RD.shape, b.shape
    if not a_RD.dtype is b.dtype is FLOAT:
        raise TypeError(f"expected tensors of {FLOAT}, got {a_RD.dtype} and {b.dtype}")
    columns, inner = (columns, stride) if transposed else (stride, columns)
    assert dim == inner
    out = a_RD.new_empty(rows, columns)
    at = out.data_ptr(), a_RD.data_ptr(), b.data_ptr()
    if not _run_job("product", rows * columns * dim, *at, *a_RD.stride(), stride, transposed, rows, columns, dim):
        raise MemoryError(f"product of {rows} x {dim} and {dim} x {columns}")
    return out if bias is None else out.add_(bias)


matmul = partial(linear, transposed=False)


def _run_job(name: str, work: int, *arguments: float) -> bool:
    """Run a job of `library.JOBS` with these arguments, on as many threads as its work (multiplications) is worth;
    return whether it succeeded."""
    make, pack, error = library.JOBS[name]
    job, function = make(pack(*arguments)), getattr(library.current, name)
    threads = 1 if work < 2 * THREAD_WORK else min(torch.get_num_threads(), work // THREAD_WORK)
    if threads == 1 or library.openmp_parallel is None:
        function(ctypes.addressof(job))
    else:
        library.openmp_parallel(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(job), threads, 0)
    return job[error] == b"\0"


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    if weight_offset:
        weight_D = weight_D + weight_offset
    x_TD = x_TD.contiguous()
    out, elements, dim = torch.empty_like(x_TD), x_TD.numel(), x_TD.shape[-1]
    assert weight_D.shape == (dim,)
    _run_job("rms_norm", ELEMENT * elements, eps, elements // dim, dim, *_addresses(out, x_TD, weight_D))
    return out


def qk_norm_rope(qkv_TE: Tensor, rotation: Rotation, weight_offset: float = 0.0) -> Tensor:
    if weight_offset and rotation.q_weight_H is not None and rotation.k_weight_H is not None:
        weights = rotation.q_weight_H + weight_offset, rotation.k_weight_H + weight_offset
        rotation = rotation._replace(q_weight_H=weights[0], k_weight_H=weights[1])
    qkv_TE = qkv_TE.contiguous()
    (tokens, width), head_dim = qkv_TE.shape, rotation.cos_sin_TH.shape[1]
    heads = rotation.num_heads + rotation.num_kv_heads
    assert rotation.cos_sin_TH.shape[0] == tokens and heads * head_dim <= width
    for weight_H in rotation[:2]:
        assert weight_H is None or weight_H.shape == (head_dim,)
    out = qkv_TE.new_empty(tokens, heads, head_dim)
    sizes = tokens, width, rotation.num_heads, rotation.num_kv_heads, head_dim
    addresses = _addresses(out, qkv_TE, *rotation[:3])
    _run_job("qk_norm_rope", ELEMENT * out.numel(), rotation.eps, *sizes, *addresses)
    return out


def rotate_back(grad_TNH: Tensor, cos_sin_TH: Tensor, out_TE: Tensor) -> None:
    """Undo the rotation of `qk_norm_rope` in the gradient, and write it to the first columns of `out`."""
    grad_TNH = grad_TNH.contiguous()
    tokens, heads, head_dim = grad_TNH.shape
    assert cos_sin_TH.shape == (tokens, head_dim) and out_TE.shape[0] == tokens and out_TE.shape[1] >= heads * head_dim
    sizes, at = (tokens, out_TE.shape[1], heads, head_dim), _addresses(out_TE, grad_TNH, cos_sin_TH)
    _run_job("rotate_back", ELEMENT * grad_TNH.numel(), 0.0, *sizes, *at)


def norm_backward(x_TE: Tensor, weight_NH: Tensor, grad_TNH: Tensor, eps: float, out_TE: Tensor) -> Tensor:
    """Gradients of RMSNorm over each of N heads, which are the first columns of x. That for x is written to the same
    columns of `out`; that for the weights, per row and head, is returned, [T, N, H]. Means over rows are torch's."""
    grad_TNH = grad_TNH.contiguous()
    tokens, heads, head_dim = grad_TNH.shape
    width, work = heads * head_dim, ELEMENT * grad_TNH.numel()
    assert weight_NH.shape == (heads, head_dim) and x_TE.shape[0] == out_TE.shape[0] == tokens
    assert x_TE.shape[1] >= width and out_TE.shape[1] >= width
    x_TNH = x_TE[:, :width].view(tokens, heads, head_dim)
    rstd = torch.rsqrt((x_TNH * x_TNH).mean(-1, keepdim=True) + eps)
    product, grad_weight = torch.empty_like(grad_TNH), torch.empty_like(grad_TNH)
    inputs, sizes = (x_TE, weight_NH, grad_TNH, rstd), (x_TE.shape[1], heads, head_dim)
    _run_job("norm_products", work, 0.0, tokens, *sizes, *_addresses(product, grad_weight, *inputs))
    mean = product.mean(-1, keepdim=True)
    _run_job("norm_gradient", work, 0.0, tokens, out_TE.shape[1], *sizes, *_addresses(out_TE, *inputs, mean))
    return grad_weight


def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    positions_T, tokens, half = positions_T.contiguous(), positions_T.shape[0], inv_freq.shape[0]
    out = inv_freq.new_empty(tokens, 2 * half)
    library.current.rope_table(*_addresses(out, LONG, positions_T, FLOAT, inv_freq), tokens, half)
    return out


def silu_mul(gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    gate_up_TE = gate_up_TE.contiguous()
    rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    out = gate_up_TE.new_empty(rows, width)
    sizes = rows, width, ACTIVATIONS.index(activation)
    _run_job("silu_mul", EXPONENTIAL * rows * width, 0.0, *sizes, *_addresses(out, gate_up_TE))
    return out


def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor, activation: str = SILU) -> Tensor:
    grad_TF, gate_up_TE = grad_TF.contiguous(), gate_up_TE.contiguous()
    out, (rows, width) = torch.empty_like(gate_up_TE), grad_TF.shape
    assert gate_up_TE.shape == (rows, 2 * width)
    sizes = rows, width, ACTIVATIONS.index(activation)
    _run_job("silu_mul_backward", EXPONENTIAL * rows * width, 0.0, *sizes, *_addresses(out, grad_TF, gate_up_TE))
    return out


def write_kv(k_TKH: Tensor, v_TKH: Tensor, cache: KVPages, slots_T: Tensor) -> None:
    (k_TKH, v_TKH), slots_T = _head_rows(k_TKH, v_TKH), slots_T.contiguous()
    tokens, kv_heads, head_dim = k_TKH.shape
    pages, page_size, *heads = cache.k_cache.shape
    assert v_TKH.shape == k_TKH.shape and slots_T.shape == (tokens,)
    assert cache.v_cache.shape == cache.k_cache.shape and heads == [kv_heads, head_dim]
    size = 4  # bytes of a float
    error = library.current.write_kv(
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        *_addresses(*cache, LONG, slots_T),
        tokens,
        pages * page_size,
        k_TKH.stride(0) * size,
        v_TKH.stride(0) * size,
        kv_heads * head_dim * size,
    )
    if error:
        raise IndexError(f"write_kv: slots lie outside the cache's {pages * page_size}")


def packed(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, layout: Packed, scores: AttentionScores = PLAIN) -> Tensor:
    context_len_S = layout.prefix_len_S + layout.cu_seqlens.diff()
    at = layout.cu_seqlens.contiguous(), context_len_S, layout.prefix_start_S.contiguous(), None
    return _attention(q_TNH, k_TKH, v_TKH, at, layout.max_len, scores)


def paged(
    q_TNH: Tensor, cache: KVPages, layout: Paged, _: PrefixGroups = NO_GROUPS, scores: AttentionScores = PLAIN
) -> Tensor:
    at = layout.cu_seqlens.contiguous(), layout.context_len_S.contiguous(), None, layout.block_table.contiguous()
    return _attention(q_TNH, cache.k_cache.contiguous(), cache.v_cache.contiguous(), at, layout.max_context_len, scores)


def _head_rows(*tensors: Tensor) -> list[Tensor]:
    """Float32 [..., K, H] each, with the heads of a row contiguous; rows may have any stride."""
    for x in tensors:
        if x.dtype is not FLOAT:
            raise TypeError(f"expected tensors of {FLOAT}, got {x.dtype}")
    return [x if x.stride()[-2:] == (x.shape[-1], 1) else x.contiguous() for x in tensors]


def _attention(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    at: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    max_len: int,
    scores: AttentionScores,
) -> Tensor:
    """`at`: int32 cu_seqlens, context lengths, and the starts of packed sequences' prefixes or a block table."""
    cu_seqlens, context_len_S, prefix_start_S, block_table = at
    q_TNH, k, v = _head_rows(q_TNH, k, v)
    (tokens, heads, head_dim), sequences = q_TNH.shape, context_len_S.shape[0]
    *rows, kv_heads, _ = k.shape
    assert v.shape == k.shape == (*rows, kv_heads, head_dim) and heads % kv_heads == 0
    assert cu_seqlens.shape == (sequences + 1,)
    assert prefix_start_S is None or prefix_start_S.shape[0] == sequences
    assert block_table is None or block_table.shape[0] == sequences
    assert scores.sinks_N is None or scores.sinks_N.shape == (heads,)
    out = q_TNH.new_empty(tokens, heads, head_dim)
    *layout, sinks = _addresses(torch.int32, *at, FLOAT, scores.sinks_N)
    arguments = (
        out.data_ptr(),
        q_TNH.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q_TNH.stride(0),
        k.stride(-3),
        v.stride(-3),
        tokens,
        math.prod(rows),
        sequences,
        heads,
        kv_heads,
        head_dim,
        *layout,
        *((0, 0) if block_table is None else (k.shape[1], block_table.shape[1])),
        sinks,
        scores.window,
        scores.scale or 1 / math.sqrt(head_dim),
        scores.softcap,
    )
    keys = -(-min(max_len, scores.window or max_len) // TILE) * TILE
    work = 4 * tokens * heads * head_dim * keys  # the softmax takes as long as the products
    if not _run_job("attention", work, *arguments):
        raise IndexError("attention: a sequence, page or prefix lies outside its table")
    return out


def statistics(
    logits_CV: Tensor, filters: Filters, support_CB: Tensor | None, truncated: bool, with_entropy: bool
) -> RowStatistics:
    """See `logprobs.reference.statistics`; the search for the threshold is the reference's."""
    (rows, vocabulary), temperature_C = logits_CV.shape, filters.temperature_C
    threshold_C = torch.full_like(temperature_C, -torch.inf)
    if truncated and support_CB is None:
        z_CV = logits_CV / logprobs_reference.divisor(temperature_C).unsqueeze(1)
        threshold_C = logprobs_reference.support_threshold(z_CV, *filters[1:])
    lse_C, sampled_lse_C = torch.empty_like(temperature_C), torch.empty_like(temperature_C)
    entropy_C = torch.zeros_like(temperature_C)
    assert temperature_C.shape == threshold_C.shape == (rows,)
    assert support_CB is None or support_CB.shape == (rows, (vocabulary + 7) // 8)
    written = lse_C, sampled_lse_C, entropy_C if with_entropy else None
    at = _addresses(*written, logits_CV, temperature_C, threshold_C, torch.uint8, support_CB)
    library.current.statistics(*at, rows, vocabulary, (vocabulary + 7) // 8)
    return RowStatistics(lse_C, sampled_lse_C, threshold_C, entropy_C)


def scores(logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, stats: RowStatistics) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits_CV.shape
    assert targets_C.shape == temperature_C.shape == stats.lse_C.shape == stats.sampled_lse_C.shape == (rows,)
    sampled_C, model_C = torch.empty_like(stats.lse_C), torch.empty_like(stats.lse_C)
    at = _addresses(sampled_C, model_C, logits_CV, LONG, targets_C, FLOAT, temperature_C, *stats[:2])
    if library.current.scores(*at, rows, vocabulary):
        raise IndexError(f"a target is outside the vocabulary of {vocabulary}")
    return sampled_C, model_C


def draw(logits_CV: Tensor, temperature_C: Tensor, threshold_C: Tensor, keys: SampleKeys, greedy: bool) -> Tensor:
    rows, vocabulary = logits_CV.shape
    assert keys.key_C4.shape == (rows, 4)
    assert temperature_C.shape == threshold_C.shape == keys.position_C.shape == (rows,)
    token_C = torch.empty_like(keys.position_C)
    at = _addresses(LONG, token_C, FLOAT, logits_CV, temperature_C, threshold_C, LONG, *keys)
    library.current.draw(*at, rows, vocabulary)
    return token_C
