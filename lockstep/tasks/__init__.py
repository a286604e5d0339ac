"""Tasks: where prompts come from and how completions are scored."""

from __future__ import annotations

from ..config import TaskConfig
from ..errors import InputError
from .base import Problem, Task
from .dataset import DatasetTask, hold_out
from .gsm8k import check_answers, gsm8k_reward
from .rewards import Reward, RewardSet, load_rewards
from .rows import read_problems
from .sum_digits import REWARDS, SumDigits

__all__ = ["Problem", "Reward", "RewardSet", "Task", "make_task"]

_OWN_REWARDS = {"sum-digits": REWARDS, "gsm8k": (Reward("correct", gsm8k_reward),)}


def make_task(config: TaskConfig, prompts_per_step: int) -> Task:
    """The task that `config` describes, its data read and checked and its rewards loaded.

    `prompts_per_step` is the number of groups a step, which places a step in the data's order. Raises `InputError`
    naming the field, file and line, or reward that is wrong.
    """
    rewards = _rewards(config)
    if config.name == "sum-digits":
        rewards.check_columns(["answer"])
        return SumDigits(config.seed, config.validation_seed, config.validation_prompts, config.easy, rewards)
    train, validation = _read(config)
    if config.name == "gsm8k":
        check_answers([*train, *validation])
    return DatasetTask(config.name, train, validation, rewards, config.seed, prompts_per_step)


def _rewards(config: TaskConfig) -> RewardSet:
    if config.reward:
        return load_rewards(config.reward, config.reward_weights)
    if config.name not in _OWN_REWARDS:
        raise InputError(f"task.reward is missing: task {config.name} has no reward of its own")
    return RewardSet(list(_OWN_REWARDS[config.name]))


def _read(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    """Training and validation rows."""
    assert config.data is not None  # config.validate
    problems = read_problems(config.data, config.split)
    if config.validation_prompts == 0 or config.validation_data is None:
        return hold_out(problems, config.validation_prompts, config.data)
    return problems, read_problems(config.validation_data, config.split)[: config.validation_prompts]
