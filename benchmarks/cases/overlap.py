"""Training what is finished while the rest decodes, on one GPU: how much each slows the other, and what it would save.

An engine decodes the tail of a long-tailed round (few live rows, at the lengths that so many samples of the round
reach) while the same process replays forward and backward of a packed micro-batch on another stream: on two plain
streams, with decoding at a higher priority, and with the SMs parted between both. What is decoded and the gradients
are compared bit for bit with those of either alone. From the slowdowns a model steps through rounds of drawn lengths,
a group being trained on when all its samples have ended: the part of a step that is saved.

The update, milliseconds of a step of many seconds, is left out. Weights of a loss that are known only when all have
ended, such as one over all tokens of a step, would have to be made up for in the update. On a CPU one side follows the
other, and times mean nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import statistics
import sys
import time
import traceback
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases.capture import WAYS, runtime_of
from cases.generate import random_prompts
from cases.train_step import groups
from common import Report, random_model

from lockstep.config import GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.graph.launch.cudagraph import CudaRecorder
from lockstep.trainer import Trainer, pack
from lockstep.types import PackedBatch, SampleIdentity, SamplingParams

Streams = tuple[torch.cuda.Stream, torch.cuda.Stream] | tuple[None, None]  # of decoding, of training
Words = list[list[tuple[int, float, float]]]  # by sample: tokens with their log-probabilities
ALONE_S, MICRO_BATCHES = 0.25, 3  # what is timed: decoding alone for so long, and beside so many
STEPS = 4  # between two looks of the host, so that it sees soon that they have ended
SAMPLED = 61  # one of so many gradients is compared
DRAWS = 4


@dataclass(frozen=True)
class Round:
    """Lengths of a step's samples, lognormal up to `cap`, and what is measured of it.

    Attributes:
        rows: live ones, ascending. new: tokens that each may decode at the most.
        trained: tokens of a micro-batch.
    """

    rows: tuple[int, ...]
    new: int
    trained: int
    groups: int = 64
    samples: int = 8
    mean: float = 2000.0
    sigma: float = 0.8
    cap: int = 8192

    @property
    def mu(self) -> float:
        return math.log(self.mean) - self.sigma**2 / 2

    def context(self, rows: int) -> int:
        """The length that so many samples of the round are expected to reach, or the longest that can be measured."""
        reached = 1 - min(rows / (self.groups * self.samples), 0.99)
        length = math.exp(statistics.NormalDist(self.mu, self.sigma).inv_cdf(reached))
        return min(int(length), self.cap - self.new)

    def lengths(self, seed: int) -> list[list[int]]:
        """Of each group's samples."""
        drawn = torch.empty(self.groups, self.samples).log_normal_(
            self.mu, self.sigma, generator=torch.Generator().manual_seed(seed)
        )
        return drawn.clamp(1, self.cap).long().tolist()


ROUND, SMALL = Round((4, 16, 64, 128), 1024, 16384), Round((2, 4), 24, 64, groups=4, samples=2, mean=24.0, cap=64)


class Mark:
    """A point in the work of a CPU, as `torch.cuda.Event` is one in a stream's."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Mark) -> float:
        return 1e3 * (end.at - self.at)


def mark(stream: torch.cuda.Stream | None) -> Any:
    if stream is None:
        return Mark()
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class Recorder(CudaRecorder):
    """Records on a stream of choice, whose priority and SMs are then those of the graphs' kernels."""

    def use(self, stream: torch.cuda.Stream) -> None:
        """From here on; all that was recorded before must be closed, and its pool is let go of."""
        self.close()
        self._pool, self._stream = torch.cuda.MemPool(), stream


def new_runtime(device: torch.device) -> Runtime:
    """With a pool of its own, as graphs of one pool may not run side by side."""
    config = WAYS["CUDA graph"]
    assert config is not None
    return Runtime(config, device, Recorder(device)) if device.type == "cuda" else runtime_of(config, device)


def record_on(runtime: Runtime, stream: torch.cuda.Stream | None) -> None:
    """Have all graphs recorded anew on this stream when they are next needed."""
    for program in runtime.programs:
        program.close()
    if isinstance(runtime.recorder, Recorder):
        assert stream is not None
        runtime.recorder.use(stream)


