"""Run by torchrun on GPUs of one host: words that are pushed are those that collectives move, launch after launch, and
a rank that stays away ends the others. The first rank prints what was found, a JSON object. `shared`: the ranks have
one GPU, which runs their kernels in turn, so that a push takes milliseconds; few are made then, and none is timed.
`long`: ten million pushes, 100 a graph, and a million replays of a graph of eight, what two layers push, alone and
with the layers' products; three minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import machine, ops
from lockstep.config import ParallelConfig
from lockstep.distributed import World, join
from lockstep.distributed.push.memory import late_words
from lockstep.distributed.push.operator import (
    by_collective,
    push_attention_decode,
    push_columns,
    push_gate_up,
    push_linear_add,
    push_linear_add_norm,
)
from lockstep.errors import PeerLost
from lockstep.ops.linear import choice
from lockstep.ops.linear.choice import Choice

SHAPES = ((8, 512, torch.bfloat16), (64, 768, torch.bfloat16), (64, 19008, torch.float32), (1, 24, torch.int32))
SHARED = sys.argv[1:] == ["shared"]
MANY_RANKS = machine.torchrun_launch().processes > 2  # which other tests' kernels hold up more often
ROUNDS, REPLAYS, IN_A_GRAPH = (2, 20, 20) if SHARED else (20, 1_000 if MANY_RANKS else 10_000, 100)
MANY = {"replays": (REPLAYS, IN_A_GRAPH)}  # of a graph of so many pushes
if sys.argv[1:] == ["long"]:
    MANY |= {"ten million": (100_000, 100), "a million replays": (1_000_000, 8)}
PATIENCE_S = 20


def words(shape: tuple[int, int, torch.dtype], seed: int) -> Tensor:
    rows, width, dtype = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    bits = torch.randint(-(1 << 31), 1 << 31, (rows, width), generator=generator, device="cuda")
    return bits.to(dtype) if dtype.is_floating_point else bits.int()


def graph_of(
    world: World, move: Callable[..., Tensor], inputs: list[Tensor]
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph in which each rank's words go to all, again and again, all rows or those of owners in turn."""
    axis = world.generator_mesh.tp
    for x in inputs[:2]:
        move(x, axis.size, axis.group, False)
    return recorded(lambda: [move(x, axis.size, axis.group, bool(i % 2)) for i, x in enumerate(inputs)])


def recorded(calls: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of these calls, which have been made before, and their results."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread asks for NCCL's events
        found = calls()
    return graph, found


def seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Of so many replays."""
    begun = time.monotonic()
    for i in range(replays):
        graph.replay()
        if i % 500 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return time.monotonic() - begun


def microseconds(graph: torch.cuda.CUDAGraph, times: int = 50, rounds: int = 20) -> float:
    """Of one push: the least of several rounds, as other tests may use the GPUs meanwhile."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(rounds):
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / times / IN_A_GRAPH)
    return min(found)


def differing(world: World, shape: tuple[int, int, torch.dtype]) -> dict[str, Any]:
    """Words that differ from those of collectives, eagerly and in a graph that is replayed with other words, and us."""
    axis = world.generator_mesh.tp
    rows, width, dtype = shape
    inputs = [words((rows, width, dtype), 1000 * world.rank + i) for i in range(IN_A_GRAPH)]
    if rows % axis.size:
        inputs = [x.repeat(axis.size, 1) for x in inputs]
    wrong = 0
    for to_owners in (False, True):
        moved = [f(inputs[0], axis.size, axis.group, to_owners) for f in (push_columns, by_collective)]
        wrong += different(moved[:1], moved[1:])
    (pushed, found), (collective, expected) = (graph_of(world, f, inputs) for f in (push_columns, by_collective))
    for _ in range(ROUNDS):
        for i, x in enumerate(inputs):
            x.copy_(x.roll(1, 1) if i % 3 else x.flip(0))
        pushed.replay()
        collective.replay()
        wrong += different(found, expected)
    if SHARED:
        return {"different": wrong}
    return {"different": wrong, "push_us": microseconds(pushed), "nccl_us": microseconds(collective)}


