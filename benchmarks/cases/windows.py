"""Windows, sinks and a soft cap in native attention: beside flex with the same window and native attention without one.

Forward, forward with backward, and decoding over pages in shuffled order; and how many words of decoded rows and of a
second chunk differ from packed ones, which must be none. The floor is that of the keys that are seen. On a CPU sizes
are small, and the figures mean nothing but that everything runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from cases.flex import PAGE, WORDS, cached, int32, keys_seen
from common import Report
from ops_common import DEVICE, ON_GPU, Bench, normal
from torch import Tensor

from lockstep import ops

SHAPES = ("32,8,128", "8,4,256", "64,8,64") if ON_GPU else ("4,2,16",)  # Mistral 7B's, Gemma 3 4B's, gpt-oss 20B's
LENGTHS = (8192, 32768) if ON_GPU else (150,)
TOKENS, SEQUENCES = (32768, 262144) if ON_GPU else (300, 450)  # packed; cached, over which one is decoded each
WINDOWS = (1024, 4096) if ON_GPU else (40,)
ROWS = 64  # that are decoded to be compared
CAP = 50.0

Call = Callable[[], object]


class Layer:
    """One layer's queries, keys and values of sequences of one length, packed and in pages."""

    def __init__(self, shape: tuple[int, int, int], batch: int, length: int) -> None:
        self.shape, self.batch, self.length = shape, batch, length
        heads, kv_heads, dim = shape
        self.q, self.k, self.v = (normal(batch * length, n, dim) for n in (heads, kv_heads, kv_heads))
        zeros = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        self.by = ops.Packed(starts, zeros, zeros, length)

    def leaves(self, scores: ops.AttentionScores) -> list[Tensor]:
        """What is differentiated."""
        given = (self.q, self.k, self.v, *([] if scores.sinks_N is None else [scores.sinks_N]))
        return [x.detach().requires_grad_() for x in given]

    def native(self, scores: ops.AttentionScores, backward: bool) -> Call:
        """A call of the operator, with its gradients or without."""
        leaves, grad = self.leaves(scores), torch.randn_like(self.q)
        own = scores if len(leaves) == 3 else scores._replace(sinks_N=leaves[3])
        return _call(lambda: ops.attention_packed(*leaves[:3], self.by, own), leaves, grad, backward)

    def flex(self, window: int, backward: bool) -> Call:
        """The same of flex attention."""
        leaves, grad = self.leaves(ops.PLAIN), torch.randn_like(self.q)
        sizes = ops.FlexSizes(len(self.q), *self.shape[:2])
        mask = ops.FlexMask(window, "", ops.flex_tiles_packed(self.by, sizes, window))
        return _call(lambda: ops.flex_packed(*leaves, self.by, mask), leaves, grad, backward)

    def different(self, scores: ops.AttentionScores) -> int:
        """Words of the first sequence's decoded rows and of its second chunk that differ from packed ones."""
        q, k, v = (x[: self.length] for x in (self.q, self.k, self.v))
        by = ops.Packed(int32(0, self.length), int32(0), int32(0), self.length)
        whole = ops.attention_packed(q, k, v, by, scores)
        caches, table = cached(self.length, 1, k, v)
        rows = torch.randperm(self.length, device=DEVICE)[:ROWS]
        tables, steps = table.expand(len(rows), -1).contiguous(), torch.arange(len(rows) + 1, device=DEVICE).int()
        decoding = ops.Paged(tables, steps, rows.int() + 1, 1, self.length)
        decoded = ops.attention_paged(q[rows], ops.KVPages(*caches), decoding, ops.ALONE, scores)
        cut = self.length // 3
        rest = self.length - cut
        chunk = ops.Paged(table, int32(0, rest), int32(self.length), rest, self.length)
        found = ops.attention_paged(q[cut:], ops.KVPages(*caches), chunk, ops.ALONE, scores)
        return _differ(decoded, whole[rows]) + _differ(found, whole[cut:])


