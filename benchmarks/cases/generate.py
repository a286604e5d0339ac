"""Tokens a second of generation, beside `transformers.generate` or vLLM on the same weights in the same run.

vLLM runs twice, by default and in its batch-invariant mode, each in a process that has ended before ours begins.

On a GPU decoding and prefill run as CUDA graphs. The floor there is the bytes that a decode step must read (weights
once, a group's prompt once, each sequence's own keys and values) at the bandwidth that this machine's memory gives a
plain sum; on a CPU it is the time of the matrix products alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import Report, alternate, bandwidth, random_model, summary, vllm_times

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.generator import Engine, SharedWeights, plan_cache_tokens
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder, ModelConfig, num_parameters, save_model
from lockstep.types import SampleIdentity, SamplingParams


@dataclass(frozen=True)
class Case:
    """`prompts` prompts of `prompt` tokens, `samples` completions each of exactly `new` tokens."""

    prompts: int
    samples: int
    prompt: int
    new: int
    temperature: float = 1.0
    top_p: float = 1.0

    @property
    def sequences(self) -> int:
        """Completions in all."""
        return self.prompts * self.samples

    @property
    def sampling(self) -> SamplingParams:
        """As the engine takes it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            n=self.samples,
            max_completion_length=self.new,
            ignore_eos=True,
        )


CASES = {
    "cpu": Case(4, 8, 64, 64),
    "cpu, no shared prompt": Case(32, 1, 64, 64),
    "seed": Case(5, 8, 145, 100),
    "seed, top-p": Case(5, 8, 145, 100, 0.8, 0.95),
    "mid": Case(32, 8, 256, 512),
    "big": Case(64, 8, 256, 1024),
    "one": Case(1, 1, 64, 256),
}
MIXED = "mixed"
MIXED_ROUNDS = 3


@dataclass(frozen=True)
class Mixed:
    """Groups of requests whose lengths are drawn from `prompt` and `new`, and sequences that run at once."""

    groups: int
    samples: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    running: int


MIXED_CASE, SMALL_MIXED_CASE = Mixed(64, 8, (32, 1024), (16, 1024), 256), Mixed(12, 2, (4, 32), (4, 32), 8)


def make_engine(model: Decoder, sequences: int, length: int, sampling: SamplingParams) -> Engine:
    """Captured and warmed up on a GPU, eager on a CPU; no prefix is left over from one call to the next."""
    device = model.embed.device
    runtime = Runtime(CompileConfig("step", cudagraph_mode="full"), device) if device.type == "cuda" else EAGER
    config = GeneratorConfig(prefix_caching=False, max_num_seqs=sequences)
    tokens = plan_cache_tokens(config, model.config, model.embed.dtype, device, sequences, length)
    engine = Engine(SharedWeights(model), config, tokens, runtime=runtime)
    engine.warm_up(sequences, length, sampling)
    if runtime.compiles:
        runtime.end_warm_up()
    return engine


class Ours:
    """One engine; every call has an identity of its own."""

    def __init__(self, model: Decoder, case: Case, prompts: list[list[int]]) -> None:
        self.engine = make_engine(model, case.sequences, case.prompt + case.new, case.sampling)
        self.params = case.sampling
        self.prompts = prompts
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        identities = [SampleIdentity(0, 0, self.calls, g) for g in range(len(self.prompts))]
        self.engine.generate(self.prompts, [self.params] * len(self.prompts), identities)


def random_prompts(count: int, lengths: Callable[[], int]) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(256) for _ in range(lengths())] for _ in range(count)]


