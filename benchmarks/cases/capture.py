"""Eager, captured and CUDA-graph runs of the policy step and of decoding: equal bit for bit, and how long each takes.

The train step is the seed workload's: groups of 8 share a prompt, top-p sampling, parity compared, clip and AdamW. On a
CPU the CUDA graphs are stood in for by the fake recorder, whose times mean nothing. A section that fails is named in
the table and does not stop the others; the exit code is 1 when any failed or differed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Report, random_model, seconds

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.models import Decoder
from lockstep.timings import Span, Timings
from lockstep.trainer import Trainer, pack
from lockstep.types import PackedBatch, RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory

WAYS: dict[str, CompileConfig | None] = {
    "eager": None,
    "eager again": None,
    "captured": CompileConfig("step", "none"),
    "CUDA graph, piecewise": CompileConfig("step", "piecewise"),
    "CUDA graph": CompileConfig("step", "full"),
    "CUDA graph, recompute": CompileConfig("step", cudagraph_mode="full", recompute=("full",)),
}
UPDATES = 3
LEARNING_RATE = 1e-5
GROUP = 8
GIB = 2**30


def make_runtime(way: str, device: torch.device) -> Runtime:
    return runtime_of(WAYS[way], device)


def runtime_of(config: CompileConfig | None, device: torch.device) -> Runtime:
    """On a CPU with a recorder that stands in for CUDA graphs."""
    if config is None:
        return EAGER
    recorded_on_cpu = device.type == "cpu" and config.cudagraph_mode != "none"
    if not recorded_on_cpu:
        return Runtime(config, device)
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from fake_recorder import FakeRecorder

    return Runtime(config, device, recorder=FakeRecorder())


def train_batch(model: Decoder, prompts: int, prompt_length: int, length: int) -> PackedBatch:
    """Random tokens; random old log-probs, so that ratios, clips and differences are all there. On the host."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, model.config.vocab_size, (count,), generator=generator).tolist()

    def logprobs() -> list[float]:
        return (-12 + torch.randn(length, generator=generator)).tolist()

    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    weight = 1 / (length * prompts * GROUP)
    groups = []
    for _ in range(prompts):
        prompt = Segment(tokens(prompt_length))
        turns = [Segment(tokens(length), True, logprobs(), logprobs()) for _ in range(GROUP)]
        made = [Trajectory([prompt, t], advantage=(-1.0) ** i, loss_weight=weight) for i, t in enumerate(turns)]
        groups.append(RolloutGroup(made, sampling))
    (batch,) = pack(groups, max_tokens=1 << 17, check_parity=True)
    return batch


class Memory:
    """Peak memory within, in GiB; zeros on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        self.figures: dict[str, float] = {}

    def __enter__(self) -> Memory:
        if self.on:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            self.figures = {"peak_gib": allocated / GIB, "reserved_gib": reserved / GIB}


class Driver:
    """Seconds that the host spends in the driver to launch a runtime's recorded graphs, and to copy their inputs."""

    def __init__(self, runtime: Runtime) -> None:
        self.seconds = 0.0
        for function in runtime.programs:
            for graph in function.graphs.values():
                if graph._recording is not None and not graph.captured.split_at:  # between pieces, Python calls
                    graph._recording.replay = self._watched(graph._recording.replay)
                    graph._own.fill_whole = self._watched(graph._own.fill_whole)

    def _watched(self, launch: Callable[..., None]) -> Callable[..., None]:
        def watched(*args: object) -> None:
            began = time.perf_counter()
            launch(*args)
            self.seconds += time.perf_counter() - began

        return watched


def timed(
    run: Callable[[], object], repeats: int, device: torch.device, driver: Driver | None = None
) -> dict[str, float]:
    """Median milliseconds: in all; of the host, to the end of its launches; and of that without the driver's part. The
    host's from an idle device, where it has waited and its caches are cold, and `queued` behind a run that the device
    is at."""
    driver = driver or Driver(EAGER)
    total = [seconds(run, device.type) for _ in range(repeats)]
    host: dict[str, list[float]] = {"": [], "queued_": []}
    python: dict[str, list[float]] = {"": [], "queued_": []}
    for _ in range(repeats):
        for way in host:
            if device.type == "cuda":
                torch.cuda.synchronize()
            if way:
                run()
            began, before = time.perf_counter(), driver.seconds
            run()
            host[way].append(time.perf_counter() - began)
            python[way].append(host[way][-1] - (driver.seconds - before))
    medians = {"ms": total} | {f"{way}host_ms": t for way, t in host.items()}
    medians |= {f"{way}python_ms": t for way, t in python.items()}
    return {name: statistics.median(times) * 1e3 for name, times in medians.items()} | {"min_ms": min(total) * 1e3}


