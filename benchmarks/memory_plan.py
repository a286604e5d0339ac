"""The memory plan of a run against what the run takes of a GPU, term by term; and plans near the edge.

Each run is a process of its own (with --gpus, several) that builds a session with random weights, makes its graphs,
checks them and does one step. The floor of a term is 10 % of it or 0.5 GiB, that of all together 5 %.

--edges N: random workloads on devices that are made as small as their plan, a little smaller or larger, every third on
--gpus of them. One that is accepted must do its step within it. One that is refused is run in its cheapest form,
and must run out of 95 % of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import arguments, save, torchrun

from lockstep.config import (
    CompileConfig,
    GeneratorConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    validate,
)
from lockstep.graph import Runtime
from lockstep.machine import restrict_to_local_gpu
from lockstep.models import Decoder, Ranges
from lockstep.models.init import INITIALIZER_RANGE, RandomWeights
from lockstep.session.build import planned_workload, resolve_for_device, task_reader
from lockstep.session.memory import MemoryPlan, Workload
from lockstep.session.memory import plan as planning
from lockstep.session.memory.plan import ACTIVATIONS, CACHE, CHECK, GENERATION, TRANSIT, WORKSPACE
from lockstep.session.memory.terms import CONTEXT, CONTEXT_AT_START, GIB, communicators


class Case(NamedTuple):
    """A run: its model, packed tokens a micro-batch, prompts of 8 samples, their tokens, the cache's (0: planned)."""

    arch: str
    tokens: int = 16384
    prompts: int = 32
    completion: int = 512
    cache: int = 0
    recompute: bool = False

    @property
    def title(self) -> str:
        """For a table."""
        kind = f", cache of {self.cache}" if self.cache else ""
        return f"{self.arch}, {self.tokens} tokens, {self.prompts} x 8 x {self.completion}{kind}" + (
            ", recomputed" if self.recompute else ""
        )


class Edge(NamedTuple):
    """A case on so many GPUs of `limit` bytes, of which it needs `least` by its plan."""

    case: Case
    ranks: int
    limit: int
    least: int
    accepted: bool


CASES = {
    "cpu": [Case("tiny", 512, 8, 16)],
    "cuda": [
        Case("qwen3-0.6b"),
        Case("qwen3-0.6b", 8192, 32, 256, cache=37449),  # 4 GiB
        Case("qwen3-0.6b", 65536, 64, 512),
        Case("qwen3-1.7b", 16384, recompute=True),
        Case("qwen3-4b", 16384, 32, 256, cache=29127),  # 4 GiB
    ],
}
SHARDED = [Case("qwen3-0.6b", 16384, 64), Case("qwen3-8b", 16384, 64), Case("qwen3-8b", 8192, 64, cache=29127)]
LIMIT_S = 400  # of a run
ELSE = 1 << 27  # bytes that are left to what is not in the pool of graphs, where there are fewer than planned
POOL = ACTIVATIONS, WORKSPACE, TRANSIT, GENERATION


def configuration(case: Case, device: str) -> RunConfig:
    """Of a case: every completion is as long as it may be."""
    kinds = {"num_generations": 8, "max_completion_length": case.completion, "ignore_eos": True, "temperature": 1.0}
    return validate(
        RunConfig(
            model=None,
            arch=case.arch,
            steps=1,
            device=device,  # type: ignore[arg-type]
            task=TaskConfig(easy=True),
            sampling=SamplingConfig(**kinds),  # type: ignore[arg-type]
            generator=GeneratorConfig(kv_cache_tokens=case.cache),
            trainer=TrainerConfig(
                prompts_per_step=case.prompts, max_tokens_per_micro_batch=case.tokens, skip_zero_variance=False
            ),
            compile=CompileConfig(recompute=("full",) if case.recompute else ()),
        )
    )


