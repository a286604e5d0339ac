"""Tasks: where prompts come from and how completions are scored."""

from __future__ import annotations

from ..config import TaskConfig
from ..errors import InputError
from .base import Problem, PromptLimit, Task
from .dataset import DatasetTask, hold_out
from .gsm8k import check_answer, gsm8k_reward
from .loading import load_rewards
from .rewards import Reward, RewardSet
from .rows import Problems, read_problems
from .sum_digits import REWARDS, SumDigits
from .word_arithmetic import WordArithmetic
from .workers import RewardWorkers

__all__ = ["Problem", "PromptLimit", "Reward", "RewardSet", "Task", "make_task", "read_problems"]

_GSM8K_REWARD = Reward("correct", gsm8k_reward, spec="gsm8k")
_OWN_REWARDS = {"sum-digits": REWARDS, "word-arithmetic": REWARDS, "gsm8k": (_GSM8K_REWARD,)}


def make_task(config: TaskConfig, prompts_per_step: int) -> Task:
    """The task that `config` describes, its data read and checked and its rewards loaded.

    `prompts_per_step` is the number of groups a step, which places a step in the data's order. Raises `InputError`
    naming the field, file and line, or reward that is wrong.
    """
    rewards = _rewards(config)
    if config.name in ("sum-digits", "word-arithmetic"):
        rewards.check_columns(["answer"])
        seeds = config.seed, config.validation_seed, config.validation_prompts
        if config.name == "sum-digits":
            return SumDigits(*seeds, config.easy, rewards)
        return WordArithmetic(*seeds, rewards)
    return DatasetTask(config, *_read(config), rewards, prompts_per_step)


def _rewards(config: TaskConfig) -> RewardSet:
    workers = RewardWorkers(config.reward_workers, config.reward_timeout) if config.reward_workers else None
    if config.reward:
        return load_rewards(config.reward, config.reward_weights, config.reward_on_error, workers)
    if config.name not in _OWN_REWARDS:
        raise InputError(f"task.reward is missing: task {config.name} has no reward of its own")
    return RewardSet(list(_OWN_REWARDS[config.name]), config.reward_on_error, workers)


def _read(config: TaskConfig) -> tuple[Problems, Problems | None]:
    """Training and validation rows."""
    assert config.data is not None  # config.validate
    check = check_answer if config.name == "gsm8k" else lambda problem: None
    problems = read_problems(config.data, config, check)
    if config.validation_prompts == 0 or config.validation_data is None:
        return hold_out(problems, config.validation_prompts)
    return problems, read_problems(config.validation_data, config, check)[: config.validation_prompts]