def mixed(model: Decoder, case: Mixed) -> dict[str, Any]:
    """Groups of mixed lengths that arrive twice as fast as they can be served, and as many of the mean lengths at once.

    Rates are of the time in which every slot is taken: from the first moment that so many sequences run until nothing
    waits any more. Medians over rounds of both in turn.
    """
    draw = random.Random(2)
    shapes = [(draw.randint(*case.prompt), draw.randint(*case.new)) for _ in range(case.groups)]
    prompt, new = (round(statistics.mean(column)) for column in zip(*shapes, strict=True))
    base = SamplingParams(n=case.samples, ignore_eos=True)
    engine = make_engine(model, case.running, case.prompt[1] + case.new[1], base)
    fixed, rates = [], []
    for turn in range(MIXED_ROUNDS):
        fixed.append(saturated_rate(engine, [(prompt, new)] * case.groups, base, 0.0, 2 * turn))
        arrival = case.samples * new / fixed[-1] / 2
        rates.append(saturated_rate(engine, shapes, base, arrival, 2 * turn + 1))
    ratios = [rate / of for rate, of in zip(rates, fixed, strict=True)]
    found = {"mixed_tokens_per_s": rates, "fixed_tokens_per_s": fixed, "ratio": ratios}
    recompiles = engine.runtime.recompiles
    return {name: statistics.median(of) for name, of in found.items()} | {"ratios": ratios, "recompiles": recompiles}


def saturated_rate(
    engine: Engine, shapes: list[tuple[int, int]], base: SamplingParams, interval: float, call: int
) -> float:
    """Tokens a second while every slot is taken; group i arrives `i * interval` seconds after the first."""
    lengths = iter([p for p, _ in shapes])
    prompts = random_prompts(len(shapes), lambda: next(lengths))
    waiting = list(enumerate(zip(prompts, (n for _, n in shapes), strict=True)))
    finished = 0
    marks: list[tuple[float, int]] = []
    began = time.perf_counter()
    while waiting or engine.scheduler.busy:
        while waiting and time.perf_counter() - began >= waiting[0][0] * interval:
            i, (prompt, new) = waiting.pop(0)
            engine.add_request(prompt, replace(base, max_completion_length=new), SampleIdentity(0, 0, call, i))
        finished += sum(len(s.token_ids) for s in engine.advance() if s.completion)
        running = engine.scheduler.running
        if len(running) == engine.config.max_num_seqs or (marks and (waiting or engine.scheduler.waiting)):
            partial = sum(len(s.token_ids) for s in running)
            marks.append((time.perf_counter(), finished + partial))
    (first, start), (last, end) = marks[0], marks[-1]
    return (end - start) / (last - first)


class Transformers:
    """`generate` on the same weights; every sample carries its own copy of the prompt, as its users call it."""

    def __init__(self, model: Decoder, case: Case, prompts: list[list[int]]) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder))
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.embed.dtype)
        self.model = loaded.to(model.embed.device).eval()
        self.ids = torch.tensor(prompts, device=model.embed.device).repeat_interleave(case.samples, dim=0)
        self.case = case

    def __call__(self) -> None:
        self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.case.new,
            min_new_tokens=self.case.new,
            do_sample=True,
            temperature=self.case.temperature,
            top_k=0,
            top_p=self.case.top_p,
            pad_token_id=0,
        )


def products(model: Decoder, case: Case) -> Callable[[], None]:
    """The matrix products of every decode step and nothing else."""
    layers = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    weights = [w.detach() for w in (*layers, model.lm_head)]
    inputs = {w.shape[1]: torch.randn(case.sequences, w.shape[1]).to(w) for w in weights}

    @torch.inference_mode()
    def run() -> None:
        for _ in range(case.new):
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return run


def byte_floor_s(model: Decoder, case: Case) -> float:
    """Seconds to read what all decode steps must, at the bandwidth of a plain sum here."""
    return decode_bytes(model.config, case, model.embed.element_size()) / bandwidth(model.embed.device.type)


