"""A tiny model learns a task that needs its tool: products of two numbers, by calling a function that multiplies.

From random weights: supervised steps on worked conversations teach the form of a call, until some held-out
problems are solved; reinforcement learning begins from that model and does the rest. The prompts, and what is held out,
are those of sum-digits: `47 83=`. The control is the same run with advantages of zero. Every sampled token of every
turn is compared. What stands between two turns must be what the template puts there, or it is counted as encoded again.
Last, the trained model is asked with a tool that knows nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from cases.algorithms_learning import ZEROED
from cases.learning import content, lines
from common import Report

from lockstep.api import train
from lockstep.config import LossConfig, OptimizerConfig, RunConfig, SamplingConfig, TaskConfig, TrainerConfig
from lockstep.environments import End, Next, Turn
from lockstep.environments.tools import Tool, ToolEnvironment
from lockstep.models import Decoder, ModelConfig, save_model
from lockstep.models.init import initialize
from lockstep.models.tokenizer import IM_END, byte_tokenizer, load_tokenizer, save_tokenizer

CONTROL_STEPS = 20  # whose gradients are all zero
GUESSED = 0.01  # of held-out problems, at most, without the tool
RISE = 0.2  # of the share of held-out problems that are solved
CALLED, DIGITS = 0.25, 0.5  # at most, beside 1 for what is solved
SOLVED = "validation/rewards/solved/mean"
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>"
SHOWN = "multiply: First. Second."
TEMPLATE = """\
{% for t in tools or [] %}{{ t.function.name }}:\
{% for p in t.function.parameters.properties.values() %} {{ p.description }}{% endfor %}{% endfor %}\
{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}\
<tool_call>{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}</tool_call>{% endfor %}\
<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
BETWEEN = re.compile(r"(<\|im_end\|>)?<tool>[^<]*<\|im_end\|><assistant>")

FACTORS = {name: {"type": "integer", "description": text} for name, text in (("a", "First."), ("b", "Second."))}
MULTIPLY = {"name": "multiply", "description": "", "parameters": {"type": "object", "properties": FACTORS}}


def multiply(a: int, b: int) -> int:
    return a * b


