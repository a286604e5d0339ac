"""Measure which kernel computes each matrix product fastest, and write the table of this GPU (`lockstep/ops/tables`).

Everything runs in CUDA graphs over the weights of enough layers that none is left in the L2 cache. The products of a
decoder layer are tuned one after the other inside the whole layer (but for its attention), where kernels overlap. Plain
products are tuned alone; beside ours stands the faster of cuBLAS and cuBLASLt as torch calls them, free to split K,
which the contract forbids. With `--alone` so are a layer's, with one pipeline a tile: many models in a few minutes.

Started by torchrun, one process a GPU, it tunes layers that all of them share, with the pushes between products: a
kernel that asks for weights while words are on their way is worth more there than alone. What pushes cost is told by
the same layer whose words stay where they are.

An entry of the table serves a range of rows, and is measured at each number of them that graphs are made for. The
library's choice of kernels can be far off at single numbers (for 1,024 x 3,072 at exactly 48, 64 and 96), so it is
taken only where no multiple of eight in the range takes much longer than the others.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from cases.decode_layer import BANDWIDTH, DEVICE, DTYPE, EPS, Stack, contract, stock
from common import arguments, bandwidth, finish, graph_us, save, streak_us
from linear_tiles import candidates
from torch import Tensor

from lockstep import machine, ops
from lockstep.config import ParallelConfig
from lockstep.distributed import World, join
from lockstep.distributed.push.memory import shared_memory
from lockstep.distributed.push.operator import push_columns
from lockstep.distributed.push.triton import launch_push
from lockstep.models.init import architecture
from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear.choice import LIBRARY, Choice, Kind
from lockstep.ops.linear.hopper_async import MIN_COPIED
from lockstep.ops.linear.kernels import KERNELS, STORE_TO_PEERS
from lockstep.ops.norm import triton as norm_triton
from lockstep.ops.records import Epilogue

ARCHITECTURES = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-32b")
OWN = [name for name in KERNELS if name != "library"]
VARIED_ALONE, VARIED_SHARED = ("tma",), ("async", "tma")  # kernels of which all pipelines are tried, where not of all
PROBES = {  # bound on the rows: rows measured
    1: (1,),
    4: (2, 4),
    8: (8,),
    16: (16,),
    32: (24, 32),
    56: (40, 48, 56),
    64: (64,),
    128: (96, 128),
    256: (192, 256),
}
LAYER: dict[str, Kind] = {
    "qkv": "norm_linear",
    "o": "linear_add",
    "gate_up": "norm_gate_up",
    "down": "linear_add",
}
UNEVEN = 1.5  # the library's slowest over its median within a range, from which on it is not taken
LARGE = (512, 1024, 2048, 4096, 8192)  # left to the library; measured for the report
COLD_BYTES = 250 * 2**20  # weights that one graph reads
MIN_LAYERS, MAX_LAYERS = (3, 12) if DEVICE == "cuda" else (2, 2)
AGAIN = 6  # of the fastest tiles, tried once more when the other products have theirs
GAIN = 0.997  # what a change must bring to be taken
COMPARED = 5  # times that what was found is timed beside what there was
TIMEOUT_S = 600  # that processes wait for one another: the first compiles for all

Configuration = dict[str, Choice]


def product(
    kind: Kind, choice: Choice, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor, *epilogue: Epilogue
) -> Tensor:
    """The product after the norm."""
    if DEVICE == "cpu":  # to try the search
        return torch.nn.functional.linear(x, weight)[:, : weight.shape[0] // linear_choice.weight_tiles(kind)]
    if kind.startswith("norm"):
        x = norm_triton.rms_norm(x, norm, EPS)
    return KERNELS[choice.kernel].run(kind, choice, x, weight, residual if kind == "linear_add" else None, *epilogue)


def tiles(
    kind: Kind, bucket: int, columns: int, depth: int, kernels: Sequence[str], varied: Sequence[str] = OWN
) -> list[Choice]:
    """Candidates of these kernels. Of each tile of a kernel that is not `varied`, the one with the most stages, which
    releases early."""
    found = [c for name in kernels for c in candidates(name, kind, PROBES[bucket], columns, depth)]
    ordered = sorted(found, key=lambda c: (c.num_stages, c.early))
    return list({(c if c.kernel in varied else c[:4]): c for c in ordered}.values())


Call = Callable[..., Tensor]  # of a product: its name, rows and residual, and perhaps its epilogue


class LayerProblem:
    """The layers of an architecture at a number of rows, or a rank's part of them."""

    varied: Sequence[str] = OWN
    least_layers = MIN_LAYERS

    def __init__(self, arch: str, bucket: int, kernels: Sequence[str], ranks: int = 1) -> None:
        size = sum(2 * w.numel() for w in Stack(arch, 1, 1, "meta", ranks).layers[0])
        self.stack = Stack(arch, 1, max(self.least_layers, min(MAX_LAYERS, COLD_BYTES // size)), ranks=ranks)
        self.probes = [self.stack.with_rows(rows) for rows in PROBES[bucket]]
        self.shapes = {name: tuple(w.shape) for name, w in zip(LAYER, self.stack.layers[0], strict=True)}
        self.bucket, self.kernels = bucket, kernels
        self.even: dict[str, bool] = {}
        self.tried: dict[str, dict[Choice, float]] = {}  # of each product, the first time: microseconds a layer

    def library_is_even(self, name: str) -> bool:
        """Whether the library may be taken for this product."""
        if name not in self.even:
            weight = self.stack.layers[0][list(LAYER).index(name)]
            self.even[name] = is_even(LAYER[name], weight.unsqueeze(0), self.bucket)
        return self.even[name]

    def run(self, s: Stack, chosen: Configuration) -> None:
        x = s.x
        for layer in s.layers:
            call = self._products(s, layer, chosen)
            q = ops.qk_norm_rope_write_kv(call("qkv", x, x), s.heads(), ops.KVPages(*s.cache), s.slots)
            x = call("o", q.flatten(1), x)
            x = call("down", call("gate_up", x, x), x)

    def us(self, chosen: Configuration) -> float:
        """Of a layer, the mean over the rows measured."""
        times = [graph_us(lambda s=s: self.run(s, chosen), 3, 5) for s in self.probes]
        return sum(times) / len(times) / len(self.stack.layers)

    def present(self) -> Configuration:
        """By the present table or its rule."""
        return {n: linear_choice.choose(LAYER[n], PROBES[self.bucket][-1], *shape) for n, shape in self.shapes.items()}

    def tune(self) -> tuple[Configuration, float]:
        """The best configuration that a descent from the present table finds; microseconds a layer."""
        m = PROBES[self.bucket][-1]
        best = self.present()
        for name, shape in self.shapes.items():
            if best[name] == LIBRARY and not self.library_is_even(name):
                best[name] = linear_choice.choose_by_rule(LAYER[name], min(m, linear_choice.MAX_ROWS), *shape)
        time = self.us(best)
        tries = {name: list(dict.fromkeys([best[name], *self._tiles(name)])) for name in self.shapes}
        for _ in range(2):
            for name in self.shapes:
                times = {choice: self.us({**best, name: choice}) for choice in tries[name]}
                tries[name] = sorted(times, key=times.__getitem__)[:AGAIN]
                flags = self._flags(tries[name][0])
                times |= {choice: self.us({**best, name: choice}) for choice in flags}
                self.tried.setdefault(name, times)
                choice = min(times, key=times.__getitem__)
                if times[choice] < GAIN * time:
                    best, time = {**best, name: choice}, times[choice]
        return best, time

    @staticmethod
    def _products(s: Stack, layer: tuple[Tensor, ...], chosen: Configuration) -> Call:
        weights = dict(zip(LAYER, layer, strict=True))
        return lambda name, x, residual, *epilogue: product(
            LAYER[name], chosen[name], x, weights[name], s.norm, residual, *epilogue
        )

    def _tiles(self, name: str) -> list[Choice]:
        """Tiles, and the library."""
        library = [LIBRARY] if self.library_is_even(name) else []
        return [*library, *tiles(LAYER[name], self.bucket, *self.shapes[name], self.kernels, self.varied)]

    def _flags(self, choice: Choice) -> list[Choice]:
        """The tile of `choice` with other flags."""
        if choice.kernel != "pipelined":
            return []
        return [choice._replace(early=early) for early in (False, True)]


class SharedLayerProblem(LayerProblem):
    """The layers shared by the processes of a world, each of which has its columns and heads: words go to all behind
    attention and every product, whose kernel stores them if it can. All try the same at the same time, and a time is
    the longest of theirs."""

    varied = VARIED_SHARED
    least_layers = MAX_LAYERS  # between two replays there is a gap

    def __init__(self, arch: str, bucket: int, kernels: Sequence[str], world: World) -> None:
        super().__init__(arch, bucket, kernels, world.size)
        self.world, self.axis = world, world.generator_mesh.tp
        self.whole: dict[tuple[int, int], Tensor] = {}

    def library_is_even(self, name: str) -> bool:
        """Whether it is on all."""
        return all(self.world.gather(super().library_is_even(name)))

    def run(self, s: Stack, chosen: Configuration, pushes: bool = True) -> None:
        x, own = s.x, s.x.chunk(self.axis.size, dim=1)[self.axis.rank]
        for layer in s.layers:
            call = self._products(s, layer, chosen)
            share = partial(self._stored, call, chosen) if pushes else partial(self._unmoved_product, call)
            q = ops.qk_norm_rope_write_kv(call("qkv", x, x), s.heads(), ops.KVPages(*s.cache), s.slots).flatten(1)
            own, x = share("o", self._pushed(q) if pushes else self._unmoved(q), own)
            _, gated = share("gate_up", x, own)
            own, x = share("down", gated, own)

    def us(self, chosen: Configuration, pushes: bool = True) -> float:
        times = [streak_us(lambda s=s: self.run(s, chosen, pushes)) for s in self.probes]
        return max(self.world.gather(sum(times) / len(times) / len(self.stack.layers)))

    def compare(self, before: Configuration, after: Configuration) -> tuple[float, float, float]:
        """Microseconds a layer, timed in turn: before, after, and after without pushes."""
        runs = (before, True), (after, True), (after, False)
        rounds = [[self.us(*run) for run in runs] for _ in range(COMPARED)]
        first, second, third = map(statistics.median, zip(*rounds, strict=True))
        return first, second, third

    def _pushed(self, x: Tensor) -> Tensor:
        return push_columns(x, self.axis.size, self.axis.group, False)

    def _stored(
        self, call: Call, chosen: Configuration, name: str, x: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A product's columns, and those of all ranks."""
        if DEVICE == "cpu" or chosen[name].kernel not in STORE_TO_PEERS:
            own = call(name, x, residual)
            return own, self._pushed(own)
        memory = shared_memory(self.axis.group)
        columns = self.shapes[name][0] // linear_choice.weight_tiles(LAYER[name])
        whole = x.new_empty(x.shape[0], self.axis.size * columns)
        own = call(name, x, residual, Epilogue(peers=memory.peers))
        return own, launch_push(own, False, memory, store=False, out=whole)

    def _unmoved_product(self, call: Call, name: str, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        own = call(name, x, residual)
        return own, self._unmoved(own)

    def _unmoved(self, x: Tensor) -> Tensor:
        """Random words of the shape that all ranks' columns have, the same each time."""
        shape = x.shape[0], self.axis.size * x.shape[1]
        if shape not in self.whole:
            self.whole[shape] = torch.randn(shape, device=DEVICE).to(DTYPE)
        return self.whole[shape]


def range_of(bucket: int) -> range:
    """The multiples of eight that an entry with this bound is for."""
    smaller = max((bound for bound in PROBES if bound < bucket), default=0)
    return range(smaller // 8 * 8 + 8, max(bucket, 8) + 1, 8)


def is_even(kind: Kind, weights: Tensor, bucket: int) -> bool:
    """Whether the library takes about as long for any number of rows in the range."""

    def us(m: int) -> float:
        x = torch.randn(m, weights.shape[2], device=DEVICE).to(DTYPE)
        return graph_us(lambda: [product(kind, LIBRARY, x, w, x[0], _residual(kind, x, w)) for w in weights], 3, 5)

    times = [us(m) for m in range_of(bucket)]
    return max(times) < UNEVEN * statistics.median(times)


def _residual(kind: Kind, x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(x.shape[0], weight.shape[0]) if kind == "linear_add" else x


class PlainProblem:
    """One product without neighbours."""

    pool: Tensor | None = None  # random words, shared by all

    def __init__(self, kind: Kind, columns: int, depth: int, kernels: Sequence[str], few: bool = False) -> None:
        self.kind, self.columns, self.depth, self.kernels, self.few = kind, columns, depth, kernels, few
        size = columns * depth
        layers = max(2, min(24, COLD_BYTES // (2 * size)))
        if PlainProblem.pool is None or PlainProblem.pool.numel() < layers * size:
            PlainProblem.pool = torch.randn(layers * size, device=DEVICE, dtype=DTYPE)
        self.weights = PlainProblem.pool[: layers * size].view(layers, columns, depth)

    def us(self, m: int, choice: Choice) -> float:
        x = torch.randn(m, self.depth, device=DEVICE).to(DTYPE)
        residual = _residual(self.kind, x, self.weights[0])
        return self._us(lambda w: product(self.kind, choice, x, w, x[0], residual))

    def library_us(self, m: int) -> float:
        """The faster of cuBLAS and cuBLASLt, both free to split K."""
        x, times = torch.randn(m, self.depth, device=DEVICE).to(DTYPE), []
        dtype = torch.float32 if self.kind == "linear_fp32" else torch.bfloat16
        if DEVICE == "cpu":
            return self._us(lambda w: torch.mm(x, w.t()))
        try:
            stock()
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                times.append(self._us(lambda w: torch.mm(x, w.t(), out_dtype=dtype)))
        finally:
            contract()
        return min(times)

    def _us(self, call) -> float:
        return graph_us(lambda: [call(w) for w in self.weights], 3, 5) / len(self.weights)

    def tune(self, bucket: int) -> dict[Choice, float]:
        """Microseconds, the mean over the rows, of the present choice, the tiles and the library; fastest first."""
        of, probes = (self.kind, bucket, self.columns, self.depth), PROBES[bucket]
        now = linear_choice.choose(self.kind, probes[-1], self.columns, self.depth)
        choices = tiles(*of, self.kernels, VARIED_ALONE if self.few else OWN)
        if now != LIBRARY:
            choices.append(now)
        if not choices or is_even(self.kind, self.weights, bucket):
            choices.append(LIBRARY)
        choices = list(dict.fromkeys(choices))
        times = {choice: sum(self.us(m, choice) for m in probes) / len(probes) for choice in choices}
        for choice in sorted(choices, key=times.__getitem__)[: AGAIN // 2 if self.few else AGAIN]:
            times[choice] = statistics.median(sum(self.us(m, choice) for m in probes) / len(probes) for _ in range(3))
        return dict(sorted(times.items(), key=lambda item: item[1]))


def compile_one(job: tuple[Kind, int, int, int, Choice]) -> None:
    """Put a kernel into Triton's cache. Runs in a process of its own."""
    kind, rows_, columns, depth, choice = job
    if choice.kernel == "pipelined":
        rows_, depth, columns = 16, choice.block_k, choice.block_n * linear_choice.weight_tiles(kind)
    shapes = (columns, depth), (rows_, depth), (rows_, columns)
    weight, x, residual = (torch.zeros(shape, device=DEVICE, dtype=DTYPE) for shape in shapes)
    product(kind, choice, x, weight, weight[0], residual)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compile_all(
    shapes: Sequence[tuple[Kind, int, int]], bounds: list[int], kernels: Sequence[str], varied: Sequence[str] = OWN
) -> int:
    """Compile what will be timed, on all processors."""
    jobs: dict[object, tuple[Kind, int, int, int, Choice]] = {}
    for (kind, *shape), bucket in itertools.product(shapes, bounds):
        for choice, m in itertools.product(tiles(kind, bucket, *shape, kernels, varied), PROBES[bucket]):
            key: list[object] = [kind.removeprefix("norm_"), choice]
            if choice.kernel != "pipelined":
                key += shape
            if choice.kernel == "async":
                key.append(max(triton.next_power_of_2(min(m, choice.block_m)), MIN_COPIED))
            jobs[tuple(key)] = kind, m, *shape, choice
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs.values(), chunksize=4))
    return len(jobs)


def entry(choice: Choice) -> list[str | int]:
    """As the table's file has it: without the fields at its end that have their defaults."""
    return list(choice)[: max(i for i, (a, b) in enumerate(zip(choice, LIBRARY, strict=True), 1) if i == 1 or a != b)]


class Table:
    """What was chosen, kind by kind, shape by shape, for each bound on the rows; other shapes keep what they have."""

    def __init__(self, told: bool = True) -> None:
        self.told = told  # whether this process says and writes it
        self.entries: dict[str, dict[str, dict[int, Choice]]] = {
            kind: {f"{n}x{k}": dict(found) for (n, k), found in shapes.items()}
            for kind, shapes in linear_choice.table().items()
        }
        self.lines = [["what", "shape", "rows", "us", "library us", "floor us", "choice"]]
        self.measured: list[dict[str, Any]] = []

    def add(self, kind: Kind, shape: tuple[int, ...], bucket: int, choice: Choice) -> None:
        self.entries[kind].setdefault("x".join(map(str, shape)), {})[bucket] = choice

    def line(self, *cells: object) -> None:
        self.lines.append([f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells])
        if self.told:
            print("  ".join(self.lines[-1]), file=sys.stderr, flush=True)

    def write(self, path: Path) -> None:
        """One line a shape."""
        if not self.told:
            return
        gpu, capability = linear_choice.current_gpu()
        parts = [f'  "gpu": {json.dumps(gpu)}', f'  "capability": {json.dumps(capability)}']
        for kind, shapes in self.entries.items():
            lines = ",\n".join(self._line(name, found) for name, found in shapes.items())
            parts.append(f"  {json.dumps(kind)}: {{\n{lines}\n  }}")
        path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    @staticmethod
    def _line(name: str, found: dict[int, Choice]) -> str:
        entries = [[bound, entry(choice)] for bound, choice in sorted(found.items())]
        return f"    {json.dumps(name)}: {json.dumps(entries)}"


def tune_layers(arch: str, bounds: list[int], kernels: Sequence[str], table: Table) -> None:
    for bucket in bounds:
        problem = LayerProblem(arch, bucket, kernels)
        chosen, us = problem.tune()
        floor = sum(2 * w.numel() for w in problem.stack.layers[0]) / BANDWIDTH
        table.line("layer", arch, bucket, us, "", floor, {n: entry(c) for n, c in chosen.items()})
        for name, shape in problem.shapes.items():
            table.add(LAYER[name], shape, bucket, chosen[name])


def tune_shared(arch: str, bucket: int, kernels: Sequence[str], world: World, rate: float, table: Table) -> None:
    """Of the layer that all processes share, the table's kernels or those found: what is faster when timed in turn.
    `rate`: bytes a second that a sum reads here."""
    began, problem = time.perf_counter(), SharedLayerProblem(arch, bucket, kernels, world)
    present, (found, _) = problem.present(), problem.tune()
    before, after, unmoved = problem.compare(present, found)
    chosen = found if after < before else present
    floor = 1e6 * sum(w.nbytes for w in problem.stack.layers[0]) / rate
    seconds = time.perf_counter() - began
    told = f"before {before:.2f}, without pushes {unmoved:.2f}"
    what = f"layer of {world.size}"
    table.line(what, arch, bucket, min(before, after), told, floor, {n: entry(c) for n, c in chosen.items()})
    us = {"before_us": before, "after_us": after, "without_pushes_us": unmoved, "floor_us": floor}
    choices = {when: {n: entry(c) for n, c in of.items()} for when, of in (("before", present), ("after", found))}
    tried = {name: fastest(times) for name, times in problem.tried.items()}
    about = {"arch": arch, "shared_by": world.size, "rows": bucket, "seconds": seconds}
    table.measured.append({**about, **us, **choices, "fastest_us": tried})
    for name, shape in problem.shapes.items():
        table.add(LAYER[name], shape, bucket, chosen[name])


def fastest(times: dict[Choice, float]) -> dict[str, list[Any]]:
    """Of each kernel."""
    ordered = sorted(times.items(), key=lambda item: -item[1])
    return {choice.kernel: [entry(choice), us] for choice, us in ordered}


def tune_plain(
    kind: Kind, columns: int, depth: int, bounds: list[int], kernels: Sequence[str], table: Table
) -> list[float]:
    """Our times over the library's."""
    problem, ratios, floor = PlainProblem(kind, columns, depth, kernels), [], 2 * columns * depth / BANDWIDTH
    for bucket in bounds:
        choice, us = next(iter(problem.tune(bucket).items()))
        library = sum(problem.library_us(max(m, 2)) for m in PROBES[bucket]) / len(PROBES[bucket])
        ratios.append(us / library)
        table.add(kind, (columns, depth), bucket, choice)
        table.line(kind, f"{columns}x{depth}", bucket, us, library, floor, entry(choice))
    if kind == "linear" and DEVICE == "cuda":
        ratios += [problem.us(m, LIBRARY) / problem.library_us(m) for m in LARGE]
    return ratios


def tune_alone(
    kind: Kind, columns: int, depth: int, bounds: list[int], kernels: Sequence[str], table: Table
) -> list[float]:
    """Times of the rule's choice over those of the fastest."""
    problem, ratios, floor = PlainProblem(kind, columns, depth, kernels, few=True), [], 2 * columns * depth / BANDWIDTH
    for bucket in bounds:
        rows = PROBES[bucket][-1]
        rule = linear_choice.choose_by_rule(kind, rows, columns, depth)
        times = problem.tune(bucket)
        ruled = times.get(rule) or sum(problem.us(m, rule) for m in PROBES[bucket]) / len(PROBES[bucket])
        choice, us = next(iter(times.items()))
        ratios.append(ruled / us)
        table.add(kind, (columns, depth), bucket, choice)
        table.line(kind, f"{columns}x{depth}", bucket, us, f"rule {ruled:.2f}", floor, entry(choice))
        tried = [[entry(c), t] for c, t in {**times, rule: ruled}.items()]
        table.measured.append({"kind": kind, "columns": columns, "depth": depth, "rows": bucket, "tried_us": tried})
    return ratios


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    names = ARCHITECTURES if DEVICE == "cuda" else ("tiny",)
    parser.add_argument("--arch", nargs="*", default=list(names), help=f"default: {' '.join(names)}")
    table_path = linear_choice.table_path(linear_choice.current_gpu()[0])
    parser.add_argument("--out", type=Path, default=table_path, help="default: this GPU's table in the package")
    parser.add_argument("--layers", action="store_true", help="leave the plain products as they are")
    parser.add_argument("--alone", action="store_true", help="products one by one, without plain ones")
    processes = machine.torchrun_launch().processes
    parser.add_argument(
        "--shared-by", type=int, nargs="*", default=[processes], help="GPUs that share columns (default: the processes)"
    )
    bounds = list(PROBES)
    parser.add_argument(
        "--bounds", type=int, nargs="*", choices=bounds, default=bounds, help="of the rows; default: all"
    )
    parser.add_argument("--kernels", nargs="*", choices=OWN, default=OWN, help="tried beside what the table has")
    args = parser.parse_args()
    if DEVICE == "cpu" and args.out == table_path:
        parser.error("torch sees no GPU: give an --out, the table in the package is not measured on a CPU")
    configs = [architecture(name) for name in args.arch]
    if processes > 1 and (args.alone or not args.layers or args.shared_by != [processes]):
        parser.error(f"{processes} processes tune the layers that they share: give --layers, and no --alone")
    for (name, config), gpus in itertools.product(zip(args.arch, configs, strict=True), args.shared_by):
        if config.num_kv_heads % gpus:
            parser.error(f"{gpus} GPUs cannot share {name}, which has {config.num_kv_heads} heads of keys and values")
    layers = {
        (LAYER[n], *w.shape)
        for a, gpus in itertools.product(args.arch, args.shared_by)
        for n, w in zip(LAYER, Stack(a, 1, 1, "meta", gpus).layers[0], strict=True)
    }
    plain: list[tuple[Kind, int, int]] = sorted({("linear", *shape[1:]) for shape in layers})
    plain += sorted({("linear_fp32", c.vocab_size // n, c.hidden_size) for c in configs for n in args.shared_by})
    plain = [] if args.layers else plain
    known = linear_choice.table()
    alone = [
        (kind, *shape)
        for kind, *shape in sorted(layers) + plain
        if kind != "linear" and tuple(shape) not in known[kind]
    ]
    varied = VARIED_ALONE if args.alone else VARIED_SHARED if processes > 1 else OWN
    shapes = alone if args.alone else [*sorted(layers), *plain]
    pushes = processes > 1 and DEVICE == "cuda"
    world = join(ParallelConfig(generator_tp=processes, symmetric_memory=pushes, timeout=TIMEOUT_S), DEVICE)
    compiled = world.broadcast_from_first(lambda: compile_all(shapes, args.bounds, args.kernels, varied))
    if world.is_first:
        print(f"{compiled} kernels compiled", file=sys.stderr, flush=True)
    contract()
    table, ratios = Table(told=world.is_first), []
    with torch.inference_mode():
        for problem in alone if args.alone else ():
            ratios += tune_alone(*problem, args.bounds, args.kernels, table)
            table.write(args.out)
        rate = bandwidth(DEVICE) if processes > 1 else 0.0
        for arch, bucket in itertools.product(args.arch, args.bounds) if processes > 1 else ():
            tune_shared(arch, bucket, args.kernels, world, rate, table)
            table.write(args.out)
            if world.is_first:
                save("tune_linear", {"measured": table.measured}, args.json)
        for arch in () if args.alone or processes > 1 else args.arch:
            tune_layers(arch, args.bounds, args.kernels, table)
            table.write(args.out)
        for problem in () if args.alone else plain:
            found = tune_plain(*problem, args.bounds, args.kernels, table)
            ratios += found if problem[0] == "linear" else []
    table.write(args.out)
    figures = {"geometric_mean": math.prod(ratios) ** (1 / len(ratios)), "worst": max(ratios)} if ratios else {}
    if world.is_first:
        finish("tune_linear", {**figures, "rows": table.lines, "measured": table.measured}, table.lines, args.json)
    world.close()
    if figures:
        of = "the rule over the fastest" if args.alone else "linear over the library"
        print(f"{of}: geometric mean {figures['geometric_mean']:.3f}, worst {figures['worst']:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