def train_way(way: str, source: Decoder, packed: PackedBatch, repeats: int) -> tuple[list[Any], dict[str, Any]]:
    """Hashes of all gradients, weights and moments that `UPDATES` updates leave behind, and the times of each part and
    of both, one behind the other."""
    device = source.embed.device
    batch = packed.to(device)
    runtime = make_runtime(way, device)
    with Memory(device) as memory:
        model = copy.deepcopy(source)
        trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), LossConfig(), enforce_parity=False, runtime=runtime)
        evidence: list[Any] = []
        began = time.perf_counter()
        for _ in range(UPDATES):
            trainer.forward_backward(batch)
            evidence.append(int(fingerprint(trainer.flat.grad)))
            evidence.append(trainer.optim_step(LEARNING_RATE))
        first_steps = time.perf_counter() - began
        evidence += [int(fingerprint(t)) for t in (trainer.flat.data, *trainer.state()[0].values())]
        statics = {"loss_type": trainer.loss.loss_type, "with_support": False}
        scored = trainer.programs.launch("forward_backward", batch, **statics)
        batch.old_logprob_C.copy_(scored["logprob_C"])  # so no difference is found, and with a rate of 0 none arises
        batch.old_model_logprob_C.copy_(scored["model_logprob_C"])
        trainer.optim_step(0.0)
        driver = Driver(runtime)

        def step() -> None:
            trainer.forward_backward(batch)
            trainer.launch_optim_step(0.0)

        figures: dict[str, Any] = {
            "forward_backward": timed(lambda: trainer.forward_backward(batch), repeats, device, driver),
            "optim_step": timed(lambda: trainer.launch_optim_step(0.0), repeats, device, driver),
            "step": timed(step, repeats, device, driver),
            "first_steps_s": first_steps,
        }
    figures |= memory.figures
    if runtime.compiles:
        graphs = {f.name: g for f in runtime.programs for g in f.graphs.values()}
        figures["graphs"] = {name: list(g.captured.log) for name, g in graphs.items()}
        figures["replays"] = dict(runtime.replays)
        runtime.close()
    return evidence, figures


def decode_way(way: str, model: Decoder, sequences: int, prompt_length: int, length: int, repeats: int):
    """Completions of `repeats` rounds, and milliseconds a decode step once all prompts are in: in all, and those in
    which the host launches it."""
    device = model.embed.device
    runtime = make_runtime(way, device)
    groups = max(1, sequences // GROUP)
    sampling = SamplingParams(
        temperature=0.8, top_p=0.95, max_completion_length=length, n=sequences // groups, ignore_eos=True
    )
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, model.config.vocab_size, (groups, prompt_length), generator=generator).tolist()
    config = GeneratorConfig(prefix_caching=False)
    tokens = (prompt_length + length + config.page_size) * sequences
    with Memory(device) as memory:
        timings = Timings(keep_spans=True)
        engine = Engine(SharedWeights(model), config, tokens, runtime=runtime)
        engine.timings = timings
        rounds, times, host = [], [], []
        for _ in range(repeats + 1):
            for g, prompt in enumerate(prompts):
                engine.add_request(prompt, sampling, SampleIdentity(0, 0, 0, g))
            while engine.scheduler.waiting or len(engine.scheduler.running) < sequences:
                engine.advance()
            engine.drain()
            steps = engine.scheduler.running[0].remaining
            done: dict[int, Any] = {}
            timings.take_spans()
            times.append(seconds(lambda done=done: drain(engine, done, groups), device.type) / steps)
            host.append(host_ms_a_step(timings.take_spans()))
            rounds.append([(c.token_ids, c.logprobs, c.model_logprobs) for i in sorted(done) for c in done[i]])
    figures = {"ms_a_step": statistics.median(times[1:]) * 1e3, "first_round_ms_a_step": times[0] * 1e3}
    figures |= {"host_ms_a_step": statistics.median(host[1:])}
    figures |= {"tokens_per_s": sequences / statistics.median(times[1:]), **memory.figures}
    if runtime.compiles:
        figures["replays"] = runtime.replays.total()
        runtime.close()
    return rounds, figures


def host_ms_a_step(spans: list[Span]) -> float:
    """Host milliseconds of a decode step's launch, from what an engine measured."""
    launches = [span for span in spans if span.name == "decode"]
    return 1e3 * sum(span.seconds for span in launches) / max(1, sum(int(span.facts["steps"]) for span in launches))