class Products(ToolEnvironment):
    """The product of the two numbers of a sum-digits prompt, which is the whole of the last answer. Something is given
    for a call with these numbers, and for each digit of the answer that stands in its place."""

    instant: ClassVar[bool] = True
    functions = (multiply,)
    schemas = ({"type": "function", "function": MULTIPLY},)

    def start(self, row: dict[str, Any], seed: int) -> Any:
        self.numbers, self.answer = numbers(row), ""
        return super().start(row, seed)

    def step(self, turn: Turn) -> Any:
        self.answer = turn.text
        followed = super().step(turn)
        if isinstance(followed, End) or turn.last:
            return followed
        a, b = self.numbers
        return Next(followed, {"called": CALLED * (turn.text == f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}")})

    def make_end(self) -> End:
        product = str(multiply(*self.numbers))
        right = sum(a == b for a, b in zip(self.answer, product, strict=False)) / max(len(product), len(self.answer))
        return End({"solved": float(self.answer == product), "digits": DIGITS * right})

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Sequence[str]:
        a, b = numbers(row)
        return [f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}", str(a * b)]


class Mute(Products):
    """The same, with a tool that knows nothing."""

    def callables(self) -> dict[str, Tool]:
        return {"multiply": lambda a, b: "?"}


def numbers(row: dict[str, Any]) -> tuple[int, int]:
    a, b = map(int, row["prompt"].rstrip("=").split())
    return a, b


def untrained(folder: Path, seed: int) -> str:
    """A model folder with random weights, and with a token for each byte and for what stands in every conversation."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([*CALL, SHOWN, "<user>", "<assistant>", "<tool>"])
    tokenizer.chat_template = TEMPLATE
    end = tokenizer.convert_tokens_to_ids(IM_END)
    config = ModelConfig(320, 128, 384, 2, 4, 4, 32, 512, eos_token_ids=(end,), family="qwen3")
    save_model(initialize(Decoder(config, torch.float32), seed), folder)
    save_tokenizer(tokenizer, folder)
    return str(folder)


def supervised(model: str, seed: int, tiny: bool) -> RunConfig:
    """Worked conversations, until greedy answers to problems that are held out, and not reported, have half of the
    reward."""
    warmup, batch = (2, 2) if tiny else (600, 32)
    return RunConfig(
        steps=0,
        seed=seed,
        device="cpu",
        model=model,
        task=TaskConfig(easy=True, max_turns=2, max_response_length=28, validation_prompts=4 if tiny else 200),
        sampling=SamplingConfig(num_generations=2 if tiny else 12, temperature=0.8, max_completion_length=12),
        trainer=TrainerConfig(
            prompts_per_step=batch // 2,
            warmup_steps=warmup,
            warmup_batch_size=batch,
            warmup_learning_rate=2e-3,
            warmup_reward=0.9,
            warmup_interval=5,
            skip_zero_variance=False,
        ),
        loss=LossConfig(scale_rewards="group"),
    )


def reinforced(begin: RunConfig, model: Path, steps: int) -> RunConfig:
    """The same, from the model that it made."""
    trainer = TrainerConfig(prompts_per_step=begin.trainer.prompts_per_step, skip_zero_variance=False)
    trainer = replace(trainer, max_idle_steps=max(steps, 1))
    rate = OptimizerConfig(learning_rate=4e-4, beta2=0.99, warmup_steps=min(5, steps), lr_scheduler="linear")
    task = replace(begin.task, validation_interval=20)
    return replace(begin, model=str(model), steps=steps, task=task, trainer=trainer, optimizer=rate)


def outcome(folder: Path) -> dict[str, Any]:
    """What a run folder says."""
    summary, certificate = content(folder / "summary.json"), content(folder / "parity.json")
    solved = {int(step): values[SOLVED] for step, values in summary["validation"].items()}
    found = {"before": solved[min(solved)], "after": solved[max(solved)], "solved": solved}
    metrics, tokenizer = lines(folder / "metrics.jsonl"), load_tokenizer(folder / "model")
    samples = [sample for line in lines(folder / "rollouts.jsonl") for sample in line["samples"]]
    between = [segment for sample in samples for segment in sample["segments"][1:] if segment["kind"] == "given"]
    other = [s for s in between if not BETWEEN.fullmatch(tokenizer.decode(s["token_ids"]))]
    return found | {
        "seconds": round(summary["total_s"], 1),
        "rewards": [round(m["reward/mean"], 3) for m in metrics],
        "turns": [round(m["environment/turns"], 3) for m in metrics],
        "tokens_sampled": sum(len(sample["token_ids"]) for sample in samples),
        "tokens_checked": certificate["tokens_checked"],
        "tokens_different": certificate["tokens_different"],
        "tokens_given": sum(segment["tokens"] for segment in between),
        "tokens_encoded_again": sum(segment["tokens"] for segment in other),
    }


def wrong(name: str, one: dict[str, Any]) -> list[str]:
    """What does not hold of a seed."""
    run, control = one["run"], one["control"]
    faults = {
        f"{run['before']:.3f} to {run['after']:.3f}, less than {RISE} more": run["after"] < run["before"] + RISE,
        "the control rose": control["after"] > control["before"],
        "solved without the tool": one["without_the_tool"] > GUESSED,
        "tokens were not compared, or differ": any(
            r["tokens_different"] or r["tokens_checked"] != r["tokens_sampled"] for r in (run, control)
        ),
        "tokens were encoded again": run["tokens_encoded_again"] + control["tokens_encoded_again"] > 0,
    }
    return [f"{name}: {fault}" for fault, holds in faults.items() if holds]


def of_seed(seed: int, steps: int, tiny: bool, folder: Path) -> dict[str, Any]:
    """Its runs: the supervised start, what learns from there, the control, and the trained model without its tool."""
    began = time.process_time()
    begin = supervised(untrained(folder / "untrained", seed), seed, tiny)
    start = train(begin, folder / "start", environment=Products)
    run = reinforced(begin, folder / "start" / "model", steps)
    train(run, folder / "run", environment=Products)
    seconds = time.process_time() - began
    loss = replace(run.loss, loss_type=f"{folder / 'zeroed.py'}:grpo")
    (folder / "zeroed.py").write_text(ZEROED)
    train(replace(run, loss=loss, steps=min(steps, CONTROL_STEPS)), folder / "control", environment=Products)
    alone = train(reinforced(begin, folder / "run" / "model", 0), folder / "mute", environment=Mute)
    return {
        "cpu_s": round(seconds, 1),  # of the start and the run, on the threads there are
        "supervised": {"steps": start["warmup"]["steps"], "loss_last": round(start["warmup"]["loss_last"], 4)},
        "run": outcome(folder / "run"),
        "control": outcome(folder / "control"),
        "without_the_tool": alone["validation"]["0"][SOLVED],
    }


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=70, help="of reinforcement learning (default: 70)")
    parser.add_argument("--tiny", action="store_true", help="next to nothing: only whether all of it runs")


def measure(args: argparse.Namespace, report: Report) -> bool:
    found: dict[str, dict[str, Any]] = {}
    report.figures |= {"steps": args.steps, "seeds": found, "wrong": []}
    for seed in range(args.seeds):
        print(f"seed {seed}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            one = found[f"seed {seed}"] = of_seed(seed, args.steps, args.tiny, Path(folder))
        report.figures["wrong"] += wrong(f"seed {seed}", one)
        report.save()
    rows = [["", "held-out solved", "control", "without the tool", "tokens different", "encoded again", "CPU seconds"]]
    for name, one in found.items():
        both = one["run"], one["control"]
        cells = [f"{r['before']:.1%} -> {r['after']:.1%}" for r in both] + [f"{one['without_the_tool']:.1%}"]
        different = f"{sum(r['tokens_different'] for r in both)} of {sum(r['tokens_checked'] for r in both):,}"
        again = str(sum(r["tokens_encoded_again"] for r in both))
        rows.append([name, *cells, different, again, f"{one['cpu_s']:.0f}"])
    report.tables.append(rows)
    report.notes += report.figures["wrong"]
    return bool(report.notes) and not args.tiny
