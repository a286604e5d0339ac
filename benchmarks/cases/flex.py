"""Flex attention and native attention with windows, sinks and a soft cap: whether rows keep their bits in every layout,
and what each costs.

Flex stands beside native attention without a window, at one model's heads; native attention with a window beside flex
with the same and beside itself without, at the heads of several. Times are of CUDA graphs, forward, forward with
backward, and decoding over pages in shuffled order; the lists of tiles of flex, which all layers share, are timed
apart. The floor is reading and writing each tensor once, or the products of the keys that are seen. On a CPU sizes are
small, and the figures mean nothing but that everything runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from common import Report
from ops_common import DEVICE, ON_GPU, Bench, normal
from torch import Tensor

from lockstep import ops
from lockstep.models.init import architecture

PAGE = 64
WORDS = {2: torch.int16, 4: torch.int32}
ROWS = 64  # that are decoded to be compared
Shape = tuple[int, int, int]  # query heads, key heads, head dim

# Flex: sequences and their length; native: lengths, tokens packed, and tokens cached, over which one is decoded each.
FLEX_SIZES = (((40, 245), (16, 2048)), ((40, 245), (256, 1024))) if ON_GPU else (((3, 70),), ((3, 70),))
FLEX_WINDOWS = (0, 128) if ON_GPU else (0, 20)
SHAPES = ("32,8,128", "8,4,256", "64,8,64") if ON_GPU else ("4,2,16",)  # Mistral 7B's, Gemma 3 4B's, gpt-oss 20B's
LENGTHS = (8192, 32768) if ON_GPU else (150,)
TOKENS, CACHED = (32768, 262144) if ON_GPU else (300, 450)
WINDOWS = (1024, 4096) if ON_GPU else (40,)
CAP = 50.0


@dataclass(frozen=True)
class Native:
    """The operator of native attention, of one kind of scores."""

    scores: ops.AttentionScores = ops.PLAIN

    def packed(self, by: ops.Packed, shape: Shape, tokens: int) -> Callable[..., Tensor]:
        return lambda q, k, v, *sinks: ops.attention_packed(q, k, v, by, self._with(*sinks))

    def paged(self, by: ops.Paged, shape: Shape, cache: ops.KVPages, rows: int) -> Callable[[Tensor], Tensor]:
        return lambda q: ops.attention_paged(q, cache, by, ops.NO_GROUPS, self.scores)

    def _with(self, *sinks: Tensor) -> ops.AttentionScores:
        return self.scores._replace(sinks_N=sinks[0]) if sinks else self.scores


@dataclass(frozen=True)
class Flex:
    """The operator of flex attention, whose lists of tiles are made before."""

    window: int = 0

    def packed(self, by: ops.Packed, shape: Shape, tokens: int) -> Callable[..., Tensor]:
        mask = ops.FlexMask(self.window, "", self.packed_lists(by, shape, tokens))
        return lambda q, k, v: ops.flex_packed(q, k, v, by, mask)

    def paged(self, by: ops.Paged, shape: Shape, cache: ops.KVPages, rows: int) -> Callable[[Tensor], Tensor]:
        mask = ops.FlexMask(self.window, "", self.paged_lists(by, shape, cache, rows))
        return lambda q: ops.flex_paged(q, cache, by, mask)

    def packed_lists(self, by: ops.Packed, shape: Shape, tokens: int) -> list[Tensor]:
        return ops.flex_tiles_packed(by, ops.FlexSizes(tokens, *shape[:2]), self.window)

    def paged_lists(self, by: ops.Paged, shape: Shape, cache: ops.KVPages, rows: int) -> list[Tensor]:
        return ops.flex_tiles_paged(by, ops.FlexSizes(rows, *shape[:2]), cache.k_cache, self.window)


class Layer:
    """One layer's queries, keys and values of sequences of one length, packed."""

    def __init__(self, shape: Shape, batch: int, length: int) -> None:
        self.shape, self.batch, self.length = shape, batch, length
        heads, kv_heads, dim = shape
        self.q, self.k, self.v = (normal(batch * length, n, dim) for n in (heads, kv_heads, kv_heads))
        self.grad = torch.randn_like(self.q)
        self.bytes = 2 * (self.q.nbytes + self.k.nbytes)
        zeros = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        self.by = ops.Packed(starts, zeros, zeros, length)

    def flops(self, window: int) -> int:
        return 4 * self.batch * keys_seen(self.length, window) * self.shape[0] * self.shape[2]

    def call(self, how: Native | Flex, backward: bool) -> Callable[[], object]:
        """Of the operator, with its gradients or without."""
        sinks = how.scores.sinks_N if isinstance(how, Native) else None
        given = (self.q, self.k, self.v, *([] if sinks is None else [sinks]))
        leaves, attend = [x.detach().requires_grad_() for x in given], how.packed(self.by, self.shape, len(self.q))

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*leaves)

        return (lambda: torch.autograd.grad(attend(*leaves), leaves, self.grad)) if backward else forward

    @torch.no_grad()
    def different(self, how: Native | Flex) -> int:
        """Words of the first sequence's rows that differ from packed ones where each is decoded alone, and where the
        second chunk of a prompt is."""
        length, shape = self.length, self.shape
        q, k, v = (x[:length] for x in (self.q, self.k, self.v))
        whole = how.packed(ops.Packed(int32(0, length), int32(0), int32(0), length), shape, length)(q, k, v)
        cache, table = cached(length, 1, k, v)
        rows, cut = torch.randperm(length, device=DEVICE)[:ROWS], length // 3
        tables, steps = table.expand(len(rows), -1).contiguous(), torch.arange(len(rows) + 1, device=DEVICE).int()
        alone = ops.Paged(tables, steps, rows.int() + 1, 1, length)
        chunk = ops.Paged(table, int32(0, length - cut), int32(length), length - cut, length)
        return _differ(how.paged(alone, shape, cache, len(rows))(q[rows]), whole[rows]) + _differ(
            how.paged(chunk, shape, cache, length - cut)(q[cut:]), whole[cut:]
        )


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def keys_seen(length: int, window: int) -> int:
    """Pairs of a query and a key of one sequence."""
    within = min(window or length, length)
    return within * (within + 1) // 2 + (length - within) * within


