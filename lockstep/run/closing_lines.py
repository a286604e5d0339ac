"""A run's last lines: what was learned, whether it was bitwise identical, where the report is, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import EVALUATION_FIELDS, RunConfig, TaskConfig, recipes
from .metrics import success_metric

_STEPS_AVERAGED = 10  # steps at either end whose mean reward is reported if no problems are held out
_MAX_PROMPT_CHARS = 60  # the longest prompt, in characters, that is put in a command


def describe_learning(
    config: RunConfig,
    validations: Mapping[str, Mapping[str, float]],
    rewards: Sequence[float],
    updates: int,
    warmed_up: bool = False,
) -> str:
    """The metric that measures success (`success_metric`) on held-out problems before and after training; without any,
    the mean reward of the first and last steps. Built-in tasks' first reward is 1 for a solved problem, else 0, so its
    mean is shown in percent. `validations` are by steps done, `rewards` the means of each step, `updates` the number
    of updates; `warmed_up`: whether supervised steps preceded them."""
    if rewards and not updates:
        masked = " or its completions are cut off and masked" * config.loss.mask_truncated_completions
        return f"nothing: no update was made in any step; where a prompt's rewards are all equal{masked} there is none"
    if config.task.is_unrewarded:
        return "nothing is rewarded; the loss is in the report"
    if not validations and not rewards:
        return f"{'only from worked examples' if warmed_up else 'nothing'}: no step was done"
    if not validations:
        return _describe_rewards(rewards)
    by_step = sorted((int(step), metrics) for step, metrics in validations.items())
    (first, before), (last, after) = by_step[0], by_step[-1]
    name = success_metric(before, config)
    title = name.removeprefix("validation/").removeprefix("rewards/").removesuffix("/mean")
    is_share = title == "correct" and not config.task.reward
    values = [_format_value(metrics.get(name), is_share) for metrics in (before, after)]
    change = values[0] if first == last else " -> ".join(values)
    return f"held-out {title} {change}, after {last} step{'s' * (last != 1)} of reinforcement learning"


def _describe_rewards(rewards: Sequence[float]) -> str:
    if len(rewards) == 1:
        return f"reward {rewards[0]:.3g}, of one step"
    count = min(_STEPS_AVERAGED, len(rewards) // 2)
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    return f"reward {first:.3g} -> {last:.3g}, the first and last {'step' if count == 1 else f'{count} steps'}"


def _format_value(value: float | None, is_share: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.4g} %" if is_share else f"{value:.3g}"


def relative_to_cwd(folder: Path) -> Path:
    """The path from the current folder if `folder` is in it; else `folder`."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def next_command(config: RunConfig, run_dir: Path, prompt: Any) -> str:
    """A command that tries the trained model: on `prompt`, one of the run's problems, if it is a short text of a
    single-turn task; else on the run's validation problems (of data, `task.validation_data` or the rows held out)."""
    model, task, limit = shlex.quote(str(run_dir / "model")), config.task, config.sampling.max_completion_length
    stop = f" {_give('--stop', *config.sampling.stop)}" if config.sampling.stop else ""
    if config.attention_mask is not None:
        model += f" {shlex.join(['--attention', config.attention, '--attention-mask', config.attention_mask])}"
    if isinstance(prompt, str) and len(prompt) <= _MAX_PROMPT_CHARS and prompt.isprintable() and task.turns == 1:
        asked = f"{_give('--prompt', prompt)} --max-completion-length {limit}{stop}"
        return f"lockstep generate --model {model} {asked}"
    unplayed = config.steps == 0 and task.name == "dataset" and not task.reward  # an environment may give no reward
    if config.task.is_unrewarded or unplayed or task.filter_overlong_prompts:  # an evaluation may have other limits
        return f"lockstep chat --model {model}{_chat_flags(task)}"
    return f"lockstep eval --model {model} {shlex.join(_evaluation_flags(config))}{stop}"


def _give(flag: str, *values: str) -> str:
    """The words that give a flag its values. One that begins like a flag is joined to it."""
    if len(values) == 1 and values[0].startswith("-"):
        return shlex.quote(f"{flag}={values[0]}")
    return shlex.join([flag, *values])


