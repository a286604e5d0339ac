"""Flex attention beside native attention: whether rows keep their bits in both layouts, and what each costs.

Times are of CUDA graphs, forward, forward with backward, and decoding over pages of 64 in shuffled order; the lists of
tiles, which all layers share, are timed apart. The floor is reading and writing each tensor once, or the products of
the keys that are seen. On a CPU sizes are small, and the figures mean nothing but that everything runs.
"""

from __future__ import annotations

import argparse

import torch
from common import Report
from ops_common import DEVICE, ON_GPU, Bench, normal
from torch import Tensor

from lockstep import ops
from lockstep.models import ModelConfig
from lockstep.models.init import architecture

PAGE = 64
PACKED = ((40, 245), (16, 2048)) if ON_GPU else ((3, 70),)  # sequences, length
DECODED = ((40, 245), (256, 1024)) if ON_GPU else ((3, 70),)
WINDOWS = (0, 128) if ON_GPU else (0, 20)
WORDS = {2: torch.int16, 4: torch.int32}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def keys_seen(length: int, window: int) -> int:
    """Pairs of a query and a key of one sequence."""
    within = min(window or length, length)
    return within * (within + 1) // 2 + (length - within) * within


def packed_case(bench: Bench, c: ModelConfig, batch: int, length: int, window: int) -> None:
    """Sequences of one length, packed."""
    tokens = batch * length
    q, k, v = (normal(tokens, n, c.head_dim).requires_grad_() for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
    zeros, grad = torch.zeros(batch, dtype=torch.int32, device=DEVICE), normal(*q.shape)
    starts = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=DEVICE)
    by, sizes = ops.Packed(starts, zeros, zeros, length), ops.FlexSizes(tokens, c.num_heads, c.num_kv_heads)

    def lists() -> list[Tensor]:
        return ops.flex_tiles_packed(by, sizes, window)

    tiles = lists()

    def flex() -> Tensor:
        return ops.flex_packed(q, k, v, by, ops.FlexMask(window, "", tiles))

    def native() -> Tensor:
        return ops.attention_packed(q, k, v, by)

    case = f"{batch}x{length}" + (f", window {window}" if window else "")
    flops = 4 * batch * keys_seen(length, window) * c.num_heads * c.head_dim
    moved, different = 2 * (q.nbytes + k.nbytes), packed_differences(c, q, k, v, length, window)
    with torch.no_grad():
        others = {"native": bench.time([native])}
        bench.add("flex", f"{case} forward", bench.time([flex]), others, moved, flops, different=different)

    def both(attention: object) -> object:
        return torch.autograd.grad(attention(), (q, k, v), grad)  # type: ignore[operator]

    others = {"native": bench.time([lambda: both(native)])}
    bench.add("flex", f"{case} forward, backward", bench.time([lambda: both(flex)]), others, 3 * moved, 3.5 * flops)
    if tiles:
        sizes = sum(x.nbytes for x in tiles)
        bench.add("flex", f"{case} lists of tiles, once a pass", bench.time([lists]), {}, sizes)


@torch.no_grad()
def packed_differences(c: ModelConfig, q: Tensor, k: Tensor, v: Tensor, length: int, window: int) -> int:
    """Words of the first sequence's rows that differ when each is decoded alone."""
    q, k, v = (x[:length] for x in (q, k, v))
    by = ops.Packed(int32(0, length), int32(0), int32(0), length)
    tiles = ops.flex_tiles_packed(by, ops.FlexSizes(length, c.num_heads, c.num_kv_heads), window)
    whole = ops.flex_packed(q, k, v, by, ops.FlexMask(window, "", tiles))
    caches, table = cached(length, 1, k, v)
    rows = torch.randperm(length, device=DEVICE)[:64]
    tables, steps = table.expand(len(rows), -1).contiguous(), torch.arange(len(rows) + 1, device=DEVICE).int()
    out = decoded(c, q[rows], caches, ops.Paged(tables, steps, rows.int() + 1, 1, length), window)()
    words = WORDS[q.element_size()]
    return int((out.view(words) != whole[rows].contiguous().view(words)).sum())


def cached(length: int, sequences: int, k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """Keys and values [sequences * length, K, H] in shuffled pages, and the block tables."""
    pages = -(-length // PAGE)
    table = torch.randperm(sequences * pages, device=DEVICE).view(sequences, pages)
    position = torch.arange(length, device=DEVICE)
    slots = (table[:, position // PAGE] * PAGE + position % PAGE).flatten()
    caches = []
    for x in (k, v):
        cache = x.new_zeros(sequences * pages * PAGE, *x.shape[1:])
        cache[slots] = x
        caches.append(cache.unflatten(0, (-1, PAGE)))
    return caches, table.int()


def decoded(c: ModelConfig, q: Tensor, caches: list[Tensor], by: ops.Paged, window: int):
    """A call that attends with one query a sequence."""
    tiles = ops.flex_tiles_paged(by, ops.FlexSizes(len(q), c.num_heads, c.num_kv_heads), caches[0], window)
    return lambda: ops.flex_paged(q, ops.KVPages(*caches), by, ops.FlexMask(window, "", tiles))


@torch.no_grad()
def decode_case(bench: Bench, c: ModelConfig, batch: int, length: int, window: int) -> None:
    """One query a sequence over `length` cached keys."""
    q, k, v = (normal(n, h, c.head_dim) for n, h in ((batch, c.num_heads), *[(batch * length, c.num_kv_heads)] * 2))
    caches, table = cached(length, batch, k, v)
    steps, context = torch.arange(batch + 1, device=DEVICE).int(), int32(*[length] * batch)
    by = ops.Paged(table, steps, context, 1, length)
    run = decoded(c, q, caches, by, window)
    others = {"native": bench.time([lambda: ops.attention_paged(q, ops.KVPages(*caches), by)])}
    read = 2 * batch * min(window or length, length) * c.num_kv_heads * c.head_dim * k.element_size() + 2 * q.nbytes
    case = f"decode {batch}x{length}" + (f", window {window}" if window else "")
    bench.add("flex", case, bench.time([run]), others, read)
    if ON_GPU:
        lists = by, ops.FlexSizes(len(q), c.num_heads, c.num_kv_heads), caches[0], window
        bench.add("flex", f"{case} lists of tiles, once a step", bench.time([lambda: ops.flex_tiles_paged(*lists)]), {})


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="qwen3-0.6b" if ON_GPU else "tiny", help="whose heads to take")


def measure(args: argparse.Namespace, report: Report) -> int:
    torch.manual_seed(0)
    bench, c = Bench(args.repeats), architecture(args.arch)
    report.figures |= {"arch": args.arch, "page_size": PAGE, "records": bench.records}
    for window in WINDOWS:
        for batch, length in PACKED:
            packed_case(bench, c, batch, length, window)
            report.save()
        for batch, length in DECODED:
            decode_case(bench, c, batch, length, window)
            report.save()
    report.tables.append(bench.table())
    different = {r["case"]: r["different"] for r in bench.records if "different" in r}
    report.notes.append(f"words of decoded rows that differ from packed ones: {different}")
    return sum(different.values())
