"""Tasks, which are sources of prompts; environments, which answer the model turn by turn; and rewards.

Modules that need torch are imported lazily: processes that only score do without it.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..config import TaskConfig
from ..errors import InputError, refuse
from .base import Problem, PromptLimit, Task
from .data.dataset import DatasetTask, hold_out
from .data.rows import Problems, RowFormat, checked_messages, log_notice, read_problems
from .data.sources import has_splits
from .rewards.loading import load_rewards
from .rewards.reward_set import Reward, RewardSet
from .rewards.workers import RewardWorkers
from .tasks.gsm8k import check_answer, gsm8k_reward
from .tasks.sum_digits import REWARDS, SumDigits
from .tasks.word_arithmetic import WordArithmetic

if TYPE_CHECKING:
    from .codec import ChatCodec, TurnMessage, parse_plain_turn
    from .collect import Collector
    from .environment import Branch, End, Environment, Next, Turn
    from .episodes import Failures, Limits
    from .loading import make_environment
    from .worked_examples import worked_trajectories

_WITH_TORCH = {
    "collect": {"Collector"},
    "environment": {"Branch", "End", "Environment", "Next", "Turn"},
    "episodes": {"Failures", "Limits"},
    "loading": {"make_environment"},
    "codec": {"TurnMessage", "ChatCodec", "parse_plain_turn"},
    "worked_examples": {"worked_trajectories"},
}


def __getattr__(name: str) -> Any:
    for module, names in _WITH_TORCH.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_GSM8K_REWARD = Reward("correct", gsm8k_reward, spec="gsm8k")
_OWN_REWARDS = {"sum-digits": REWARDS, "word-arithmetic": REWARDS, "gsm8k": (_GSM8K_REWARD,)}


def make_task(config: TaskConfig, prompts_per_step: int) -> Task:
    """The task that `config` describes, with its data read and checked and its rewards loaded.

    `prompts_per_step`, the number of groups in a step, determines where a step is in the data's order. Raises
    `InputError` naming the invalid field, file and line, or reward.
    """
    rewards = _rewards(config)
    if config.name in ("sum-digits", "word-arithmetic"):
        rewards.check_columns(["answer"])
        seeds = config.seed, config.validation_seed, config.validation_prompts
        if config.name == "sum-digits":
            return SumDigits(*seeds, config.easy, rewards)
        return WordArithmetic(*seeds, rewards)
    return DatasetTask(config, *_read(config, rewards), rewards, prompts_per_step)


def _rewards(config: TaskConfig) -> RewardSet:
    workers = RewardWorkers(config.reward_workers, config.reward_timeout) if config.reward_workers else None
    if config.reward:
        return load_rewards(config.reward, config.reward_weights, config.reward_on_error, workers)
    own = _OWN_REWARDS.get(config.name, ())  # without rewards, the algorithm must learn otherwise
    return RewardSet(list(own), config.reward_on_error, workers)


def _read(config: TaskConfig, rewards: RewardSet) -> tuple[Problems, Problems | None]:
    """The training and validation problems."""
    assert config.data is not None  # config.validate
    held_out = config.validation_data or (config.data if config.validation_split else None)
    for name, sources in {"split": (config.data, held_out), "validation_split": (held_out,)}.items():
        refuse(
            getattr(config, name) != getattr(TaskConfig, name) and not any(map(has_splits, filter(None, sources))),
            f"task.{name} has no effect on {sources[0]}, which has no splits; remove it",
        )
    chats = 0

    def check(problem: Problem) -> None:
        nonlocal chats
        chats += not isinstance(problem.prompt, str)
        if config.name == "gsm8k":
            check_answer(problem)
        rewards.check_row(problem.columns, problem.origin)

    problems = read_problems(config.data, config, check)
    validation: Problems | None
    if config.validation_prompts == 0 or held_out is None:
        problems, validation = hold_out(problems, config.validation_prompts)
    else:
        split = config.validation_split or config.split
        same = (held_out, split) == (config.data, config.split)  # as in an evaluation
        data = replace(config, split=split)
        rows = problems if same else read_problems(held_out, data, check, "task.validation_data")
        validation = rows[: config.validation_prompts]
        if len(rows) > len(validation) and not same:
            message = "%s has %d rows; the first %d are validated on, as task.validation_prompts says"
            log_notice(message, rows.label, len(rows), len(validation))
    if config.chat_template_kwargs and not chats:
        raise InputError(
            "task.chat_template_kwargs has no effect on text prompts, which go without a template; remove it, or make "
            "them chats with task.system_prompt"
        )
    return problems, validation