def _chat_flags(task: TaskConfig) -> str:
    """The flags with which `lockstep chat` has the run's system prompt and variables of the chat template."""
    flags = "" if task.system_prompt is None else f" {_give('--system-prompt', task.system_prompt)}"
    if task.chat_template_kwargs:
        flags += f" {_give('--chat-template-kwargs', *task.chat_template_kwargs)}"
    return flags


def _evaluation_flags(config: RunConfig) -> list[str]:
    """The flags with which `lockstep eval` has the run's validation problems and limit of tokens."""
    task, limit = config.task, config.sampling.max_completion_length
    flags = ["--task", task.name]
    if task.name == "sum-digits" and not task.easy:
        flags.append("--no-easy")
    evaluated = replace(task, data=task.validation_data or task.data, split=task.validation_split or task.split)
    for name in EVALUATION_FIELDS:
        value = getattr(evaluated, name)
        if value == getattr(TaskConfig, name):
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, tuple):
            flags += map(str, value)
        elif value is not True:
            flags.append(str(value))
    if task.data and task.validation_prompts and not (task.validation_data or task.validation_split):
        flags.append("--held-out")
    drawn = task.environment or task.validation_samples > 1  # environments begin from the seed, and samples are drawn
    if drawn and config.seed != RunConfig.seed:
        flags += ["--seed", str(config.seed)]
    defaults = recipes.RECIPES[task.name]("")
    if task.validation_prompts not in (0, defaults.task.validation_prompts):
        flags += ["--prompts", str(task.validation_prompts)]
    if task.validation_samples > 1:
        flags += ["--n", str(task.validation_samples)]
        if config.sampling.temperature != defaults.sampling.temperature:
            flags += ["--temperature", str(config.sampling.temperature)]
    if limit != defaults.sampling.max_completion_length:
        flags += ["--max-completion-length", str(limit)]
    return flags


def describe_parity(certificate: Mapping[str, Any]) -> str:
    """The result of the parity check in words; `certificate` is the contents of parity.json."""
    checked, different = certificate.get("tokens_checked", 0), certificate.get("tokens_different", 0)
    uncovered = certificate.get("tokens_not_covered", 0)
    if certificate.get("identical") is None:
        return "not checked"
    verdict = "yes" if certificate["identical"] else "NO"
    counts = f"{checked:,} tokens compared between generator and trainer, {different:,} different"
    return f"{verdict}: {counts}{f', {uncovered:,} not covered' if uncovered else ''}"


def describe_outcome(summary: Mapping[str, Any]) -> str:
    """A finished run's last lines, from its summary."""
    run_dir = Path(summary["run_dir"])
    rows = {
        "learned": summary.get("learned"),
        "identical": describe_parity(summary.get("parity", {})),
        "report": str(run_dir / "report.html"),
        "next": summary.get("next"),
    }
    return align_rows(rows)


def describe_interrupted_run(run_dir: Path, processes: int) -> str:
    """Where an interrupted run is, and the command that resumes or restarts it."""
    rows: dict[str, str | None] = {"folder": str(run_dir)}
    if (run_dir / "report.html").is_file():
        rows["report"] = str(run_dir / "report.html")
    start = "lockstep" if processes == 1 else f"torchrun --nproc-per-node {processes} -m lockstep"
    from .checkpoint.retention import steps  # imports torch, which --help does not wait for

    saved = steps(run_dir / "checkpoints")
    if saved or not (run_dir / "metrics.jsonl").exists():
        rows["go on"] = f"{start} train --resume {shlex.quote(str(run_dir))}"
        rows["from"] = f"step {saved[-1]}" if saved else "the start: no step was saved yet"
    else:
        rows["again"] = f"{start} train --config {shlex.quote(str(run_dir / 'config.yaml'))}"
        rows["from"] = "the start: it saved no checkpoints; add --checkpoint.interval N to go on from one"
    return align_rows(rows)


def align_rows(rows: Mapping[str, str | None]) -> str:
    """A line for each name that has a text, in aligned columns."""
    width = max(map(len, rows), default=0)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in rows.items() if text)