def partition(sms: int) -> Streams:
    """Streams of two green contexts that have the GPU's SMs between them, the first so many.

    By the driver itself: torch's `GreenContext` always takes the first SMs, so two of them overlap, and has not always
    a stream on which graphs can be captured. Raises `RuntimeError`, `AttributeError` or `OSError` where the driver has
    none.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    one, whole, rest = (ctypes.create_string_buffer(1024) for _ in range(3))  # CUdevResource, of 144 bytes
    count, device, sm = ctypes.c_uint(1), torch.cuda.current_device(), 1  # CU_DEV_RESOURCE_TYPE_SM

    def call(name: str, *given: object) -> None:
        if error := getattr(driver, name)(*given):
            raise RuntimeError(f"{name}: CUDA error {error}")

    def stream_of(resource: ctypes.Array[ctypes.c_char]) -> torch.cuda.Stream:
        described, context, stream = (ctypes.c_void_p() for _ in range(3))
        call("cuDevResourceGenerateDesc", ctypes.byref(described), resource, ctypes.c_uint(1))
        call("cuGreenCtxCreate", ctypes.byref(context), described, device, ctypes.c_uint(1))
        call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, ctypes.c_uint(1), 0)  # CU_STREAM_NON_BLOCKING
        assert stream.value
        return torch.cuda.ExternalStream(stream.value)

    call("cuDeviceGetDevResource", device, whole, sm)
    call("cuDevSmResourceSplitByCount", one, ctypes.byref(count), whole, rest, ctypes.c_uint(0), ctypes.c_uint(sms))
    return stream_of(one), stream_of(rest)


class Training:
    """Replays of one micro-batch on a stream of its own.

    Attributes:
        ends: marks behind each. words: a hash of the first one's gradients.
    """

    def __init__(self, trainer: Trainer, batch: PackedBatch) -> None:
        self.trainer, self.batch = trainer, batch
        self.stream: torch.cuda.Stream | None = None

    def start(self) -> None:
        """Launch all that are timed, and wait for none."""
        with on(self.stream):
            self.trainer.flat.grad.zero_()
            self.began, self.ends = mark(self.stream), [self._launch()]
            self.words = fingerprint(self.trainer.flat.grad[::SAMPLED])
            self.ends += [self._launch() for _ in range(MICRO_BATCHES - 1)]

    def _launch(self) -> Any:
        self.trainer.forward_backward(self.batch)
        return mark(self.stream)

    @property
    def ended(self) -> bool:
        return self.ends[-1].query()

    @property
    def ms(self) -> float:
        """Milliseconds of each."""
        return self.began.elapsed_time(self.ends[-1]) / len(self.ends)


@dataclass(frozen=True)
class Decoded:
    """Blocks of decode steps: a mark before them, one behind each with the steps until there, and what was drawn from
    the prefill on."""

    began: Any
    ends: list[tuple[int, Any]]
    words: Words

    def ms(self, until: Any = None) -> float:
        """Milliseconds of a step, over the blocks that ended until this mark; over the first if none did."""
        limit = math.inf if until is None else self.began.elapsed_time(until)
        times = [(steps, self.began.elapsed_time(end)) for steps, end in self.ends]
        steps, ms = [found for found in times if found[1] <= limit or found == times[0]][-1]
        return ms / steps


def synchronize(stream: torch.cuda.Stream | None) -> None:
    if stream is not None:
        torch.cuda.synchronize()


class Bench:
    """An engine and a trainer of one model, each with a runtime of its own."""

    def __init__(self, arch: str, round_: Round, device: str) -> None:
        self.round = round_
        model = random_model(arch, device)
        own = {"trainer": new_runtime(model.embed.device), "engine": new_runtime(model.embed.device)}
        trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=own["trainer"])
        of_rows = [round_.context(next(r for r in round_.rows if i < r)) for i in range(round_.rows[-1])]
        lengths = iter(of_rows)
        self.prompts = random_prompts(len(of_rows), lambda: next(lengths))
        options = GeneratorConfig(max_num_seqs=len(of_rows), steps_per_sync=STEPS)
        room = sum(of_rows) + len(of_rows) * (round_.new + 2 * options.page_size)
        self.engine = Engine(SharedWeights(model), options, room, runtime=own["engine"])
        self.training = Training(trainer, self._batch(model.config.vocab_size).to(model.embed.device))
        self.runtimes = own
        self.stream: torch.cuda.Stream | None = None
        if device == "cuda":
            with own["trainer"].warm_up.rehearsal():
                trainer.forward_backward(self.training.batch)
            with own["engine"].warm_up.rehearsal():
                self.engine.warm_up(len(of_rows), round_.cap, self.sampling(round_.new))

    def _batch(self, vocabulary: int) -> PackedBatch:
        """One group, whose prompt is short."""
        samples, prompt = self.round.samples, self.round.trained // 128 + 1
        length = prompt + (self.round.trained - prompt) // samples + 1
        tokens = torch.randint(0, vocabulary, (samples, length), generator=torch.Generator().manual_seed(1))
        tokens[:, :prompt] = tokens[0, :prompt]
        (batch,) = pack(groups(tokens, samples, prompt), max_tokens=self.round.trained, check_parity=False)
        return batch

    def sampling(self, new: int) -> SamplingParams:
        return SamplingParams(max_completion_length=new, ignore_eos=True)

    def use(self, streams: Streams) -> None:
        """Run each side on a stream of its own from here on, and have its graphs."""
        synchronize(streams[0])
        self.stream, self.training.stream = streams
        record_on(self.runtimes["engine"], self.stream)
        record_on(self.runtimes["trainer"], self.training.stream)
        gc.collect()
        if self.stream is not None:
            torch.cuda.empty_cache()
        self.train()  # records the graph

    def prefill(self) -> None:
        """Have all prompts in the cache, the shorter ones being beginnings of the longer."""
        ids = [SampleIdentity(0, 0, 0, group) for group in range(len(self.prompts))]
        with on(self.stream):
            self.engine.generate(self.prompts, [self.sampling(1)] * len(ids), ids)

    def decode(self, rows: int, enough: Callable[[float], bool], beside: Training | None = None) -> Decoded:
        """Decode steps of so many rows, after their prefill, until it is enough, which is asked with the seconds so
        far, or `new` are done. What is drawn is the same each time."""
        engine, context, sampling = self.engine, self.round.context(rows), self.sampling(self.round.new)
        prompts = [prompt[:context] for prompt in self.prompts[:rows]]
        ids = [engine.add_request(p, sampling, SampleIdentity(0, 0, 0, g)) for g, p in enumerate(prompts)]
        samples = [sample for i in ids for sample in engine.requests[i]]
        try:
            with on(self.stream):
                while len(engine.scheduler.running) < rows:
                    engine.advance()
                engine.drain()
                synchronize(self.stream)
                if beside is not None:
                    beside.start()
                began, ends = mark(self.stream), self._timed(min(s.remaining for s in samples), enough)
        finally:
            for i in ids:
                engine.abort(i)
        words = [list(zip(s.token_ids, s.logprobs, s.model_logprobs, strict=True)) for s in samples]
        return Decoded(began, ends, words)

    def _timed(self, steps: int, enough: Callable[[float], bool]) -> list[tuple[int, Any]]:
        """Decode up to so many steps; `Decoded.ends`."""
        engine, first, began = self.engine, self.engine.scheduler.clock, time.perf_counter()
        ends: list[tuple[int, Any]] = []
        while not ends or (ends[-1][0] + STEPS <= steps and not enough(time.perf_counter() - began)):
            engine.advance()
            ends.append((engine.scheduler.clock - first, mark(self.stream)))
        engine.drain()
        return ends

    def beside(self, rows: int) -> dict[str, Any]:
        """Both at once: milliseconds of a decode step and of a micro-batch, and the words of both."""
        training = self.training
        found = self.decode(rows, lambda _: training.ended, training)
        synchronize(self.stream)
        times = {"decode_ms": found.ms(training.ends[-1]), "train_ms": training.ms, "steps": found.ends[-1][0]}
        return {**times, "words": found.words, "gradients": int(training.words)}

    def train(self) -> tuple[float, int]:
        """Training alone: milliseconds of a micro-batch, and a hash of its gradients."""
        self.training.start()
        synchronize(self.stream)
        return self.training.ms, int(self.training.words)


def measured(bench: Bench, streams: Streams, alone: dict[str, Any]) -> dict[str, Any]:
    """Of one way to run both at once. `alone`: what the first way finds of either alone, to which all is compared."""
    bench.use(streams)
    train_ms, gradients = bench.train()
    alone = alone or {"train_ms": train_ms, "gradients": gradients, "rows": {}}
    figures: dict[str, Any] = {"train_alone_ms": train_ms, "gradients": gradients == alone["gradients"], "rows": {}}
    bench.prefill()
    for rows in bench.round.rows:
        bench.decode(rows, lambda _: True)  # records the graphs
        own = bench.decode(rows, lambda seconds: seconds > ALONE_S)
        expected = alone["rows"].setdefault(rows, {"decode_ms": own.ms(), "words": own.words})
        both = bench.beside(rows)
        compared, different = differences(expected["words"], own.words, both.pop("words"))
        figures["gradients"] &= both.pop("gradients") == alone["gradients"]
        figures["rows"][rows] = {
            "context": bench.round.context(rows), "decode_alone_ms": own.ms(), **both,
            "decode_slowdown": both["decode_ms"] / expected["decode_ms"],
            "train_slowdown": both["train_ms"] / alone["train_ms"],
            "tokens_compared": compared, "tokens_different": different,
        }  # fmt: skip
    return {**figures, "alone": alone}


def differences(expected: Words, *others: Words) -> tuple[int, int]:
    """Tokens that both have, of each of the others, and those of other bits."""
    both = [of_one for other in others for of_one in zip(expected, other, strict=True)]
    pairs = [pair for of_one in both for pair in zip(*of_one, strict=False)]
    return len(pairs), sum(a != b for a, b in pairs)


@dataclass(frozen=True)
class Costs:
    """What a token of training costs, and a decode step, by the key positions that it reads: linear between what was
    measured."""

    train_ms: float
    positions: Sequence[int]
    decode_ms: Sequence[float]
    decode_slowdown: Sequence[float]
    train_slowdown: Sequence[float]

    def at(self, values: Sequence[float], positions: int) -> float:
        """Beyond them in line with the outermost two."""
        i = min(max(bisect(self.positions, positions), 1), len(values) - 1)
        (a, b), (low, high) = self.positions[i - 1 : i + 1], values[i - 1 : i + 1]
        return low + (positions - a) / (b - a) * (high - low)


def step_ms(lengths: list[list[int]], costs: Costs, beside: bool) -> float:
    """Milliseconds to generate samples of these lengths and to train on them: after it, or on finished groups beside it
    wherever both together do more than one after the other."""
    waiting, now = Counter[int](), 0.0  # tokens to train on, by when their group ends
    ends = Counter(length for group in lengths for length in group)
    for group in lengths:
        waiting[max(group)] += sum(group)
    live, tokens = ends.total(), 0.0
    for position in range(1, max(ends) + 1):
        ms = costs.at(costs.decode_ms, live * position)
        if beside and tokens > 0:
            slower, trained = (
                max(1.0, costs.at(values, live * position)) for values in (costs.decode_slowdown, costs.train_slowdown)
            )
            if 1 / slower + 1 / trained > 1:
                ms *= slower
                tokens = max(0.0, tokens - ms / (costs.train_ms * trained))
        now += ms
        live -= ends[position]
        tokens += waiting[position]
    return now + tokens * costs.train_ms


def saved(round_: Round, found: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Seconds of steps of drawn lengths, the part of each that is saved, and that if neither slowed the other."""
    columns = sorted(
        (rows * f["context"], alone["rows"][rows]["decode_ms"], f["decode_slowdown"], f["train_slowdown"])
        for rows, f in found["rows"].items()
    )
    costs = Costs(alone["train_ms"] / round_.trained, *zip(*columns, strict=True))
    none = [1.0] * len(columns)
    free = replace(costs, decode_slowdown=none, train_slowdown=none)
    drawn = [round_.lengths(seed) for seed in range(DRAWS)]
    apart = [step_ms(lengths, costs, beside=False) for lengths in drawn]
    parts = {
        name: [1 - step_ms(lengths, way, beside=True) / ms for lengths, ms in zip(drawn, apart, strict=True)]
        for name, way in (("saved", costs), ("saved_at_most", free))
    }
    trained = [sum(map(sum, lengths)) * costs.train_ms / 1e3 for lengths in drawn]
    return {"step_s": [ms / 1e3 for ms in apart], "train_s": trained, **parts}


