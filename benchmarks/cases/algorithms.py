"""Three RL steps with each shipped algorithm, then steps of all in turn: seconds beside grpo's, and bits compared.

Random weights of Qwen3-0.6B's shapes, 64 short prompts with 8 completions of 32 tokens each, parity strict, graphs as
they are by default; on a CPU captured and not recorded. All share a model, an optimizer and an engine; each has a
`forward_backward` of its own, held to eager's bits like a run's. Before its three steps the weights are what they were
at the start. The ratios are of the steps in turn, round by round, so that a drift of the machine meets all alike. What
a teacher's log-probs are needed for is beside grpo with a reference, in a session of their own, and what has a critic
beside grpo on a model with a value head, in another.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import Report, random_model

from lockstep.algorithms import ALGORITHMS
from lockstep.config import (
    CompileConfig,
    LossConfig,
    OptimizerConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
)
from lockstep.models import save_model
from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer
from lockstep.rl.loop import Loop
from lockstep.session.build import TrainingSession, build
from lockstep.session.warm_up import make_ready, prepare_machine
from lockstep.trainer.programs import TrainerPrograms

STEPS = 3
FLOOR, WITH_REFERENCE, WITH_HEAD = "grpo", "grpo, beta 0.01", "grpo, a value head"
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
GIB = 2**30


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids: a reward that differs between samples, and costs nothing."""
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


@dataclass
class Taken:
    """What the steps of an algorithm took, seconds each, and what they compared."""

    step_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    tokens_checked: int = 0
    tokens_different: int = 0
    applied: int = 0

    def add(self, metrics: dict[str, Any]) -> None:
        self.step_s.append(metrics["time/step"])
        self.train_s.append(metrics["time/forward_backward"] + metrics["time/optim_step"])
        self.tokens_checked += metrics["parity/tokens_checked"]
        self.tokens_different += metrics["parity/tokens_different"]
        self.applied += metrics["updates"]


