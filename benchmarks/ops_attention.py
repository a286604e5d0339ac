"""The attention section of the case `ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ops_common import DEVICE, ON_GPU, Bench, error, normal
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep import ops
from lockstep.models.config import ModelConfig

LIBRARIES = (
    {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    if ON_GPU
    else {"torch": SDPBackend.MATH}
)
REFERENCE = next(iter(LIBRARIES.values()))  # whose error stands beside ours
ACCURACY_LENGTH = 512  # of the sequences whose gradients are compared with float64's
PACKED = ((40, 245), (16, 2048), (2, 16384)) if ON_GPU else ((3, 40),)  # sequences, length
DECODED = ((1, 4096), (1, 8192), (8, 1200), (16, 8192), (40, 245), (256, 1024)) if ON_GPU else ((3, 40),)
SHARED = (32, 8, 1024, 1088) if ON_GPU else (2, 2, 32, 48)  # groups, samples, shared and all keys


def attention(bench: Bench, models: dict[str, ModelConfig]) -> None:
    """Packed attention, forward and with its backward, and decoding over pages, against FlashAttention-2 and cuDNN."""
    for name, c in models.items():
        for batch, length in PACKED:
            packed_case(bench, f"{name} packed {batch}x{length}", c, batch, length)
        for batch, length in DECODED:
            decode_case(bench, f"{name} decode {batch}x{length}", c, batch, length)
        groups, samples, shared, _ = SHARED
        shared_case(bench, f"{name} decode {groups} groups of {samples}, {shared} shared", c, *SHARED)


def sdpa(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def packed_case(bench: Bench, case: str, c: ModelConfig, batch: int, length: int) -> None:
    """Causal attention of sequences of one length."""
    q, k, v = (
        normal(batch * length, n, c.head_dim).requires_grad_() for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    )
    zeros = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=DEVICE)
    grad = normal(*q.shape)

    def ours() -> Tensor:
        return ops.attention_packed(q, k, v, ops.Packed(cu_seqlens, zeros, zeros, length))

    batched = [
        x.detach().view(batch, length, *x.shape[1:]).transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)
    ]

    def varlen() -> Tensor:
        flash = torch.ops.aten._flash_attention_forward.default
        return flash(q, k, v, cu_seqlens, cu_seqlens, length, length, 0.0, True, False)[0]

    def varlen_both() -> object:
        return torch.autograd.grad(varlen(), (q, k, v), grad)

    batched_grad = grad.view(batch, length, *grad.shape[1:]).transpose(1, 2).contiguous()
    exact = sdpa(SDPBackend.MATH, *(x[:1, :, :512].detach().double() for x in batched), True).transpose(1, 2)[0]
    others, both = {}, {}
    if ON_GPU:
        others["FlashAttention-2 varlen"] = bench.time([varlen])
        both["FlashAttention-2 varlen"] = bench.time([varlen_both])
    for library, kernel in LIBRARIES.items():
        others[library] = bench.time([lambda kernel=kernel: sdpa(kernel, *batched, True)])
        both[library] = bench.time(
            [lambda kernel=kernel: torch.autograd.grad(sdpa(kernel, *batched, True), batched, batched_grad)]
        )
    with torch.no_grad():
        torch_s = sdpa(REFERENCE, *batched, True).transpose(1, 2)[0]
        errors = {"error": error(ours()[: len(exact)], exact), "torch_error": error(torch_s[: len(exact)], exact)}
    flops = 2 * 2 * batch * length * (length + 1) / 2 * c.num_heads * c.head_dim
    moved = 2 * (q.nbytes + k.nbytes)
    bench.add("attention", f"{case} forward", bench.time([ours]), others, moved, flops, **errors)

    def run() -> object:
        return torch.autograd.grad(ours(), (q, k, v), grad)

    errors = gradient_errors(c, min(length, ACCURACY_LENGTH))
    bench.add("attention", f"{case} forward and backward", bench.time([run]), both, 3 * moved, 3.5 * flops, **errors)


def gradient_errors(c: ModelConfig, length: int) -> dict[str, float]:
    """Of the gradients for queries, keys and values of two sequences, the largest."""
    leaves = [normal(2 * length, n, c.head_dim).requires_grad_() for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    grad = normal(2 * length, c.num_heads, c.head_dim)
    zeros = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    cu_seqlens = torch.arange(0, 3 * length, length, dtype=torch.int32, device=DEVICE)

    def library(kernel: SDPBackend, *rows: Tensor) -> Tensor:
        batched = (x.view(2, length, *x.shape[1:]).transpose(1, 2) for x in rows)
        return sdpa(kernel, *batched, True).transpose(1, 2).reshape(2 * length, *rows[0].shape[1:])

    doubles = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(library(SDPBackend.MATH, *doubles), doubles, grad.double())
    ours = torch.autograd.grad(
        ops.attention_packed(*leaves, ops.Packed(cu_seqlens, zeros, zeros, length)), leaves, grad
    )
    theirs = torch.autograd.grad(library(REFERENCE, *leaves), leaves, grad)
    return {
        name: max(error(a, e) for a, e in zip(found, exact, strict=True))
        for name, found in (("error", ours), ("torch_error", theirs))
    }


def decode_case(bench: Bench, case: str, c: ModelConfig, batch: int, length: int) -> None:
    """One query a sequence over `length` cached keys, pages permuted; the libraries' caches are contiguous."""
    page, heads, kv, dim = 16, c.num_heads, c.num_kv_heads, c.head_dim
    pages = -(-length // page)
    caches = [normal(batch * pages, page, kv, dim) for _ in range(2)]
    table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    q, steps = normal(batch, heads, dim), torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)

    def ours() -> Tensor:
        return ops.attention_paged(q, ops.KVPages(*caches), ops.Paged(table, steps, lengths, 1, length))

    kv_rows = [x[table.long()].flatten(1, 2)[:, :length].transpose(1, 2).contiguous() for x in caches]
    queries = q.unsqueeze(2)
    others = {n: bench.time([lambda b=b: sdpa(b, queries, *kv_rows, False)]) for n, b in LIBRARIES.items()}
    exact = sdpa(SDPBackend.MATH, *(x[:1].double() for x in (queries, *kv_rows)), False)[:, :, 0]
    torch_s = sdpa(REFERENCE, queries, *kv_rows, False)[:1, :, 0]
    errors = {"error": error(ours()[:1], exact), "torch_error": error(torch_s, exact)}
    bench.add("attention", case, bench.time([ours]), others, 2 * batch * length * kv * dim * 2 + 2 * q.nbytes, **errors)