def ways(args: argparse.Namespace) -> dict[str, Callable[[], Streams]]:
    """What matters most first."""
    if args.device == "cpu":
        return {"in turn": lambda: (None, None)}
    plain: dict[str, Callable[[], Streams]] = {
        "two streams": lambda: (torch.cuda.Stream(), torch.cuda.Stream()),
        "decoding of a higher priority": lambda: (torch.cuda.Stream(priority=-1), torch.cuda.Stream()),
    }
    return plain | {f"{n} SMs for decoding": (lambda n=n: partition(n)) for n in args.sms}


def rows_of(name: str, f: dict[str, Any]) -> list[list[str]]:
    if "failed" in f:
        return [[name, "FAILED", f["failed"][:80], *[""] * 7]]
    table = []
    part = f"{min(f['saved']):.1%} to {max(f['saved']):.1%} of {max(f['saved_at_most']):.1%}"
    for rows, r in f["rows"].items():
        times = (f"{r[key]:.2f}" for key in ("decode_alone_ms", "decode_ms", "decode_slowdown"))
        train = f"{f['train_alone_ms']:.0f}", f"{r['train_ms']:.0f}", f"{r['train_slowdown']:.2f}"
        same = f"{r['tokens_different']} of {r['tokens_compared']:,}"
        table.append([name, f"{rows} at {r['context']:,}", *times, *train, same, part])
    return table


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--sms", type=int, nargs="*", default=[32, 16, 48], help="for decoding (default: 32 16 48)")
    parser.add_argument("--rows", type=int, nargs="+", help="live ones (default: 4 16 64 128)")
    parser.add_argument("--groups", type=int, help="of eight samples, of a round (default: 64)")
    parser.add_argument("--budget", type=float, default=75, help="seconds after which no way is begun (default: 75)")