def decode_bytes(c: ModelConfig, case: Case, size: int) -> float:
    """Weights once a step, a group's prompt once, each sequence's own keys and values; elements of `size` bytes."""
    weights = num_parameters(c) - (0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size)
    token = 2 * c.num_kv_heads * c.head_dim * c.num_layers  # keys and values
    own = case.sequences * case.new * (case.new - 1) / 2
    return size * (case.new * weights + token * (case.new * case.prompts * case.prompt + own))


def measured(model: Decoder, case: Case, peer: str, repeats: int) -> dict[str, Any]:
    """Each system's times and rates."""
    device = model.embed.device.type
    prompts = random_prompts(case.prompts, lambda: case.prompt)
    runs: dict[str, Callable[[], object]] = {"lockstep": Ours(model, case, prompts)}
    if device == "cpu":
        runs["floor (matrix products)"] = products(model, case)
    if peer == "transformers":
        runs["transformers"] = Transformers(model, case, prompts)
    systems = {name: summary(times) for name, times in alternate(runs, repeats, device).items()}
    if device == "cuda":
        systems["floor (bytes of decode)"] = summary([byte_floor_s(model, case)])
    for s in systems.values():
        s["tokens_per_s"] = case.sequences * case.new / s["median_s"]
    return {**vars(case), "systems": systems}


def vllm_systems(model: Decoder, names: list[str], repeats: int) -> dict[str, dict[str, Any]]:
    """Times of vLLM's two modes by case; of one that failed the end of what it printed."""
    systems: dict[str, dict[str, Any]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, Path(folder) / "model")
        for mode, switch in (("vLLM", "0"), ("vLLM, batch invariant", "1")):
            cases = {name: vars(CASES[name]) for name in names}
            found = vllm_times(Path(folder) / "model", cases, repeats, VLLM_BATCH_INVARIANT=switch)
            print(f"{mode}: {list(found['cases'])} {found.get('failed', '')}", file=sys.stderr, flush=True)
            for name, times in found["cases"].items():
                about = {"version": found["version"], "start_s": found["start_s"]}
                rate = CASES[name].sequences * CASES[name].new / statistics.median(times)
                systems[name][mode] = {**summary(times), "tokens_per_s": rate, **about}
    return systems


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=[*CASES, MIXED], action="append", help="default: the device's")
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--peer", choices=["transformers", "vllm", "none"], default="transformers")


def measure(args: argparse.Namespace, report: Report) -> None:
    on_cpu = args.device == "cpu"
    names = args.case or (["cpu", "cpu, no shared prompt"] if on_cpu else ["seed", "seed, top-p", "one"])
    model = random_model(args.arch or ("tiny" if on_cpu else "qwen3-0.6b"), args.device)
    figures = report.figures
    figures |= {"arch": args.arch or "default", "dtype": str(model.embed.dtype), "cases": {}}
    rows = [["case", "system", "tok/s", "median s", "min", "max", "ms a token step"]]
    fixed = [name for name in names if name != MIXED]
    peers = vllm_systems(model, fixed, args.repeats) if args.peer == "vllm" else {}
    for name in names:
        print(name, file=sys.stderr, flush=True)
        report.save()
        if name == MIXED:
            found = figures["cases"][name] = mixed(model, SMALL_MIXED_CASE if on_cpu else MIXED_CASE)
            rows.append([name, "lockstep", f"{found['mixed_tokens_per_s']:,.0f}", "", "", "", ""])
            rows.append([name, "fixed length", f"{found['fixed_tokens_per_s']:,.0f}", "", "", "", ""])
            continue
        case = CASES[name]
        figures["cases"][name] = measured(model, case, args.peer, args.repeats)
        figures["cases"][name]["systems"] |= peers.get(name, {})
        for system, s in figures["cases"][name]["systems"].items():
            shown = [f"{s[k]:.4f}" for k in ("median_s", "min_s", "max_s")]
            rows.append([name, system, f"{s['tokens_per_s']:,.0f}", *shown, f"{s['median_s'] / case.new * 1e3:.3f}"])
    report.tables.append(rows)
