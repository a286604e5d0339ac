"""Products shared by more and more processes: whether every pair of a generator's and a trainer's degree has the same
words, and what a decode step takes.

The processes join in one layout after the other. In each of the generator's, groups of `degree` draw the same
completions, half of them by top-p, whose tokens and log-probabilities must be those of all other degrees; then each of
the trainer's scores what each of the generator's drew, in its training graph. Weights are random and have their real
shapes. A decode step's time is that of some tokens more, over them, behind prompts that are read before; beside it
stands the time of reading its weights and keys and values at the bandwidth that a plain sum has here. With `--vllm`
its decode steps on so many GPUs stand beside them: its fastest ones, which are not batch invariant, timed in the same
way, with weights of its own. Where ranks share GPUs, nothing is timed, and fewer words are drawn.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Report, bandwidth, first_layers, require_gpus, torchrun, vllm_times, write_json

from lockstep.models import ModelConfig
from lockstep.models.checks import is_divisible
from lockstep.models.hf.config import to_hf

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from sharing import AS_RANK, WHERE, on_shared_gpus

LIMIT_S = 570.0
MOST_KERNELS = 16  # told of a decode step
FEW = 8  # tokens that are drawn before those that are timed
PUSHED = "pushed"
DecodeCase = tuple[str, int, int, int]  # name, prompts, samples of each, tokens of a prompt
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "decode": [("1 row", 1, 1, 64), ("8 rows", 8, 1, 64), ("64 rows, context 1,200", 8, 8, 1136)],
        "steps": 128,
        "drawn": (16, 8, 96, 448),  # prompts, samples, tokens of a prompt, of a sample; twice
        "micro_batch": 2048,
        "cache_tokens": 96 * 1024,
    },
    "cpu": {
        "decode": [("8 rows", 8, 1, 8)],
        "steps": 4,
        "drawn": (4, 2, 8, 12),
        "micro_batch": 256,
        "cache_tokens": 4096,
    },
    "shared": {
        "decode": [],
        "steps": 0,
        "drawn": (16, 4, 96, 64),
        "micro_batch": 4096,
        "cache_tokens": 64 * 1024,
    },
}


def part(device: str, given: str) -> dict[str, Any]:
    """One process of several: writes what it finds to a file of the folder, and goes on."""
    from lockstep import machine

    machine.restrict_to_local_gpu()
    about = json.loads(given)
    bench = Bench(about, device)
    for way in about["generator"]:
        bench.generator(*way)
    for tp in about["trainer"]:
        bench.trainer(tp)
    return {}


class Bench:
    """What one process knows: the completions of each of the generator's layouts, and the figures."""

    def __init__(self, about: dict[str, Any], device: str) -> None:
        self.about, self.device, self.size = about, device, SIZES[about["size"]]
        self.config = first_layers(about["arch"], about["layers"])
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.drawn_size = drawn_size(about["size"], about["processes"])
        self.drawn: dict[str, list[Any]] = {}
        self.figures: dict[str, Any] = {"generator": {}, "trainer": {}, "processes": about["processes"]}
        self.source = drawn_weights(device, self.config)

    @contextmanager
    def joined(self, **layout: Any) -> Iterator[tuple[Any, Any, Any]]:
        """World, model and runtime of a layout, for as long as they are needed."""
        from lockstep.config import CompileConfig, ParallelConfig
        from lockstep.distributed import join
        from lockstep.graph import Runtime
        from lockstep.models import load_part

        where = torch.device(self.device)
        gc.collect()  # the last layout's model and its programs refer to one another
        if where.type == "cuda":
            torch.cuda.empty_cache()
        world = join(ParallelConfig(timeout=200, **layout), self.device)
        mode = "full" if self.device == "cuda" else "none"
        runtime = Runtime(CompileConfig("step", cudagraph_mode=mode), where, mesh=world.sizes, peers=world)
        model = load_part(self.source, self.dtype, where, world.generator_mesh)
        try:
            yield world, model, runtime
        finally:
            runtime.close()
            world.close()

    def generator(self, degree: int, pushed: bool) -> None:
        """Decode in groups of so many, timed and compared with the other degrees."""
        from lockstep.config import GeneratorConfig
        from lockstep.generator import Engine, SharedWeights

        began = time.perf_counter()
        with self.joined(generator_tp=degree, symmetric_memory=pushed) as (world, model, runtime):
            prompts, samples, *_ = self.drawn_size
            rows = max([prompts * samples, *(p * s for _, p, s, _ in self.size["decode"])])
            config = GeneratorConfig(prefix_caching=False, max_num_seqs=rows)
            engine = Engine(SharedWeights(model), config, self.size["cache_tokens"], runtime=runtime)
            longest = [p + self.size["steps"] + FEW for *_, p in self.size["decode"]]
            for kind in kinds(samples):
                engine.warm_up(rows, max([sum(self.drawn_size[2:]), *longest]), kind)
            runtime.end_warm_up()
            found: dict[str, Any] = {"ready_s": time.perf_counter() - began, "replaced": _machine(model)}
            for case in self.size["decode"]:
                found[case[0]] = self.decode(engine, model, world, case)
            drawn, found["draw_s"] = self.draw(engine)
            own = hashlib.sha256(repr(drawn).encode()).hexdigest()
            found["alike on all ranks"] = len(set(world.gather(own))) == 1
            found["words"], found["tokens"] = own, sum(len(c.token_ids) for g in drawn for c in g.rollouts)
            found["recompiles"], found["seconds"] = runtime.recompiles, time.perf_counter() - began
            del engine
        self.drawn.setdefault(str(degree), drawn)
        self.figures["generator"][f"{degree}{', ' + PUSHED if pushed else ''}"] = found
        self.save(world)

    def decode(self, engine: Any, model: Any, world: Any, case: DecodeCase) -> dict[str, Any]:
        """Milliseconds of a step, the slowest process's median, and of its bytes alone; and this process's kernels."""
        from cases.kernels import kernels

        from lockstep.types import SampleIdentity, SamplingParams

        _, prompts, samples, length = case
        ids = [[(31 * i + j) % 256 for j in range(length)] for i in range(prompts)]
        few, more = FEW, FEW + self.size["steps"]

        def run(tokens: int) -> float:
            params = SamplingParams(n=samples, max_completion_length=tokens, ignore_eos=True)
            world.gather(None)
            began = time.perf_counter()
            engine.generate(ids, [params] * prompts, [SampleIdentity(0, 0, tokens, i) for i in range(prompts)])
            return time.perf_counter() - began

        run(few)
        times = [(run(more) - run(few)) / self.size["steps"] for _ in range(self.about["repeats"])]
        launched = kernels(lambda: run(more) and more, self.device)  # prompts among them
        slowest = max(world.gather(statistics.median(times)))
        weights = sum(p.nbytes for name, p in model.named_parameters() if name != "embed")
        if self.config.tie_word_embeddings:  # of which each computes with its share
            weights += model.embed.nbytes // world.generator_tp
        cache = engine.cache
        token = (cache.k.nbytes + cache.v.nbytes) / cache.num_pages / cache.page_size
        read = weights + token * (prompts * length + prompts * samples * (few + more) / 2)
        top = [{"kernel": name, "us": us, "launches": count} for name, us, count in launched[:MOST_KERNELS]]
        return {"ms": slowest * 1e3, "floor_ms": read / self.about["bandwidth"] * 1e3, "kernels": top}

    def draw(self, engine: Any) -> tuple[list[Any], float]:
        """Groups as the trainer takes them, and the seconds."""
        from lockstep.types import RolloutGroup, SampleIdentity

        prompts, samples, length, new = self.drawn_size
        ids = [[(17 * i + 7 * j) % 256 for j in range(length)] for i in range(prompts)]
        groups, began = [], time.perf_counter()
        for step, params in enumerate(replace(kind, max_completion_length=new) for kind in kinds(samples)):
            identities = [SampleIdentity(1, 0, step, group) for group in range(prompts)]
            for group, found in enumerate(engine.generate(ids, [params] * prompts, identities)):
                weighed = [
                    replace(c, name=f"{step}.{group}.{i}", advantage=(-1.0) ** i, loss_weight=1e-4)
                    for i, c in enumerate(found)
                ]
                groups.append(RolloutGroup(weighed, params))
        return groups, time.perf_counter() - began

    def trainer(self, tp: int) -> None:
        """Score all that was drawn, in the training graph of this layout."""
        from lockstep.config import LossConfig, OptimizerConfig
        from lockstep.trainer import Packing, Trainer, pack_shards

        began = time.perf_counter()
        with self.joined(tp=tp, generator_tp=tp) as (world, model, runtime):
            options = {"world": world, "runtime": runtime, "source": self.source}
            trainer = Trainer(model, OptimizerConfig(), LossConfig(), **options)
            shards, found = world.mesh.fsdp, {}
            how = Packing(self.size["micro_batch"])
            for degree, groups in self.drawn.items():
                started = time.perf_counter()
                dealt = [groups[i :: shards.size] for i in range(shards.size)]
                for batch in pack_shards(dealt, shards.local_items(range(shards.size)), how, check_parity=True):
                    trainer.forward_backward(batch.to(torch.device(self.device)))
                result = trainer.finish_check()
                found[degree] = {
                    "tokens": result.tokens_checked,
                    "different": result.tokens_different,
                    "not covered": result.tokens_not_covered,
                    "seconds": time.perf_counter() - started,
                }
            levels = sorted({program.level for program in runtime.programs if program.name == "forward_backward"})
            name = f"fsdp {shards.size} x tp {tp}"
            self.figures["trainer"][name] = {"of": found, "seconds": time.perf_counter() - began, "levels": levels}
            del trainer
        self.save(world)

    def save(self, world: Any) -> None:
        if world.is_first:
            write_json(self.figures, Path(self.about["folder"]) / "found.json")