def cached(length: int, sequences: int, k: Tensor, v: Tensor) -> tuple[ops.KVPages, Tensor]:
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
    return ops.KVPages(*caches), table.int()


def _differ(a: Tensor, b: Tensor) -> int:
    words = WORDS[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


Rivals = dict[str, Native | Flex]


def packed_case(bench: Bench, layer: Layer, name: str, ours: Native | Flex, rivals: Rivals, window: int) -> None:
    """Packed attention beside others, forward and with its gradients."""
    op, flops = type(ours).__name__.lower(), layer.flops(window)
    for backward, what in ((False, "forward"), (True, "forward, backward")):
        others = {rival: bench.time([layer.call(how, backward)]) for rival, how in rivals.items()}
        time, more = bench.time([layer.call(ours, backward)]), {} if backward else {"different": layer.different(ours)}
        work = (3 * layer.bytes, 3.5 * flops) if backward else (layer.bytes, flops)
        bench.add(op, f"{name} {what}", time, others, *work, **more)
    if isinstance(ours, Flex):
        given = layer.by, layer.shape, len(layer.q)
        if lists := ours.packed_lists(*given):
            time = bench.time([lambda: ours.packed_lists(*given)])
            bench.add(op, f"{name} lists of tiles, once a pass", time, {}, sum(x.nbytes for x in lists))


@torch.no_grad()
def decode_cases(
    bench: Bench, shape: Shape, batch: int, length: int, cases: dict[str, tuple[Native | Flex, Rivals, int]]
):
    """One query a sequence over `length` cached keys."""
    heads, kv_heads, dim = shape
    q, k, v = (normal(n, h, dim) for n, h in ((batch, heads), *[(batch * length, kv_heads)] * 2))
    cache, table = cached(length, batch, k, v)
    steps, context = torch.arange(batch + 1, device=DEVICE).int(), int32(*[length] * batch)
    given = ops.Paged(table, steps, context, 1, length), shape, cache, batch

    def time(how: Native | Flex) -> dict[str, float]:
        attend = how.paged(*given)
        return bench.time([lambda: attend(q)])

    for name, (ours, rivals, window) in cases.items():
        op = type(ours).__name__.lower()
        read = 2 * batch * min(window or length, length) * kv_heads * dim * k.element_size() + 2 * q.nbytes
        bench.add(op, name, time(ours), {rival: time(how) for rival, how in rivals.items()}, read)
        if isinstance(ours, Flex) and ON_GPU:
            lists = bench.time([lambda ours=ours: ours.paged_lists(*given)])
            bench.add(op, f"{name} lists of tiles, once a step", lists, {})


def of_flex(bench: Bench, shape: Shape, report: Report) -> None:
    """Flex beside native attention without a window."""
    for window in FLEX_WINDOWS:
        suffix = f", window {window}" if window else ""
        for batch, length in FLEX_SIZES[0]:
            given = f"{batch}x{length}{suffix}", Flex(window), {"native": Native()}, window
            packed_case(bench, Layer(shape, batch, length), *given)
            report.save()
        for batch, length in FLEX_SIZES[1]:
            cases = {f"decode {batch}x{length}{suffix}": (Flex(window), {"native": Native()}, window)}
            decode_cases(bench, shape, batch, length, cases)
            report.save()


def of_native(bench: Bench, shape: Shape, length: int) -> None:
    """Native attention with each window, beside flex with it and itself without; sinks and the cap once."""
    heads, name = shape[0], ",".join(map(str, shape))
    layer, least = Layer(shape, max(TOKENS // length, 1), length), WINDOWS[0]

    def rivals(window: int) -> Rivals:
        return {"native, no window": Native()} | ({"flex": Flex(window)} if shape[2] <= 128 else {})

    windows = {w: Native(ops.AttentionScores(window=w)) for w in WINDOWS}
    for window, how in windows.items():
        packed_case(bench, layer, f"{name} {layer.batch}x{length}, window {window}", how, rivals(window), window)
    special = {"sinks": ops.AttentionScores(normal(heads), least), "cap": ops.AttentionScores(None, least, 0.0, CAP)}
    for what, scores in special.items():
        given = f"{name} {layer.batch}x{length}, window {least}, {what}", Native(scores)
        packed_case(bench, layer, *given, {"native, no window": Native()}, least)
    batch = max(CACHED // length, 1)
    cases = {f"{name} decode {batch}x{length}, window {w}": (how, rivals(w), w) for w, how in windows.items()}
    decode_cases(bench, shape, batch, length, cases)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=["flex", "native"], nargs="+", default=["flex", "native"])
    parser.add_argument("--arch", default="qwen3-0.6b" if ON_GPU else "tiny", help="whose heads flex is timed at")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="query heads,key heads,head dim of native layers")


def measure(args: argparse.Namespace, report: Report) -> int:
    torch.manual_seed(0)
    bench, c = Bench(args.repeats), architecture(args.arch)
    report.figures |= {"arch": args.arch, "page_size": PAGE, "records": bench.records}
    if "flex" in args.only:
        of_flex(bench, (c.num_heads, c.num_kv_heads, c.head_dim), report)
    for text in args.shapes if "native" in args.only else ():
        heads, kv_heads, dim = map(int, text.split(","))
        for length in LENGTHS:
            of_native(bench, (heads, kv_heads, dim), length)
            report.save()
    report.tables.append(bench.table())
    different = {r["case"]: r["different"] for r in bench.records if "different" in r}
    report.notes.append(f"words of decoded rows and second chunks that differ from packed ones: {different}")
    return sum(different.values())
