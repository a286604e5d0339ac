"""Trajectories of several turns with tools, beside one turn of the same lengths and a replay of the tools' times.

Random weights; every turn has exactly so many tokens, and every tool answer too. What is counted are sampled tokens.

- one turn: the prompt, and then as many tokens as the turns and the answers have together, all of them sampled.
- instant tools: each turn is answered at once.
- slow tools: each answer takes a time that is drawn, lognormal between two bounds. The bits must be those of instant
  ones. Beside it a replay of the same trajectories with the times that their tools took, in which decoding runs at the
  rate that was measured for each number of live rows (in rounds with instant tools, of as many turns and tokens and of
  fewer prompts), and nothing else takes any time.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import functools
import math
import random
import statistics
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from common import Report, random_model, seconds

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.environments import ChatCodec, End, Environment, Failures, Limits, Problem, Turn
from lockstep.environments.episodes import Episode, EpisodeContext, EpisodeRunner, GroupRequest
from lockstep.generator import Engine, SharedWeights, plan_cache_tokens
from lockstep.generator.sizes import row_buckets
from lockstep.graph import Runtime
from lockstep.timings import Timings, seconds_by_name
from lockstep.types import TRAIN_DOMAIN, SampleIdentity, SamplingParams

_SPREAD = 0.7  # of the logarithm of a tool's time


@dataclass(frozen=True)
class Case:
    """`prompts` prompts of `prompt` tokens, `samples` trajectories each, of `turns` turns of `new` tokens with answers
    of `answer` tokens between them. A slow tool takes `fastest` to `slowest` seconds, half of them above `median`."""

    prompts: int
    samples: int
    prompt: int
    turns: int
    new: int
    answer: int
    fastest: float = 0.1
    median: float = 0.45
    slowest: float = 2.0

    @property
    def trajectories(self) -> int:
        """In all."""
        return self.prompts * self.samples

    @property
    def response(self) -> int:
        """Tokens after the prompt."""
        return self.turns * self.new + (self.turns - 1) * self.answer

    def answers(self, count: int) -> list[tuple[float, list[int]]]:
        """So many, with the times that they take."""
        draw = random.Random(count)
        times = [math.exp(draw.gauss(math.log(self.median), _SPREAD)) for _ in range(count)]
        return [(min(max(time, self.fastest), self.slowest), draw.choices(range(256), k=self.answer)) for time in times]


CASES = {"cpu": Case(2, 4, 80, 3, 16, 8, 0.01, 0.03, 0.1), "h200": Case(32, 8, 256, 4, 256, 128)}
KINDS = "one_turn", "instant", "slow"
_ANSWERS = 4096  # that tools have to choose from


class Instant(Environment):
    """Answers each turn with tokens that depend on its tokens alone, one of `answers`, drawn beforehand: it takes no
    time of its own."""

    instant: ClassVar[bool] = True
    case: ClassVar[Case]
    answers: ClassVar[list[tuple[float, list[int]]]]  # with the time that a slow tool takes

    def __init__(self) -> None:
        self.waited: list[float] = []

    def step(self, turn: Turn) -> Any:
        if len(self.waited) == self.case.turns - 1:
            return End(0.0)
        time, answer = self.answers[zlib.crc32(array("q", turn.token_ids)) % len(self.answers)]
        self.waited.append(time)
        return list(answer)


class Slow(Instant):
    """Takes the time that was drawn."""

    instant = False

    async def step(self, turn: Turn) -> Any:
        answer = super().step(turn)
        if not isinstance(answer, End):
            await asyncio.sleep(self.waited[-1])
        return answer


class WholeTurns:
    """An engine whose turns end as if by a stop token, though their length ends them: none is the last for that."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.add_request, self.abort = engine, engine.add_request, engine.abort

    def advance(self) -> Any:
        grown = self.engine.advance()
        for one in grown:
            if one.completion is not None:
                one.completion.finish_reason = "stop"
        return grown