TILES = [
    Choice("async", 64, 8, 256, 4, 4, 3),
    Choice("async", 16, 32, 256, 4, 3, 3),
    Choice("tma", 64, 16, 256, 4, 4),
    Choice("pipelined", 16, 32, 128, 4, 4, 0, True),
    choice.LIBRARY,
]


def different(found: list[Tensor], expected: list[Tensor]) -> int:
    return sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(found, expected, strict=True))


def products(world: World) -> dict[str, Any]:
    """Words of pushed products that differ from those of products and collectives, by each kernel, eagerly and in a
    graph that is replayed with other rows."""
    axis, wrong, depth, columns = world.generator_mesh.tp, 0, 1024, 96
    down, gate_up = (
        torch.randn(n, depth, device="cuda", generator=torch.Generator("cuda").manual_seed(world.rank)).bfloat16()
        for n in (columns, 2 * columns)
    )

    norm = ops.Norm(torch.linspace(-2, 2, axis.size * columns, device="cuda").bfloat16(), 1e-5, 1.0)

    def pushed(x: Tensor, own: Tensor) -> list[Tensor]:
        ranks, group = axis.size, axis.group
        found = *push_linear_add(x, down, own, ranks, group), *push_gate_up(x, gate_up, ranks, group)
        return [*found, push_linear_add_norm(x, down, own, ranks, group, norm)[1]]

    def collective(x: Tensor, own: Tensor) -> list[Tensor]:
        results = ops.linear_add(x, down, own), ops.gate_up(x, gate_up)
        parts = [part for y in results for part in (y, by_collective(y, axis.size, axis.group, False))]
        return [*parts, ops.rms_norm(parts[1], *norm)]

    for tile in TILES:
        choice.overrides |= {(n, depth): tile for n in (columns, 2 * columns)}
        for rows in (8, 17, 64) if tile.kernel == "tma" else (1, 8, 17, 64):
            x, own = (torch.randn(rows, n, device="cuda").bfloat16() for n in (depth, columns))
            dist.broadcast(x, 0)
            wrong += different(pushed(x, own), collective(x, own))
            graph, found = recorded(lambda: [part for _ in range(3) for part in pushed(x, own)])  # noqa: B023
            for _ in range(ROUNDS):
                x.copy_(x.roll(1, 1))
                graph.replay()
                wrong += different(found, 3 * collective(x, own))
    choice.overrides.clear()
    return {"different": wrong}


def replayed(world: World, replays: int, pushes: int) -> dict[str, Any]:
    """Seconds of so many replays of a graph of small messages, and words that differ after the last."""
    inputs = [words(SHAPES[0], 1000 * world.rank + i) for i in range(pushes)]
    graph, found = graph_of(world, push_columns, inputs)
    took, axis = seconds(graph, replays), world.generator_mesh.tp
    expected = [by_collective(x, axis.size, axis.group, bool(i % 2)) for i, x in enumerate(inputs)]
    return {"boundaries": replays * pushes, "different": different(found, expected), "seconds": took}