def measure(args: argparse.Namespace, report: Report) -> bool:
    began, on_cpu = time.perf_counter(), args.device == "cpu"
    round_ = SMALL if on_cpu else ROUND
    round_ = replace(round_, rows=tuple(args.rows or round_.rows), groups=args.groups or round_.groups)
    bench = Bench(args.arch or ("tiny" if on_cpu else "qwen3-0.6b"), round_, args.device)
    report.figures |= {"round": vars(round_), "startup_s": time.perf_counter() - began, "ways": {}}
    figures: dict[str, Any] = report.figures["ways"]
    alone: dict[str, Any] = {}
    table = [["way", "rows", "decode ms alone", "beside", "slower", "train ms alone", "beside", "slower",
              "tokens different", "saved of at most"]]  # fmt: skip
    for name, streams in ways(args).items():
        if (spent := time.perf_counter() - began) > args.budget:
            report.complete = False
            report.notes.append(f"{name}: not begun after {spent:.0f} s")
            continue
        print(name, file=sys.stderr, flush=True)
        try:
            found = measured(bench, streams(), alone)
            alone = found.pop("alone")
            figures[name] = found | saved(round_, found, alone)
        except Exception as error:  # the driver may have no green contexts
            traceback.print_exc()
            figures[name] = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        figures[name]["seconds"] = time.perf_counter() - began - spent
        table += rows_of(name, figures[name])
        report.save()
    report.tables.append(table)
    done = [f for f in figures.values() if "failed" not in f]
    report.notes += [f"{name}: gradients differ" for name, f in figures.items() if not f.get("gradients", True)]
    wrong = any(not f["gradients"] or any(r["tokens_different"] for r in f["rows"].values()) for f in done)
    return wrong or not done