def drawn_size(size: str, processes: int) -> tuple[int, int, int, int]:
    """Prompts, samples of each, tokens of a prompt and of a sample: as many prompts of each kind for every shard, as
    shards are computed alike."""
    prompts, *others = SIZES[size]["drawn"]
    return -(-prompts // processes) * processes, *others


def kinds(samples: int) -> list[Any]:
    """Plain, and by top-p."""
    from lockstep.types import SamplingParams

    plain = SamplingParams(temperature=1.0, n=samples, ignore_eos=True)
    return [plain, replace(plain, top_p=0.95)]


def drawn_weights(device: str, config: Any) -> Any:
    """Random weights; on a GPU they are drawn there, each whole by a seed of its own: the same in any layout."""
    from lockstep.models import Decoder
    from lockstep.models.init import INITIALIZER_RANGE, RandomWeights

    class Drawn(RandomWeights):
        @torch.no_grad()
        def fill(self, wanted: Any) -> None:
            whole = Decoder(self.config, torch.float32, "meta")
            for name, parameter in whole.named_parameters():
                if not wanted.get(name):
                    continue
                generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
                drawn = torch.empty(parameter.numel(), device=device)
                drawn.normal_(0, INITIALIZER_RANGE, generator=generator)
                if (value := whole.init_constants.get(name)) is not None:
                    drawn.fill_(value)
                for values, first in wanted[name]:
                    values.copy_(drawn[first : first + values.numel()])

    return (Drawn if device == "cuda" else RandomWeights)(config, 0)


def _machine(model: Any) -> list[str]:
    """Products that this machine's check would replace, of those that were made so far; none, or words may differ."""
    if not model.embed.is_cuda:
        return []
    from lockstep.ops.linear import choice
    from lockstep.ops.machine_check import check

    before = dict(choice.overrides)
    check.check(check.computed_products(), [], model.embed.device, model.embed.dtype)
    return sorted(str(key) for key in choice.overrides.keys() - before.keys())


def flags(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--arch", default="qwen3-0.6b" if on_gpu else "tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all)")
    parser.add_argument("--generator", type=int, nargs="*", default=[1, 2], help="degrees (default: 1 2)")
    parser.add_argument("--pushed", type=int, nargs="*", default=[2] if on_gpu else [], help="degrees, words pushed")
    parser.add_argument("--trainer", type=int, nargs="*", default=[1, 2], help="degrees (default: 1 2)")
    parser.add_argument("--ranks-share-gpu", action="store_true", help="a few on each: for their words alone")
    parser.add_argument("--vllm", type=int, nargs="*", default=[], help="its degrees (default: none)")


def measure(given: argparse.Namespace, report: Report) -> bool:
    shared = given.ranks_share_gpu and given.device == "cuda"
    require_gpus(given.device, 1 if shared else given.processes)
    require_degrees(first_layers(given.arch, given.layers), given)
    ways = [(degree, False) for degree in given.generator] + [(degree, True) for degree in given.pushed]
    about = {key: getattr(given, key) for key in ("arch", "layers", "trainer", "processes", "repeats")}
    about |= {"generator": ways, "bandwidth": bandwidth(given.device), "size": "shared" if shared else given.device}
    if given.device == "cuda":
        torch.cuda.empty_cache()
    report.figures |= about | ({"where": WHERE} if shared else {})
    with tempfile.TemporaryDirectory() as folder:
        start = [*torchrun(given.processes), *(AS_RANK if shared else [])]
        command = [*start, str(Path(__file__).parents[1] / "run.py"), "degrees", "--part", given.device]
        command.append(json.dumps({**about, "folder": folder}))
        where = on_shared_gpus(given.processes, torch.cuda.device_count()) if shared else {}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | where)
        _watched(process, Path(folder) / "found.json", partial(_keep, report))
    for degree in given.vllm:
        report.figures.setdefault("vllm", {})[str(degree)] = vllm_decode(given, degree)
        report.save()
    return _told(report)