def shared_case(bench: Bench, case: str, c: ModelConfig, groups: int, samples: int, shared: int, length: int) -> None:
    """Decoding with groups' first pages read once, beside the same pages read by every sequence."""
    page, heads, kv, dim, batch = 16, c.num_heads, c.num_kv_heads, c.head_dim, groups * samples
    own = -(-(length - shared) // page)
    first = torch.arange(groups * (shared // page), device=DEVICE).view(groups, -1).repeat_interleave(samples, 0)
    rest = first.max() + 1 + torch.arange(batch * own, device=DEVICE).view(batch, own)
    table = torch.cat((first, rest), 1).int()
    caches = [normal(int(table.max()) + 1, page, kv, dim) for _ in range(2)]
    q, steps = normal(batch, heads, dim), torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    members = torch.arange(batch, dtype=torch.int32, device=DEVICE).view(groups, samples)
    shared_len = torch.full((batch,), shared, dtype=torch.int32, device=DEVICE)

    def run(*group: Tensor) -> Tensor:
        return ops.attention_paged(
            q, ops.KVPages(*caches), ops.Paged(table, steps, lengths, 1, length), ops.PrefixGroups(*group)
        )

    assert torch.equal(run(), run(members, shared_len))
    others = {"ours, ungrouped": bench.time([run])}
    moved = 2 * 2 * kv * dim * (groups * shared + batch * (length - shared)) + 2 * q.nbytes
    bench.add("attention", case, bench.time([lambda: run(members, shared_len)]), others, moved)