class Algorithms:
    """One session that steps by any of several algorithms, as a run of each would.

    Args:
        losses: by name. The first is the floor of the others; what the session's own, the one with a critic or the
            first, has as a reference or a value head, they have too.

    Attributes:
        counts: traces, stored graphs that were loaded and seconds of making each one's graphs.
        failed: what an algorithm that cannot be run here was refused with, by name.
    """

    def __init__(self, losses: dict[str, LossConfig], config: RunConfig) -> None:
        self.losses, self.floor = losses, next(iter(losses))
        own = next((loss for loss in losses.values() if ALGORITHMS[loss.algorithm].has_critic), losses[self.floor])
        self.run = build(replace(config, loss=own))
        trainer = self.run.trainer
        self.shared = trainer.programs
        self.programs: dict[str, TrainerPrograms] = {}
        self.failed: dict[str, str] = {}
        self.counts: dict[str, dict[str, float]] = {}
        for name, loss in losses.items():
            try:
                self.programs[name] = self._programs_of(loss)
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"[:500]
        self.start = {name: tensor.clone() for name, tensor in trainer.state()[0].items()}
        self.loops: dict[str, Loop] = {}
        self.next_step = 0

    def _programs_of(self, loss: LossConfig) -> TrainerPrograms:
        """Those of an algorithm: `forward_backward` alone is its own."""
        run, shared = self.run, self.shared
        models = run.policy.model, run.trainer.reference
        made = TrainerPrograms(run.runtime, *models, run.trainer.optimizer, loss, shared.state)
        made.by_name = {**shared.by_name, "forward_backward": made.by_name["forward_backward"]}
        return made

    def take_up(self, name: str) -> TrainingSession:
        """The session, whose trainer has this algorithm."""
        trainer, programs = self.run.trainer, self.programs[name]
        trainer.programs, trainer.algorithm = programs, programs.algorithm
        trainer.loss = self.losses[name]
        return self.run

    def make_graphs(self) -> None:
        run, runtime = self.run, self.run.runtime
        for name in self.programs:
            before, began = (runtime.captures, runtime.loaded), time.perf_counter()
            self.take_up(name).trainer.warm_up(run.shapes, run.sampling, check_parity=True, with_checks=False)
            made = runtime.captures - before[0], runtime.loaded - before[1], time.perf_counter() - began
            found = self.counts.setdefault(name, dict.fromkeys(("traced", "loaded", "made_s"), 0))
            self.counts[name] = {key: found[key] + value for key, value in zip(found, made, strict=True)}
        run.engine.warm_up(run.config.trainer.prompts_per_step * run.sampling.n, run.shapes[0].max_len, run.sampling)

    def check_cases(self) -> list[Any]:
        """Of each algorithm's own program, and once of all others."""
        run, work = self.run, []
        for name in self.programs:
            cases = self.take_up(name).trainer.check_cases(run.shapes, run.sampling, False, check_parity=True)
            work += [w for w in cases if not work or w[0].name == "forward_backward"]
        return work + list(run.engine.check_cases())

    def warm_up(self) -> list[str]:
        """Make and check all graphs; what was checked."""
        prepare_machine(self.run)
        kernels = self.run.kernel_list("benchmark of algorithms", *self.programs, self.run.shapes)
        verdicts = make_ready(self.run, [self.make_graphs], self.check_cases, kernels)
        return [f"{v.function}: {v.cases} cases, {v.level}" for v in verdicts]

    def restore(self) -> None:
        """The weights and moments of the start, as a version of their own."""
        trainer = self.run.trainer
        trainer.load_state(self.start, {"weights_version": trainer.weights_version + 1})

    def step(self, name: str, taken: Taken) -> None:
        run = self.take_up(name)
        if name not in self.loops:
            self.loops[name] = Loop(replace(run.config, loss=run.trainer.loss), run)
        taken.add(self.loops[name].step(self.next_step)[0])
        self.next_step += 1

    def in_turn(self, repeats: int, end: float) -> dict[str, dict[str, Any]]:
        """Three steps of each, then rounds of one step of each while there is time; figures by name."""
        taken, turns = ({name: Taken() for name in self.programs} for _ in range(2))
        for name in self.programs:
            self.restore()
            self.run.trainer.optimizer.reset()
            for _ in range(STEPS):
                self.step(name, taken[name])
        order = list(self.programs)
        for i in range(repeats):
            for name in order[i % len(order) :] + order[: i % len(order)]:
                self.step(name, turns[name])
            if time.perf_counter() > end:
                break
        return {name: self._figures(name, taken[name], turns) for name in self.programs}

    def _figures(self, name: str, steps: Taken, turns: dict[str, Taken]) -> dict[str, Any]:
        """Of one algorithm; ratios to the floor are medians over the rounds."""
        graphs = self.programs[name].by_name["forward_backward"].graphs.values()
        own, floor = turns[name], turns[self.floor]
        return {
            **self.counts[name],
            "graphs": len(graphs),
            "replays": sum(graph.replays for graph in graphs),
            "three_steps_s": steps.step_s,
            "step_s": statistics.median(own.step_s),
            "train_s": statistics.median(own.train_s),
            "in_turn_s": {"step": own.step_s, "train": own.train_s},
            "floor": self.floor,
            "ratio": {"step": ratio(own.step_s, floor.step_s), "train": ratio(own.train_s, floor.train_s)},
            "tokens_checked": steps.tokens_checked + own.tokens_checked,
            "tokens_different": steps.tokens_different + own.tokens_different,
            "updates": steps.applied + own.applied,
        }


def ratio(own: list[float], floor: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, floor, strict=True))


def config_of(args: argparse.Namespace, folder: Path) -> RunConfig:
    """A run of steps that are all of one shape; its model and prompts are written to `folder`."""
    arch = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    save_model(random_model(arch, args.device), folder / "model")
    save_tokenizer(byte_tokenizer(), folder / "model")
    rows = [{"prompt": f"{a} {b} {c}"[:12]} for a in WORDS for b in WORDS for c in WORDS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        recipe="dataset",
        model=str(folder / "model"),
        steps=1000,
        device=args.device,
        task=TaskConfig(
            name="dataset",
            data=str(folder / "prompts.jsonl"),
            reward=("cases.algorithms:even_share",),
            validation_prompts=0,
        ),
        sampling=SamplingConfig(num_generations=args.samples, max_completion_length=args.tokens, ignore_eos=True),
        trainer=TrainerConfig(
            prompts_per_step=args.prompts, max_tokens_per_micro_batch=1 << 17, skip_zero_variance=False
        ),
        optimizer=OptimizerConfig(learning_rate=1e-6),
        compile=CompileConfig("step") if args.device == "cpu" else CompileConfig(),
    )