def require_degrees(config: ModelConfig, given: argparse.Namespace) -> None:
    """`SystemExit` where the processes cannot be grouped so, or do not divide the model: before any is started."""
    wanted = sorted({*given.generator, *given.pushed, *given.trainer})
    if odd := [degree for degree in wanted if given.processes % degree or not is_divisible(config, degree)]:
        raise SystemExit(f"{given.processes} processes cannot share {given.arch} by {', '.join(map(str, odd))}")


def vllm_decode(given: argparse.Namespace, degree: int) -> dict[str, Any]:
    """Its milliseconds of a decode step by case, over the same steps as ours, and its version."""
    size = SIZES["cuda"]
    tokens = {"few": FEW, "more": FEW + size["steps"]}
    cases = {
        f"{name}: {which}": {
            "prompts": prompts, "samples": samples, "prompt": length, "new": new, "temperature": 1.0, "top_p": 1.0,
        }
        for name, prompts, samples, length in size["decode"] for which, new in tokens.items()
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_json(to_hf(first_layers(given.arch, given.layers), "bfloat16"), model / "config.json")
        found = vllm_times(model, cases, given.repeats, "--dummy", "--tensor-parallel", str(degree))
    if "failed" in found:
        return found
    times = {name: statistics.median(of) for name, of in found.pop("cases").items()}
    steps = {case[0]: times[f"{case[0]}: more"] - times[f"{case[0]}: few"] for case in size["decode"]}
    return {**found, "ms": {name: 1e3 * seconds / size["steps"] for name, seconds in steps.items()}}


def _keep(report: Report, found: dict[str, Any]) -> None:
    report.figures |= {"found": found}
    report.save()


def _watched(process: subprocess.Popen[bytes], path: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Keep what is found as it comes; `SystemExit` where the processes fail or take too long."""
    until = time.monotonic() + LIMIT_S
    while (code := process.poll()) is None and time.monotonic() < until:
        time.sleep(0.5)
        if path.exists():
            keep(json.loads(path.read_text()))
    process.terminate()
    process.wait()
    if path.exists():
        keep(json.loads(path.read_text()))
    if code != 0:
        raise SystemExit(f"not done after {LIMIT_S:.0f} s" if code is None else f"the processes ended with {code}")


def _told(report: Report) -> bool:
    """The tables; whether any word differs, or a graph was made late."""
    found = report.figures.get("found", {"generator": {}, "trainer": {}})
    ways = found["generator"]
    words = {way["words"] for way in ways.values()}
    rows = [["generator", *(f"{case[0]}, ms" for case in SIZES["cuda"]["decode"]), "floor ms", "ready s", "tokens"]]
    for name, way in ways.items():
        cases = [way.get(case[0], {}) for case in SIZES["cuda"]["decode"]]
        times = [f"{case['ms']:.3f}" if case else "-" for case in cases]
        floor = " ".join(f"{case['floor_ms']:.2f}" for case in cases if case)
        rows.append([name, *times, floor, f"{way['ready_s']:.0f}", f"{way['tokens']:,}"])
    for degree, peer in report.figures.get("vllm", {}).items():
        times = [f"{peer['ms'][case[0]]:.3f}" if "ms" in peer else "failed" for case in SIZES["cuda"]["decode"]]
        rows.append([f"vLLM, {degree}", *times, "", f"{peer.get('start_s', 0):.0f}", ""])
    report.tables.append(rows)
    pairs = [["trainer", *(f"generator {degree}: different of" for degree in found_degrees(found))]]
    different = 0
    for name, layout in found["trainer"].items():
        different += sum(one["different"] + one["not covered"] for one in layout["of"].values())
        pairs.append([name, *(f"{one['different']} of {one['tokens']:,}" for one in layout["of"].values())])
    report.tables.append(pairs)
    alike = all(way["alike on all ranks"] for way in ways.values())
    late = sum(way["recompiles"] for way in ways.values())
    report.figures |= {"same_words": len(words) == 1 and alike, "different": different, "recompiles": late}
    report.notes.append(f"all degrees drew the same words: {report.figures['same_words']}; made late: {late} graphs")
    return not report.figures["same_words"] or bool(different) or bool(late)


def found_degrees(found: dict[str, Any]) -> list[str]:
    """Of the generator's, those that were scored."""
    return list(dict.fromkeys(degree for layout in found["trainer"].values() for degree in layout["of"]))
