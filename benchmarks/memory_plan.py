"""The memory plan of a run against what the run takes of a GPU, term by term; and plans near the edge.

Each run is a process of its own (with --gpus, several) that builds a session with random weights, makes its graphs,
checks them and does one step. The floor of a term is 10 % of it or 0.5 GiB, that of all together 5 %.

--edges N: random workloads on a device that is made as small as their plan, a little smaller or larger. One that is
accepted must do its step within it; of one that is refused the cheapest form must not fit into 95 % of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
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
from lockstep.models import Decoder, Ranges
from lockstep.models.init import INITIALIZER_RANGE, RandomWeights
from lockstep.session.memory import plan as planning
from lockstep.session.memory.plan import CACHE, CHECK, GENERATION, KEPT, TRANSIT, WORKING
from lockstep.session.memory.terms import BEGUN, CONTEXT, GIB


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


CASES = {
    "cpu": [Case("tiny", 512, 4, 16)],
    "cuda": [
        Case("qwen3-0.6b"),
        Case("qwen3-0.6b", 8192, 32, 256, cache=37449),  # 4 GiB
        Case("qwen3-0.6b", 65536, 64, 512),
        Case("qwen3-1.7b", 16384, recompute=True),
        Case("qwen3-4b", 16384, 32, 256, cache=29127),  # 4 GiB
    ],
}
SHARDED = [Case("qwen3-0.6b", 16384, 64), Case("qwen3-8b", 16384, 64), Case("qwen3-8b", 8192, 64, cache=29127)]
POOL = KEPT, WORKING, TRANSIT, GENERATION


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


def measured(case: Case, device: str, limit: int) -> dict[str, Any]:
    """What one process of a case takes, in GiB; `limit` bytes are all that its GPU has, unless 0."""
    from lockstep.config import ParallelConfig
    from lockstep.distributed import ONE, join
    from lockstep.machine import own_gpu, several_processes
    from lockstep.rl.loop import Loop
    from lockstep.session import build
    from lockstep.session.memory import used
    from lockstep.session.warm_up import warm_up

    own_gpu()
    world = join(ParallelConfig(), device) if several_processes() else ONE
    if limit:
        _shrink(limit)
    with mock.patch.object(RandomWeights, "fill", _drawn):
        began = time.perf_counter()
        session = build.build(configuration(case, device), world)
    loaded = _reserved(device)
    warm_up(session)
    started, ready = _reserved(device), time.perf_counter() - began
    loop = Loop(session.config, session)
    loop.step(0)
    found = used(session.trainer, session.engine.cache, session.runtime)
    result = {"plan": session.plan.to_dict(), "used": found, "start_s": ready, "rank": world.rank}
    result |= {"reserved_after_load": loaded, "reserved_after_start": started, "reserved_after_step": _reserved(device)}
    session.runtime.close()
    world.close()
    return result


def _drawn(source: RandomWeights, wanted: Ranges) -> None:
    """In place of `RandomWeights.fill`: drawn where they lie, which on a GPU is many times faster."""
    fills = Decoder(source.config, torch.float32, "meta").fills
    for name, held in wanted.items():
        for values, _ in held:
            values.fill_(fills[name]) if name in fills else values.normal_(0, INITIALIZER_RANGE)


def _shrink(limit: int) -> None:
    """Have the allocator, and whoever asks for free memory, believe in a device of so many bytes."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((limit - CONTEXT) / total)
    torch.cuda.mem_get_info = lambda _=None: (limit - BEGUN - torch.cuda.memory_reserved(), limit)  # type: ignore


def _reserved(device: str) -> dict[str, float]:
    if device != "cuda":
        return {}
    now, most = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
    allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    names = "reserved", "most_reserved", "allocated", "most_allocated"
    return {name: round(size / GIB, 2) for name, size in zip(names, (now, most, *allocated), strict=True)}


def in_a_process(case: Case, device: str, gpus: int, limit: int = 0, timeout: float = 400) -> dict[str, Any]:
    """`measured`, by a new process or several; `error` where it did not end well."""
    own = [str(Path(__file__)), "--device", device, "--one", json.dumps(case), "--limit", str(limit)]
    start = torchrun(gpus) if gpus > 1 else [sys.executable]
    try:
        done = subprocess.run([*start, *own], capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"plan"')]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip() or done.stdout.strip())[-1500:]}
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
        rows.append(("together", found["plan"]["planned_gib"], taken["together, at most"]))
        rows.append(("together, less check", found["plan"]["planned_gib"] - check, taken["together, now"]))
    return [
        (name, p, u, abs(p - u) <= (0.05 * u if name.startswith("together") else max(0.1 * u, 0.5)))
        for name, p, u in rows
        if p or u
    ]


def edges(count: int, seed: int, device: str) -> list[dict[str, Any]]:
    """Random workloads on devices near the size that they need."""
    from lockstep.session.build import settled
    from lockstep.session.memory import model_config, workload

    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        arch = draw.choice(["qwen3-0.6b", "qwen3-0.6b", "qwen3-1.7b"])
        tokens, length = draw.choice([2048, 4096, 8192, 12288, 16384, 32768]), draw.choice([64, 128, 256, 512])
        case = Case(arch, tokens, draw.choice([8, 16, 32]), length)
        config = settled(configuration(case, device), 1, torch.device("cuda"))
        w = workload(config, 1, True, model_config(config), longest_prompt=64, prompt_limit=4096)
        least = planning(w, 0).total  # everything computed again, and next to no cache
        limit = int(least * draw.uniform(0.9, 1.3))
        accepted = planning(w, limit).fits
        form = case if accepted else case._replace(recompute=True, cache=w.sequence_tokens + 32)
        found = in_a_process(form, device, 1, limit if accepted else int(0.95 * limit))
        ran = "error" not in found
        rows.append({"case": case.title, "limit_gib": limit / GIB, "accepted": accepted, "ran": ran, **found})
        verdict = "as planned" if ran == accepted else "NOT AS PLANNED"
        about = found.get("error", "")[-300:] if not ran else ""
        print(f"{case.title}, {limit / GIB:.1f} GiB: {'accepted' if accepted else 'refused'}, {verdict} {about}")
    return rows


def main() -> None:
    """See the module's description."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpus", type=int, default=1, help="processes, one a GPU (default: 1)")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the cases, from 0 (default: all)")
    parser.add_argument("--edges", type=int, default=0, metavar="N", help="random plans in place of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of --edges")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one = measured(Case(*json.loads(options.one)), options.device, options.limit)
        if one.pop("rank") == 0:
            print(json.dumps(one), flush=True)
        return
    if options.edges:
        found = edges(options.edges, options.seed, options.device)
        save("memory_plan", {"edges": found, "complete": True}, options.json)
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
