"""Attention's inputs in the layouts of both roles, and how its kernels are timed. Head shapes are Qwen3-0.6B's where a
caller does not say otherwise.

Values have wide exponents, N(0, 1) * exp(2 N(0, 1)), so that a change in the order of additions shows.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from values import int32

from lockstep import ops

DEVICE = "cuda"
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
PEAK_TFLOPS = 790  # measured bfloat16 matrix products of one H200, whose arithmetic is an H100's
READ_GBPS = 4400 if torch.cuda.is_available() and "H200" in torch.cuda.get_device_name() else 3000  # measured


def qkv_rows(
    rows: int, heads: int = HEADS, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys as views of one buffer, values of another, as the model hands them over."""
    qk = torch.randn(rows, heads + kv_heads, head_dim, device=DEVICE).bfloat16()
    v = torch.randn(rows, kv_heads, head_dim, device=DEVICE)
    return qk[:, :heads], qk[:, heads:], (v * torch.exp(2 * torch.randn_like(v))).bfloat16()


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Segments without shared prefixes; rows left over are padding."""
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(DEVICE, torch.int32)
    zeros = torch.zeros(len(lengths), dtype=torch.int32, device=DEVICE)
    return ops.attention_packed(q, k, v, ops.Packed(cu_seqlens, zeros, zeros, max(lengths)))


def cache_of(x: Tensor, table: Tensor, page_size: int) -> Tensor:
    """One sequence in the pages of its block table; everything else in the cache is NaN."""
    cache = torch.full((int(table.max()) + 2, page_size, *x.shape[1:]), torch.nan, dtype=x.dtype, device=DEVICE)
    position = torch.arange(len(x), device=DEVICE)
    cache[table[position // page_size].long(), position % page_size] = x
    return cache


def paged_chunks(q: Tensor, k: Tensor, v: Tensor, page_size: int, cuts: list[int]) -> Tensor:
    """A sequence's queries in chunks that end at `cuts`; a chunk's cache holds the keys up to its end and then NaN."""
    chunks = []
    pages = -(-len(q) // page_size)
    table = torch.randperm(2 * pages, device=DEVICE)[:pages].int()
    for start, end in zip([0, *cuts], cuts, strict=False):
        caches = (cache_of(x[:end], table, page_size) for x in (k, v))
        arguments = (table.unsqueeze(0), int32(0, end - start), int32(end), end - start, end)
        chunks.append(ops.attention_paged(q[start:end], ops.KVPages(*caches), ops.Paged(*arguments)))
    return torch.cat(chunks)


def decoded(q: Tensor, k: Tensor, v: Tensor, page_size: int, rows: list[int], *groups: Tensor) -> Tensor:
    """A sequence's queries at `rows` as one batch of single tokens, each with its own context."""
    table = torch.randperm(-(-len(k) // page_size), device=DEVICE).int()
    caches = [cache_of(x, table, page_size) for x in (k, v)]
    tables, starts = table.expand(len(rows), -1).contiguous(), torch.arange(len(rows) + 1, device=DEVICE).int()
    return ops.attention_paged(
        q[rows], ops.KVPages(*caches), ops.Paged(tables, starts, int32(*rows) + 1, 1, len(k)), ops.PrefixGroups(*groups)
    )


def capture(function: Callable, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [function() for _ in range(calls)]
    return graph, results[-1]


def milliseconds(function: Callable, repeats: int) -> float:
    """The best of `repeats`, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])


def captured_milliseconds(function: Callable, calls: int = 10) -> float:
    """One call of several in a CUDA graph."""
    graph, _ = capture(function, calls)
    return milliseconds(graph.replay, 5) / calls