def drain(engine: Engine, done: dict[int, Any], count: int) -> None:
    while len(done) < count:
        waiting = dict(engine.requests)
        engine.advance()
        done |= {i: [s.completion for s in of] for i, of in waiting.items() if i not in engine.requests}


def section(name: str, ways: dict[str, Callable[[], tuple[list[Any], dict[str, Any]]]]) -> dict[str, Any]:
    """Run each way; compare what it leaves behind with the first's. A failure is printed and recorded."""
    figures: dict[str, Any] = {}
    expected = None
    for way, run in ways.items():
        print(f"{name}: {way}", file=sys.stderr, flush=True)
        try:
            evidence, figures[way] = run()
            expected = evidence if way == "eager" else expected
            figures[way]["identical"] = expected is not None and evidence == expected
        except Exception as error:
            traceback.print_exc()
            figures[way] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return figures


def train_rows(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for way, f in figures.items():
        if "failed" in f:
            rows.append(["train", way, "FAILED", f["failed"][:60], "", "", "", ""])
            continue
        for part in ("forward_backward", "optim_step", "step"):
            t, peak = f[part], f"{f.get('peak_gib', 0):.1f}/{f.get('reserved_gib', 0):.1f}"
            times = (f"{t[name]:.2f}" for name in ("ms", "host_ms", "python_ms", "queued_python_ms"))
            rows.append([part, way, str(f["identical"]), *times, peak])
    return rows


def decode_rows(name: str, figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for way, f in figures.items():
        if "failed" in f:
            rows.append([name, way, "FAILED", f["failed"][:60], "", "", "", ""])
        else:
            peak = f"{f.get('peak_gib', 0):.1f}/{f.get('reserved_gib', 0):.1f}"
            times = f"{f['ms_a_step']:.3f}", f"{f['host_ms_a_step']:.3f}"
            rows.append([name, way, str(f["identical"]), *times, "", "", peak])
    return rows


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--prompts", type=int, default=5, help="groups of 8 in the train step (default: 5)")
    parser.add_argument("--prompt-length", type=int, help="default: 145 on a GPU, 30 on a CPU")
    parser.add_argument("--length", type=int, help="new tokens; default: 100 on a GPU, 20 on a CPU")
    parser.add_argument("--decode-length", type=int, help="new tokens decoded; default: 40 on a GPU, 20 on a CPU")
    parser.add_argument("--sequences", type=int, nargs="*", help="decoded at once; default: 1 40 256 on a GPU, 1 16")
    parser.add_argument("--skip", choices=["train", "decode"], nargs="*", default=[])
    parser.add_argument(
        "--ways", choices=list(WAYS), nargs="*", default=list(WAYS), help="of the train step; default: all"
    )


def measure(args: argparse.Namespace, report: Report) -> bool:
    on_cpu = args.device == "cpu"
    prompt_length, length = args.prompt_length or (30 if on_cpu else 145), args.length or (20 if on_cpu else 100)
    arch, decoded = args.arch or ("tiny" if on_cpu else "qwen3-0.6b"), args.decode_length or (20 if on_cpu else 40)
    model = random_model(arch, args.device)
    figures = report.figures
    figures |= {"arch": arch, "dtype": str(model.embed.dtype)}
    figures |= {"prompt_length": prompt_length, "length": length, "decoded": decoded}
    rows = [["part", "way", "identical", "ms", "host ms", "Python ms", "queued", "GiB peak/reserved"]]
    if "train" not in args.skip:
        batch = train_batch(model, args.prompts, prompt_length, length)
        figures["packed_tokens"] = batch.tokens_T.numel()
        ways = {way: (lambda way=way: train_way(way, model, batch, args.repeats)) for way in args.ways}
        figures["train"] = section("train", ways)
        rows += train_rows(figures["train"])
        report.save()
    for sequences in [] if "decode" in args.skip else (args.sequences or ([1, 16] if on_cpu else [1, 40, 256])):
        ways = {
            way: (lambda way=way, n=sequences: decode_way(way, model, n, prompt_length, decoded, args.repeats))
            for way in ("eager", "captured", "CUDA graph, piecewise", "CUDA graph")
        }
        name = f"decode {sequences}"
        figures[name] = section(name, ways)
        rows += decode_rows(name, figures[name])
        report.save()
    if on_cpu:
        rows = [[cell.replace("CUDA graph", "fake recorder") for cell in row] for row in rows]
    report.tables.append(rows)
    return any(row[2] != "True" for row in rows[1:])