def attention(world: World) -> dict[str, Any]:
    """Words of pushed attention that differ from those of attention and a collective: of short and long contexts, of a
    few rows and many, and in groups."""
    axis, wrong, heads, head_dim, page = world.generator_mesh.tp, 0, 8, 128, 16
    for lengths, shared in (([1, 64, 300], 0), ([200] * 160, 0), ([4097, 30, 9000], 0), ([300] * 8, 256)):
        rows, pages = len(lengths), -(-max(lengths) // page)
        context = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        table = torch.arange(rows * pages, device="cuda", dtype=torch.int32).view(rows, pages)
        table[:, : shared // page] = table[0, : shared // page]
        slots = table.gather(1, ((context - 1) // page).long().unsqueeze(1)).squeeze(1).long() * page
        slots += (context - 1) % page
        norm = torch.ones(head_dim, device="cuda").bfloat16()
        rotation = ops.Rotation(norm, norm, torch.randn(rows, head_dim, device="cuda"), heads, 2, 1e-6)
        caches = torch.randn(2, rows * pages, page, 2, head_dim, device="cuda").bfloat16()
        groups = ops.NO_GROUPS
        if shared:
            members = torch.arange(rows, device="cuda", dtype=torch.int32).view(1, rows)
            groups = ops.PrefixGroups(members, torch.full_like(context, shared))
        qkv = torch.randn(rows, (heads + 4) * head_dim, device="cuda").bfloat16()
        at = qkv, rotation, ops.KVPages(*caches), slots, ops.Contexts(table, context, max(lengths))

        pushed = partial(push_attention_decode, *at, axis.size, axis.group, groups)
        own = ops.attention_decode(*at, groups).flatten(1)
        expected = by_collective(own, axis.size, axis.group, False)
        wrong += different([pushed()[1]], [expected])
        graph, found = recorded(lambda: [pushed()[1] for _ in range(3)])  # noqa: B023
        for _ in range(ROUNDS):
            graph.replay()
        wrong += different(found, 3 * [expected])
    return {"different": wrong}


def layers(world: World, replays: int, rows: int = 8) -> dict[str, Any]:
    """`replayed` of what two layers push, without their attention: of eight pushes six are of products."""
    axis, hidden, inner = world.generator_mesh.tp, 1024, 3072
    generator = torch.Generator("cuda").manual_seed(world.rank)

    def part(columns: int, depth: int) -> Tensor:
        return torch.randn(columns // axis.size, depth, generator=generator, device="cuda").bfloat16() / depth**0.5

    weights = [(part(hidden, hidden), part(2 * inner, hidden), part(hidden, inner)) for _ in range(2)]
    norm, whole = torch.ones(hidden, device="cuda").bfloat16(), torch.randn(rows, hidden, device="cuda").bfloat16()
    dist.broadcast(whole, 0)

    def pushed(whole: Tensor, own: Tensor) -> list[Tensor]:
        ranks, group = axis.size, axis.group
        for o, gate_up, down in weights:
            attended = push_columns(own + 1, ranks, group, False)
            own, normed = push_linear_add_norm(attended, o, own, ranks, group, ops.Norm(norm, 1e-6))
            _, gated = push_gate_up(normed, gate_up, ranks, group)
            own, whole = push_linear_add(gated, down, own, ranks, group)
        return [whole, own]

    def collective(whole: Tensor, own: Tensor) -> list[Tensor]:
        def gather(x: Tensor) -> Tensor:
            return by_collective(x, axis.size, axis.group, False)

        for o, gate_up, down in weights:
            own = ops.linear_add(gather(own + 1), o, own)
            gated = gather(ops.gate_up(ops.rms_norm(gather(own), norm, 1e-6), gate_up))
            own = ops.linear_add(gated, down, own)
            whole = gather(own)
        return [whole, own]

    inputs = whole, whole.chunk(axis.size, dim=1)[axis.rank].contiguous()
    pushed(*inputs)
    graph, found = recorded(lambda: pushed(*inputs))
    took = seconds(graph, replays)
    return {"boundaries": replays * 8, "different": different(found, collective(*inputs)), "seconds": took}


def late(world: World) -> dict[str, Any]:
    """What a rank is told whose words wait for one that stays away."""
    axis, begun = world.generator_mesh.tp, time.monotonic()
    if axis.rank:
        time.sleep(2 * PATIENCE_S)
        return {}
    try:
        with world.detect_lost_peers():
            push_columns(words(SHAPES[0], 0), axis.size, axis.group, False)
            torch.cuda.synchronize()
    except PeerLost as error:
        return {"seconds": time.monotonic() - begun, "late": late_words(), "message": str(error)}
    return {"seconds": time.monotonic() - begun, "message": "nothing was noticed"}


def main() -> None:
    machine.restrict_to_local_gpu()
    ranks = machine.torchrun_launch().processes
    world = join(ParallelConfig(generator_tp=ranks, timeout=PATIENCE_S), "cuda")
    found: dict[str, Any] = {f"{shape[0]} x {shape[1]} {shape[2]}": differing(world, shape) for shape in SHAPES}
    found["products"] = products(world)
    found["attention"] = attention(world)
    found["layers"] = layers(world, MANY.get("a million replays", (REPLAYS,))[0])
    found |= {name: replayed(world, *size) for name, size in MANY.items()}
    every = world.gather(found)
    told = late(world)  # after it the device does nothing more
    if world.is_first:
        print(json.dumps({"ranks": every, "late": told}), flush=True)
    sys.stdout.flush()
    import os

    os._exit(0)


if __name__ == "__main__":
    main()