def measured(case: Case, device: str, memory: tuple[int, int] | None = None) -> dict[str, Any]:
    """What one process of a case takes, in GiB. `memory`: bytes that it believes a GPU has, and gets."""
    from lockstep.config import ParallelConfig
    from lockstep.distributed import ONE_PROCESS, join
    from lockstep.machine import is_multi_process
    from lockstep.rl.loop import Loop
    from lockstep.session.build import TrainingSession, resolve
    from lockstep.session.memory import measure_memory
    from lockstep.session.warm_up import warm_up

    world = join(ParallelConfig(), device) if is_multi_process() else ONE_PROCESS
    if memory:
        _shrink(*memory, communicators(world.axes))
    plans: list[MemoryPlan] = []  # once there is one
    try:
        with mock.patch.object(RandomWeights, "fill", _drawn):
            began = time.perf_counter()
            config = resolve(configuration(case, device), world.size)
            session = TrainingSession(config, world, planned=plans.append)
        loaded = _reserved(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        warm_up(session)
        started, ready = _reserved(device), time.perf_counter() - began
        loop = Loop(session.config, session)
        loop.step(0)
    except torch.OutOfMemoryError as error:
        error.add_note(f"pools, GiB reserved and allocated: {_pools()}; planned: {[p.to_dict() for p in plans]}")
        raise
    found = measure_memory(session.trainer, session.engine.cache, session.runtime)
    result = {"plan": session.plan.to_dict(), "used": found, "start_s": ready, "rank": world.rank}
    result |= {"reserved_after_load": loaded, "reserved_after_start": started, "reserved_after_step": _reserved(device)}
    result["pools"] = _pools() if device == "cuda" else {}
    session.runtime.close()
    world.close()
    return result


def _drawn(source: RandomWeights, wanted: Ranges) -> None:
    """In place of `RandomWeights.fill`: drawn where they lie, on a GPU many times faster; the same on all ranks."""
    fills = Decoder(source.config, torch.float32, "meta").init_constants
    for name, held in wanted.items():
        for values, _ in held:
            draw = torch.Generator(values.device).manual_seed(0)
            values.fill_(fills[name]) if name in fills else values.normal_(0, INITIALIZER_RANGE, generator=draw)


def _shrink(believed: int, allowed: int, communicators: int) -> None:
    """Have who asks for free memory believe in a device of so many bytes, and the allocator stay within so many. Of
    what is to be reserved it reserves what there is, so that a plan of more than a run takes would be seen."""
    reserve, total, begun = Runtime.reserve, torch.cuda.mem_get_info()[1], CONTEXT_AT_START + communicators
    allocator = allowed - CONTEXT - communicators

    def reserve_what_there_is(runtime: Runtime, size: int) -> None:
        torch.cuda.empty_cache()
        reserve(runtime, max(0, min(size, allocator - torch.cuda.memory_reserved() - ELSE)))

    Runtime.reserve = reserve_what_there_is  # type: ignore[method-assign]
    torch.cuda.set_per_process_memory_fraction(allocator / total)
    torch.cuda.mem_get_info = lambda _=None: (believed - begun - torch.cuda.memory_reserved(), believed)  # type: ignore


def _reserved(device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    now, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    names = "reserved", "most_reserved", "allocated", "most_allocated"
    return {name: round(size / GIB, 2) for name, size in zip(names, (now, most, *allocated), strict=True)}


def _pools() -> dict[str, list[float]]:
    """GiB that each pool of the allocator has reserved, and of it handed out, and in how many segments."""
    found: dict[str, list[float]] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = found.setdefault(str(segment["segment_pool_id"]), [0.0, 0.0, 0])
        for place, amount in enumerate((segment["total_size"] / GIB, segment["allocated_size"] / GIB, 1)):
            pool[place] = round(pool[place] + amount, 3)
    return found


def in_a_process(
    case: Case, device: str, gpus: int, memory: tuple[int, int] | None = None, visible: str | None = None
) -> dict[str, Any]:
    """`measured`, by a new process or several; `error` where it did not end well."""
    own = [str(Path(__file__)), "--device", device, "--one", json.dumps(case)]
    own += ["--memory", *map(str, memory)] if memory else []
    environment = os.environ if visible is None else os.environ | {"CUDA_VISIBLE_DEVICES": visible}
    start = torchrun(gpus) if gpus > 1 else [sys.executable]
    try:
        done = subprocess.run([*start, *own], capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"plan"')]
    if done.returncode or not lines:
        said = (done.stderr.partition("torch/distributed/elastic")[0] or done.stdout).strip()  # the ranks' own words
        return {"error": said[-3000:], "out_of_memory": "out of memory" in said.lower()}
    return json.loads(lines[0])


def compare(found: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """Terms, planned and used in GiB, and whether the difference is within the floor."""
    planned, taken = found["plan"]["terms_gib"], found["used"]
    names = (
        "weights",
        "shard of the weights",
        "masters",
        "moments",
        "gradients",
        "reference or teacher",
        CACHE,
        "CUDA and NCCL",
    )
    rows = [(name, planned.get(name, 0.0), taken.get(name, 0.0)) for name in names]
    if "graphs' pool" in taken:
        check = planned.get(CHECK, 0.0)
        rows.append(("graphs' pool", sum(planned.get(name, 0.0) for name in POOL), taken["graphs' pool"]))
        begun, most = found["reserved_after_load"]["allocated"], found["reserved_after_start"]["most_allocated"]
        rows.append(("at work in it", found["plan"].get("pool_gib", 0.0), most - begun))
        rows.append(("together", found["plan"]["planned_gib"], taken["together, at most"]))
        rows.append(("together, less check", found["plan"]["planned_gib"] - check, taken["together, now"]))
    return [
        (name, p, u, abs(p - u) <= (0.05 * u if name.startswith("together") else max(0.1 * u, 0.5)))
        for name, p, u in rows
        if p or u
    ]


def edge_cases(count: int, seed: int, gpus: int, sharded: bool = False) -> list[Edge]:
    """Random workloads of one process, or every third or all `sharded` of `gpus`, on devices near the size that they
    need, or that they take with nothing computed again."""
    draw, cuda = random.Random(seed), torch.device("cuda")
    found = []
    for number in range(count):
        ranks = gpus if sharded or number % 3 == 2 else 1
        arch = draw.choice(["qwen3-0.6b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"])
        tokens, length = draw.choice([2048, 4096, 8192, 12288, 16384, 32768]), draw.choice([64, 128, 256, 512])
        case = Case(arch, tokens, draw.choice([8, 16, 32]), length)
        config = resolve_for_device(configuration(case, "cuda"), ranks, cuda)
        w = planned_workload(config, ranks, cuda, task_reader(config))
        least = smallest(w)
        roomy = planning(w, 1 << 41).total  # with nothing computed again
        limit = int(least * draw.uniform(0.9, 1.2)) if number % 2 else int(roomy * draw.uniform(0.8, 1.02))
        found.append(Edge(case, ranks, limit, least, planning(w, limit).fits))
    return found


def smallest(w: Workload) -> int:
    """Bytes of the smallest device, to 16 MiB, on which a workload's plan fits: with all computed again that may be and
    next to no cache."""
    refused, fits = 0, 1 << 41
    while fits - refused > 1 << 24:
        middle = (refused + fits) // 2
        refused, fits = (refused, middle) if planning(w, middle).fits else (middle, fits)
    return fits


class Places:
    """GPUs that several runs share at a time, as far as their memory goes."""

    def __init__(self, gpus: int, beside: int) -> None:
        room = int(0.95 * torch.cuda.mem_get_info()[0])
        self.free, self.beside, self.changed = [room] * gpus, [beside] * gpus, threading.Condition()

    @contextlib.contextmanager
    def taken(self, ranks: int, size: int) -> Iterator[str]:
        """`CUDA_VISIBLE_DEVICES` for a run of so many processes that take so many bytes each."""
        with self.changed:
            while len(found := self._there(size)) < ranks:
                self.changed.wait()
            chosen = sorted(found, key=self.free.__getitem__)[-ranks:]
            self._add(chosen, -size, -1)
        try:
            yield ",".join(map(str, chosen))
        finally:
            with self.changed:
                self._add(chosen, size, 1)
                self.changed.notify_all()

    def _there(self, size: int) -> list[int]:
        return [gpu for gpu, free in enumerate(self.free) if free >= size and self.beside[gpu]]

    def _add(self, gpus: list[int], size: int, places: int) -> None:
        for gpu in gpus:
            self.free[gpu] += size
            self.beside[gpu] += places


def edge(one: Edge, places: Places) -> dict[str, Any]:
    """One that is accepted must do its step in the memory that it was planned for. One that is refused is told that it
    has as much as would do, in the cheapest form, and must run out of 0.95 of what it was refused on."""
    believed = one.limit if one.accepted else one.least
    allowed = one.limit if one.accepted else int(0.95 * one.limit)
    with places.taken(one.ranks, believed) as visible:
        found = in_a_process(one.case, "cuda", one.ranks, (believed, allowed), visible)
    error = found.get("error", "")
    ended = "ran" if not error else "out of memory" if found.get("out_of_memory") else "failed"
    good = ended == ("ran" if one.accepted else "out of memory")
    planned = "accepted" if one.accepted else "refused"
    print(
        f"{one.case.title}, {one.ranks} processes, {one.limit / GIB:.1f} of {one.least / GIB:.1f} GiB: {planned}, "
        f"{ended}{'' if good else ', NOT AS PLANNED ' + error[-1500:]}",
        flush=True,
    )
    about = {"limit_gib": one.limit / GIB, "smallest_gib": one.least / GIB, "processes": one.ranks}
    found |= {"error": error[-1000:]} if error else {}
    return {"case": one.case.title, **about, "accepted": one.accepted, "ended": ended, "as_planned": good, **found}


def main() -> None:
    """See the module's description."""
    restrict_to_local_gpu()  # of several processes each has one; before CUDA is asked
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU (default: 1)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases, from 0 (default: all)")
    parser.add_argument("--edges", type=int, default=0, metavar="N", help="random plans in place of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of --edges")
    parser.add_argument("--sharded", action="store_true", help="of --edges: all of --gpus processes (default: a third)")
    parser.add_argument("--beside", type=int, default=1, help="of --edges: runs that share a GPU (default: 1)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one = measured(Case(*json.loads(options.one)), options.device, options.memory)
        if one.pop("rank") == 0:
            print(json.dumps(one), flush=True)
        return
    if options.edges:
        places = Places(options.gpus, options.beside)
        cases = edge_cases(options.edges, options.seed, options.gpus, options.sharded)
        found = []
        with ThreadPoolExecutor(len(cases)) as pool:
            for done in as_completed([pool.submit(edge, one, places) for one in cases]):
                found.append(done.result())
                save("memory_plan", {"edges": found, "complete": len(found) == len(cases)}, options.json)
        good = sum(one["as_planned"] for one in found)
        print(f"{good} of {len(found)} as planned, {sum(one.accepted for one in cases)} of them accepted")
        return
    cases = SHARDED if options.gpus > 1 and options.device == "cuda" else CASES[options.device]
    results = []
    for number, case in enumerate(cases):
        if options.only is not None and number not in options.only:
            continue
        began = time.perf_counter()
        found = in_a_process(case, options.device, options.gpus)
        print(f"\n{case.title}, {options.gpus} processes, {time.perf_counter() - began:.0f} s")
        for name, planned, taken, good in compare(found) if "plan" in found else ():
            print(f"  {name:<22} planned {planned:>8.2f} used {taken:>8.2f} GiB {'' if good else '  OUTSIDE'}")
        print("  " + json.dumps({k: v for k, v in found.items() if k != "used"}), flush=True)
        results.append({"case": case._asdict(), **found})
        save("memory_plan", {"cases": results, "complete": case is cases[-1]}, options.json)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    main()
