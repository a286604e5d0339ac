"""The operators on a CPU in C, for float32; other dtypes, and machines without a compiler, take the reference path.

The two paths agree closely but not bit for bit, so a process stays on one. Functions have the names, arguments and
meanings of the reference's; the expressions are in the C sources.

Shape suffixes as in `rows.py`, `attention.py` and `logprobs_reference.py`.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from ..logprobs import reference as logprobs_reference
from ..records import Rotation
from . import library

THREAD_WORK = 1 << 25  # multiplications that are worth a thread
TILE = 64  # keys that attention takes at a time (product.h)


def usable(*tensors: Tensor) -> bool:
    """Whether this path takes these tensors."""
    if library.current is None:
        return False
    for tensor in tensors:  # noqa: SIM110 (all() takes twice the time, and every call comes through here)
        if tensor.dtype is not torch.float32:
            return False
    return True


def _pointer(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Address of a contiguous tensor's data, which the caller keeps alive; None for None."""
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        raise TypeError(f"expected a contiguous {dtype} tensor, got {tensor.dtype} with strides {tensor.stride()}")
    return tensor.data_ptr()


def linear(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """See `linear.operator.linear`."""
    assert x_TK.shape[1] == weight_NK.shape[1]
    return _product(x_TK, weight_NK.contiguous(), True, weight_NK.shape[0])


def matmul(a_RD: Tensor, b_DC: Tensor) -> Tensor:
    """`a @ b`; a may be transposed."""
    assert a_RD.shape[1] == b_DC.shape[0]
    return _product(a_RD, b_DC.contiguous(), False, b_DC.shape[1])


def _product(a_RD: Tensor, b: Tensor, transposed: bool, columns: int) -> Tensor:
    """`a @ b`, or `a @ b.T`."""
    (rows, dim), out = a_RD.shape, a_RD.new_empty(a_RD.shape[0], columns)
    addresses = out.data_ptr(), a_RD.data_ptr(), b.data_ptr()
    job = library.ProductArguments(*addresses, *a_RD.stride(), b.shape[1], transposed, rows, columns, dim)
    if not _run("product", job, rows * columns * dim):
        raise MemoryError(f"product of {rows} x {dim} and {dim} x {columns}")
    return out


def _run(name: str, job: ctypes.Structure, work: int) -> bool:
    """Do a job on as many threads as its work (multiplications) is worth; whether it succeeded."""
    function, address = getattr(library.current, name), ctypes.addressof(job)
    threads = min(torch.get_num_threads(), work // THREAD_WORK)
    if threads <= 1 or library.team is None:
        function(address)
    else:
        library.team(ctypes.cast(function, ctypes.c_void_p), address, threads, 0)
    return not job.error


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See `norm.operator.rms_norm`."""
    x_TD = x_TD.contiguous()
    out, dim = torch.empty_like(x_TD), x_TD.shape[-1]
    assert weight_D.shape == (dim,)
    library.current.rms_norm(out.data_ptr(), x_TD.data_ptr(), _pointer(weight_D), x_TD.numel() // dim, dim, eps)
    return out


def qk_norm_rope(
    qkv_TE: Tensor,
    by: Rotation,
) -> Tensor:
    """See `rope.operator.qk_norm_rope`."""
    qkv_TE = qkv_TE.contiguous()
    (tokens, width), head_dim, heads = qkv_TE.shape, by.cos_sin_TH.shape[1], by.num_heads + by.num_kv_heads
    assert by.cos_sin_TH.shape[0] == tokens and heads * head_dim <= width
    assert all(w is None or w.shape == (head_dim,) for w in (by.q_weight_H, by.k_weight_H))
    out = qkv_TE.new_empty(tokens, heads, head_dim)
    library.current.qk_norm_rope(
        out.data_ptr(),
        qkv_TE.data_ptr(),
        *map(_pointer, by[:3]),
        tokens,
        width,
        by.num_heads,
        by.num_kv_heads,
        head_dim,
        by.eps,
    )
    return out


def rope_table(positions_T: Tensor, inv_freq: Tensor) -> Tensor:
    """See `rope.operator.rope_table`."""
    positions_T, tokens, half = positions_T.contiguous(), positions_T.shape[0], inv_freq.shape[0]
    out = inv_freq.new_empty(tokens, 2 * half)
    address = _pointer(positions_T, torch.int64)
    library.current.rope_table(out.data_ptr(), address, _pointer(inv_freq), tokens, half)
    return out


def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul`."""
    gate_up_TE = gate_up_TE.contiguous()
    rows, width = gate_up_TE.shape
    out = gate_up_TE.new_empty(rows, width // 2)
    library.current.silu_mul(out.data_ptr(), gate_up_TE.data_ptr(), rows, width // 2)
    return out


def silu_mul_backward(grad_TF: Tensor, gate_up_TE: Tensor) -> Tensor:
    """See `activation.operator.silu_mul_backward`."""
    grad_TF, gate_up_TE = grad_TF.contiguous(), gate_up_TE.contiguous()
    out, (rows, width) = torch.empty_like(gate_up_TE), grad_TF.shape
    assert gate_up_TE.shape == (rows, 2 * width)
    library.current.silu_mul_backward(out.data_ptr(), grad_TF.data_ptr(), gate_up_TE.data_ptr(), rows, width)
    return out


def write_kv(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    """See `attention.operator.write_kv`."""
    k_TKH, v_TKH, slots_T = _head_rows(k_TKH), _head_rows(v_TKH), slots_T.contiguous()
    tokens, kv_heads, head_dim = k_TKH.shape
    assert v_TKH.shape == k_TKH.shape and slots_T.shape == (tokens,)
    assert v_cache.shape == k_cache.shape and k_cache.shape[2:] == (kv_heads, head_dim)
    slots, size = k_cache.shape[0] * k_cache.shape[1], 4  # bytes of a float
    error = library.current.write_kv(
        k_TKH.data_ptr(),
        v_TKH.data_ptr(),
        _pointer(k_cache),
        _pointer(v_cache),
        _pointer(slots_T, torch.int64),
        tokens,
        slots,
        k_TKH.stride(0) * size,
        v_TKH.stride(0) * size,
        kv_heads * head_dim * size,
    )
    if error:
        raise IndexError(f"write_kv: slots lie outside the cache's {slots}")


def packed(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cu_seqlens: Tensor,
    prefix_start_S: Tensor,
    prefix_len_S: Tensor,
    max_len: int,
) -> Tensor:
    """See `attention.operator.attention_packed`."""
    context_len_S = prefix_len_S + cu_seqlens.diff()
    k_TKH, v_TKH = _head_rows(k_TKH), _head_rows(v_TKH)
    start_S = prefix_start_S.contiguous()
    return _attention(q_TNH, k_TKH, v_TKH, cu_seqlens.contiguous(), context_len_S, start_S, None, 0, max_len)


def paged(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    max_context_len: int,
) -> Tensor:
    """See `attention.operator.attention_paged`."""
    k, v, page_size = k_cache.contiguous(), v_cache.contiguous(), k_cache.shape[1]
    cu_seqlens, context_len_S, table = cu_seqlens.contiguous(), context_len_S.contiguous(), block_table.contiguous()
    return _attention(q_TNH, k, v, cu_seqlens, context_len_S, None, table, page_size, max_context_len)


def _head_rows(x_TKH: Tensor) -> Tensor:
    """With the heads of a row side by side; rows may lie apart."""
    return x_TKH if x_TKH.stride()[1:] == (x_TKH.shape[2], 1) else x_TKH.contiguous()


def _attention(
    q_TNH: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_len_S: Tensor,
    prefix_start_S: Tensor | None,
    block_table: Tensor | None,
    page_size: int,
    max_len: int,
) -> Tensor:
    q_TNH = _head_rows(q_TNH)
    (tokens, heads, head_dim), sequences = q_TNH.shape, context_len_S.shape[0]
    *rows, kv_heads, _ = k.shape
    assert v.shape == k.shape == (*rows, kv_heads, head_dim) and heads % kv_heads == 0
    assert cu_seqlens.shape == (sequences + 1,)
    assert all(x is None or x.shape[0] == sequences for x in (prefix_start_S, block_table))
    out = q_TNH.new_empty(tokens, heads, head_dim)
    job = library.AttentionArguments(
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
        _pointer(cu_seqlens, torch.int32),
        _pointer(context_len_S, torch.int32),
        _pointer(prefix_start_S, torch.int32),
        _pointer(block_table, torch.int32),
        page_size,
        0 if block_table is None else block_table.shape[1],
    )
    keys = -(-max_len // TILE) * TILE
    if not _run("attention", job, 4 * tokens * heads * head_dim * keys):  # the softmax takes as long as the products
        raise IndexError("attention: a sequence, page or prefix lies outside its table")
    return out


def statistics(
    logits_CV: Tensor,
    temperature_C: Tensor,
    top_k_C: Tensor,
    top_p_C: Tensor,
    min_p_C: Tensor,
    support_CB: Tensor | None,
    truncated: bool,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `logprobs.reference.statistics`; the search for the threshold is the reference's."""
    rows, vocabulary = logits_CV.shape
    threshold_C = torch.full_like(temperature_C, -torch.inf)
    if truncated and support_CB is None:
        z_CV = logits_CV / logprobs_reference.divisor(temperature_C).unsqueeze(1)
        threshold_C = logprobs_reference.support_threshold(z_CV, top_k_C, top_p_C, min_p_C)
    lse_C, sampled_lse_C = torch.empty_like(temperature_C), torch.empty_like(temperature_C)
    entropy_C = torch.zeros_like(temperature_C)
    assert temperature_C.shape == threshold_C.shape == (rows,)
    assert support_CB is None or support_CB.shape == (rows, (vocabulary + 7) // 8)
    library.current.statistics(
        lse_C.data_ptr(),
        sampled_lse_C.data_ptr(),
        entropy_C.data_ptr() if with_entropy else None,
        _pointer(logits_CV),
        _pointer(temperature_C),
        _pointer(threshold_C),
        _pointer(support_CB, torch.uint8),
        rows,
        vocabulary,
        (vocabulary + 7) // 8,
    )
    return lse_C, sampled_lse_C, threshold_C, entropy_C


def scores(
    logits_CV: Tensor, targets_C: Tensor, temperature_C: Tensor, lse_C: Tensor, sampled_lse_C: Tensor
) -> tuple[Tensor, Tensor]:
    """See `logprobs.reference.scores`."""
    rows, vocabulary = logits_CV.shape
    assert targets_C.shape == temperature_C.shape == lse_C.shape == sampled_lse_C.shape == (rows,)
    sampled_C, model_C = torch.empty_like(lse_C), torch.empty_like(lse_C)
    if library.current.scores(
        sampled_C.data_ptr(),
        model_C.data_ptr(),
        _pointer(logits_CV),
        _pointer(targets_C, torch.int64),
        _pointer(temperature_C),
        _pointer(lse_C),
        _pointer(sampled_lse_C),
        rows,
        vocabulary,
    ):
        raise IndexError(f"a target is outside the vocabulary of {vocabulary}")
    return sampled_C, model_C


def draw(
    logits_CV: Tensor, temperature_C: Tensor, threshold_C: Tensor, key_C4: Tensor, position_C: Tensor, greedy: bool
) -> Tensor:
    """See `logprobs.reference.draw`."""
    rows, vocabulary = logits_CV.shape
    assert key_C4.shape == (rows, 4) and temperature_C.shape == threshold_C.shape == position_C.shape == (rows,)
    token_C = torch.empty_like(position_C)
    library.current.draw(
        token_C.data_ptr(),
        _pointer(logits_CV),
        _pointer(temperature_C),
        _pointer(threshold_C),
        _pointer(key_C4, torch.int64),
        _pointer(position_C, torch.int64),
        rows,
        vocabulary,
    )
    return token_C