def row(name: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [name, "FAILED", f["failed"][:60], *[""] * 6]
    return [
        name,
        f"{f['step_s'] * 1e3:.0f}",
        f"{f['train_s'] * 1e3:.1f}",
        *(f"{f['ratio'][key]:.3f}" for key in ("step", "train")),
        f"{f['tokens_different']} of {f['tokens_checked']:,}",
        str(f["updates"]),
        f"{f['traced']:.0f} + {f['loaded']:.0f}",
        str(f["replays"]),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--only", nargs="*", help="algorithms beside grpo; default: all")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of every completion (default: 32)")
    parser.add_argument("--budget", type=float, default=180, metavar="SECONDS", help="no round is begun after them")


def sessions(only: list[str] | None, teacher: Path) -> list[dict[str, LossConfig]]:
    """The losses of each: of all algorithms that need nothing besides, of those that learn from a teacher, and of those
    that have a critic."""
    names = [name for name in ALGORITHMS if not only or name in (FLOOR, *only)]
    others = [n for n in names if n != FLOOR]
    plain = [FLOOR, *(n for n in others if not (ALGORITHMS[n].has_teacher or ALGORITHMS[n].has_critic))]
    taught = [n for n in names if ALGORITHMS[n].has_teacher]
    found = [{name: LossConfig(name, scale_rewards="group") for name in plain}]
    if taught:
        losses = {name: LossConfig(name, teacher=str(teacher)) for name in taught}
        found.append({WITH_REFERENCE: LossConfig(FLOOR, scale_rewards="group", beta=0.01), **losses})
    if criticized := {n: LossConfig(n) for n in names if ALGORITHMS[n].has_critic}:
        found.append({WITH_HEAD: LossConfig(FLOOR, scale_rewards="group"), **criticized})
    return found


def measure(args: argparse.Namespace, report: Report) -> bool:
    began = time.perf_counter()
    figures: dict[str, Any] = {}
    report.figures |= {name: getattr(args, name) for name in ("prompts", "samples", "tokens")}
    report.figures |= {"algorithms": figures, "sessions": [], "recompiles": 0}
    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(args, Path(scratch))
        for losses in sessions(args.only, Path(scratch) / "model"):
            start = time.perf_counter()
            all = Algorithms(losses, config)
            session = {"checked": all.warm_up(), "startup_s": time.perf_counter() - start}
            print(f"{', '.join(losses)}: ready after {session['startup_s']:.1f} s", file=sys.stderr, flush=True)
            figures |= {name: {"failed": why} for name, why in all.failed.items()}
            figures |= all.in_turn(args.repeats, began + args.budget)
            report.figures["recompiles"] += all.run.runtime.recompiles
            report.figures["sessions"].append(session | {"shapes": [list(shape) for shape in all.run.shapes]})
            all.run.runtime.close()
            report.save()
            del all
            gc.collect()
            torch.cuda.empty_cache()
    if args.device == "cuda":
        report.figures["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    report.figures["seconds"] = time.perf_counter() - began
    heads = ["algorithm", "step ms", "train ms", "step / floor", "train / floor", "tokens different", "updates",
             "traced + loaded", "replays"]  # fmt: skip
    report.tables.append([heads, *(row(name, f) for name, f in figures.items())])
    starts = ", ".join(f"{session['startup_s']:.0f}" for session in report.figures["sessions"])
    report.notes.append(
        f"{report.figures['recompiles']} recompiles, {report.figures['seconds']:.0f} s in all, {starts} of them to "
        f"the first steps; the floor is {FLOOR}, of a teacher's pupils {WITH_REFERENCE}, of a critic {WITH_HEAD}"
    )
    failed = any("failed" in f or f["tokens_different"] for f in figures.values())
    return failed or report.figures["recompiles"] > 0