def _call(attend: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor, backward: bool) -> Call:
    def forward() -> Tensor:
        with torch.no_grad():
            return attend()

    return (lambda: torch.autograd.grad(attend(), leaves, grad)) if backward else forward


def _differ(a: Tensor, b: Tensor) -> int:
    words = WORDS[a.element_size()]
    return int((a.contiguous().view(words) != b.contiguous().view(words)).sum())


def packed_cases(bench: Bench, shape: tuple[int, int, int], length: int) -> None:
    """Packed attention with each window, and without; sinks and the cap once."""
    heads, _, dim = shape
    layer = Layer(shape, max(TOKENS // length, 1), length)
    name = f"{heads},{shape[1]},{dim} {layer.batch}x{length}"
    moved = 2 * (layer.q.nbytes + layer.k.nbytes)
    sinks, window = normal(heads), WINDOWS[0]
    special = {"sinks": ops.AttentionScores(sinks, window), "cap": ops.AttentionScores(None, window, 0.0, CAP)}
    cases = {f"window {w}": ops.AttentionScores(window=w) for w in WINDOWS} | {
        f"window {window}, {what}": scores for what, scores in special.items()
    }
    for backward in (False, True):
        without = bench.time([layer.native(ops.PLAIN, backward)])
        for case, scores in cases.items():
            others = {"native, no window": without}
            if scores == ops.AttentionScores(window=scores.window) and dim <= 128:
                others["flex"] = bench.time([layer.flex(scores.window, backward)])
            ours = bench.time([layer.native(scores, backward)])
            flops = 4 * layer.batch * keys_seen(length, scores.window) * heads * dim * (3.5 if backward else 1)
            what, more = ("forward, backward", {}) if backward else ("forward", {"different": layer.different(scores)})
            bench.add("native", f"{name}, {case} {what}", ours, others, moved * (3 if backward else 1), flops, **more)


@torch.no_grad()
def decode_cases(bench: Bench, shape: tuple[int, int, int], length: int) -> None:
    """One query a sequence over `length` cached keys."""
    heads, kv_heads, dim = shape
    batch = max(SEQUENCES // length, 1)
    q, k, v = (normal(n, h, dim) for n, h in ((batch, heads), *[(batch * length, kv_heads)] * 2))
    caches, table = cached(length, batch, k, v)
    steps, context = torch.arange(batch + 1, device=DEVICE).int(), int32(*[length] * batch)
    by, cache = ops.Paged(table, steps, context, 1, length), ops.KVPages(*caches)

    def native(scores: ops.AttentionScores) -> Call:
        return lambda: ops.attention_paged(q, cache, by, ops.ALONE, scores)

    without = bench.time([native(ops.PLAIN)])
    for window in WINDOWS:
        tiles = ops.flex_tiles_paged(by, ops.FlexSizes(len(q), heads, kv_heads), caches[0], window)
        mask = ops.FlexMask(window, "", tiles)
        others = {"native, no window": without}
        if dim <= 128:
            others["flex"] = bench.time([lambda mask=mask: ops.flex_paged(q, cache, by, mask)])
        read = 2 * batch * min(window, length) * kv_heads * dim * k.element_size() + 2 * q.nbytes
        ours = bench.time([native(ops.AttentionScores(window=window))])
        case = f"{heads},{kv_heads},{dim} decode {batch}x{length}, window {window}"
        bench.add("native", case, ours, others, read)


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="query heads,key heads,head dim of each layer")


def measure(args: argparse.Namespace, report: Report) -> int:
    torch.manual_seed(0)
    bench = Bench(args.repeats)
    report.figures |= {"page_size": PAGE, "records": bench.records}
    for text in args.shapes:
        heads, kv_heads, dim = map(int, text.split(","))
        for length in LENGTHS:
            packed_cases(bench, (heads, kv_heads, dim), length)
            report.save()
            decode_cases(bench, (heads, kv_heads, dim), length)
            report.save()
    report.tables.append(bench.table())
    different = {r["case"]: r["different"] for r in bench.records if "different" in r}
    report.notes.append(f"words of decoded rows and second chunks that differ from packed ones: {different}")
    return sum(different.values())