class Rounds:
    """One engine, warmed up as training does, on which rounds are played; each has weights of a version of its own, so
    that none finds pages of another."""

    def __init__(self, case: Case, arch: str, device: str) -> None:
        self.case, self.version, self.answers = case, 0, case.answers(_ANSWERS)
        model = random_model(arch, device)
        event: Any = functools.partial(torch.cuda.Event, enable_timing=True) if device == "cuda" else None
        self.timings = Timings(keep_spans=True, event=event)
        level = CompileConfig("step", cudagraph_mode="full") if device == "cuda" else CompileConfig("none")
        self.runtime = Runtime(level, model.embed.device, timings=self.timings)
        config, length = GeneratorConfig(max_num_seqs=case.trajectories), case.prompt + case.response
        tokens = plan_cache_tokens(
            config, model.config, model.embed.dtype, model.embed.device, case.trajectories, length
        )
        self.engine = Engine(SharedWeights(model, lambda: self.version), config, tokens, str, self.runtime)
        self.engine.warm_up(case.trajectories, length, self.sampling(case.new))
        if self.runtime.compiles:
            self.runtime.end_warm_up()

    def sampling(self, new: int) -> SamplingParams:
        """Exactly so many tokens."""
        return SamplingParams(n=self.case.samples, max_completion_length=new, ignore_eos=True)

    def play(self, kind: type[Instant], number: int, case: Case | None = None) -> list[Episode]:
        """Play round `number`, whose prompts and random numbers are the same for every kind."""
        self.version += 1
        draw, case = random.Random(number), case or self.case
        made = type(kind.__name__, (kind,), {"case": case, "answers": self.answers})
        prompts = [draw.choices(range(256), k=case.prompt) for _ in range(case.prompts)]
        requests = [GroupRequest(g, Problem(prompt), g, f"group {g}") for g, prompt in enumerate(prompts)]
        sampler, limits = WholeTurns(self.engine), Limits(turns=case.turns)
        codec = ChatCodec(list, lambda messages, given: list(given))
        play = EpisodeRunner(EpisodeContext(made, codec, lambda *_: sampler, limits, Failures(), self.timings))
        found = play.run(requests, self.sampling(case.new), SampleIdentity(0, TRAIN_DOMAIN, number, 0))
        return [episode for episodes in found for episode in episodes]

    def one_turn(self, number: int) -> None:
        """As many trajectories, as long, without an answer between."""
        self.version += 1
        draw, count = random.Random(-1 - number), self.case.prompts
        prompts = [draw.choices(range(256), k=self.case.prompt) for _ in range(count)]
        identities = [SampleIdentity(0, TRAIN_DOMAIN, number, g) for g in range(count)]
        self.engine.generate(prompts, [self.sampling(self.case.response)] * count, identities)

    def step_times(self) -> list[tuple[int, float]]:
        """Numbers of sequences and the seconds of a decode step, over turns as long as those that are replayed: where
        each graph ends, and where each of more than half of all sequences begins."""
        case, counts = self.case, set[int]()
        for rows in row_buckets(case.trajectories):
            counts |= {rows // case.samples, rows // case.samples + (2 * rows >= case.trajectories)}
        found: list[tuple[int, float]] = []
        for count in sorted({min(max(count, 1), case.prompts) for count in counts}):
            figures, _ = self.timed(lambda n=count: self.play(Instant, -2, replace(case, prompts=n)), 0)
            found += [point for point in figures["live"] if point[0] == count * case.samples]
        return found

    def timed(self, run: Callable[[], Any], sampled: int) -> tuple[dict[str, Any], Any]:
        """Seconds of a round with its phases, those of the device as it counts, and tokens a second; and its result."""
        found: list[Any] = []
        self.timings.take_spans()
        took = seconds(lambda: found.append(run()), self.engine.cache.k.device.type)
        spans = self.timings.take_spans()
        launches = {name: sum(s.name == name and not s.on_device for s in spans) for name in ("prefill", "decode")}
        live = [
            (s.facts["sequences"], s.seconds / s.facts["steps"]) for s in spans if s.name == "decode" and s.on_device
        ]
        if not live:  # a CPU
            live = [(s.facts["sequences"], s.seconds / s.facts["steps"]) for s in spans if s.name == "decode"]
        figures = {
            "seconds": took,
            "tokens_per_s": self.case.trajectories * sampled / took,
            "phases_s": seconds_by_name(spans),
            "launches": launches,
            "live": live,
        }
        return figures, found[0]


def step_times(live: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds of a decode step by the number of live rows: means of what was measured, as a step's time grows with what
    its rows have behind them, and lines between them."""
    by_rows: dict[int, list[float]] = {}
    for rows, time in live:
        by_rows.setdefault(rows, []).append(time)
    known = sorted((rows, statistics.mean(times)) for rows, times in by_rows.items() if rows)

    def at(rows: int) -> float:
        i = bisect.bisect_left(known, (rows, 0.0))
        if i == 0 or i == len(known):
            return known[min(i, len(known) - 1)][1]
        (before, low), (after, high) = known[i - 1], known[i]
        return low + (high - low) * (rows - before) / (after - before)

    return at


def replayed_s(waits: Sequence[Sequence[float]], new: int, step_s: Callable[[int], float]) -> float:
    """Seconds of trajectories whose tools took these times, with nothing but decoding beside them."""
    now, left = 0.0, {i: float(new) for i in range(len(waits))}  # tokens of those that decode
    done, until = [0] * len(waits), dict[int, float]()  # turns; when those that wait go on
    while left or until:
        each = step_s(len(left)) if left else 1.0
        passed = min(min(left.values(), default=math.inf) * each, min(until.values(), default=math.inf) - now)
        now += passed
        left = {i: tokens - passed / each for i, tokens in left.items()}
        for i in [i for i, tokens in left.items() if tokens < 1e-6]:
            del left[i]
            if done[i] < len(waits[i]):
                until[i] = now + waits[i][done[i]]
            done[i] += 1
        for i in [i for i, end in until.items() if end <= now + 1e-9]:
            del until[i]
            left[i] = float(new)
    return now


def bits(episodes: Sequence[Episode]) -> list[Any]:
    """All that must not depend on how long tools take."""
    found = [episode.trajectory for episode in episodes]
    return [
        ([s.token_ids for s in t.segments], [x.hex() for x in (*t.logprobs, *t.model_logprobs)]) for t in found if t
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=[*CASES], help="default: the device's")
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")


def measure(args: argparse.Namespace, report: Report) -> bool:
    on_cpu = args.device == "cpu"
    case, arch = CASES[args.case or ("cpu" if on_cpu else "h200")], args.arch or ("tiny" if on_cpu else "qwen3-0.6b")
    rounds = Rounds(case, arch, args.device)
    measured: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    report.figures |= {"arch": arch, **vars(case), "rounds": measured, "same_bits": True}
    rounds.one_turn(-1)
    rounds.play(Instant, -1)
    step_s = step_times(rounds.step_times())
    for i in range(args.repeats):
        print(f"round {i + 1}", file=sys.stderr, flush=True)
        one_round(rounds, i, measured, report.figures, step_s)
        report.save()
    rate = {kind: statistics.median(one["tokens_per_s"] for one in measured[kind]) for kind in KINDS}
    report.figures |= {
        "tokens_per_s": rate,
        "instant_of_one_turn": rate["instant"] / rate["one_turn"],
        "slow_of_replay": statistics.median(one["of_replay"] for one in measured["slow"]),
        "recompiles": rounds.runtime.recompiles,
        "ms_a_step": {rows: 1e3 * step_s(rows) for rows in (1, 8, 32, 64, 128, 256) if rows <= case.trajectories},
    }
    tell(report, measured, rate)
    return not report.figures["same_bits"]


def one_round(
    rounds: Rounds,
    number: int,
    measured: dict[str, list[dict[str, Any]]],
    figures: dict[str, Any],
    step_s: Callable[[int], float],
) -> None:
    """Time each kind once; slow tools beside their replay, whose decode steps take `step_s`."""
    case = rounds.case
    sampled = case.turns * case.new
    one, _ = rounds.timed(lambda: rounds.one_turn(number), case.response)
    instant, fast = rounds.timed(lambda: rounds.play(Instant, number), sampled)
    slow, late = rounds.timed(lambda: rounds.play(Slow, number), sampled)
    replay = replayed_s([e.environment.waited for e in late], case.new, step_s)
    slow |= {"replayed_s": replay, "of_replay": replay / slow["seconds"]}
    figures["same_bits"] &= bits(fast) == bits(late) and len(bits(fast)) == case.trajectories
    for kind, found in zip(KINDS, (one, instant, slow), strict=True):
        del found["live"]
        measured[kind].append(found)


def tell(report: Report, measured: dict[str, list[dict[str, Any]]], rate: dict[str, float]) -> None:
    """The table of the rounds in the middle, and what it comes to."""
    rows = [["", "tok/s", "median s", "prefill s", "decode s", "launches"]]
    for kind in KINDS:
        one = sorted(measured[kind], key=lambda found: found["seconds"])[len(measured[kind]) // 2]
        phases = [f"{one['phases_s'].get(name, 0.0):.3f}" for name in ("prefill", "decode")]
        launches = f"{one['launches']['prefill']} + {one['launches']['decode']}"
        rows.append([kind.replace("_", " "), f"{rate[kind]:,.0f}", f"{one['seconds']:.3f}", *phases, launches])
    report.tables.append(rows)
    figures = report.figures
    report.notes.append(
        f"instant tools {figures['instant_of_one_turn']:.3f} of one turn, slow ones {figures['slow_of_replay']:.3f} of "
        f"their replay; same bits: {figures['same_bits']}"
    )
