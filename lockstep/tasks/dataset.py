"""Problems from data rows, visited in a seeded order."""

from __future__ import annotations

from functools import lru_cache

from ..errors import InputError
from .base import Problem, Task, draw
from .rewards import RewardSet


class DatasetTask(Task):
    """Training rows in a new permutation every epoch, and validation rows kept out of it.

    The row of (step, group) is a pure function of the seed and `prompts_per_step`, so resuming needs no state.
    """

    def __init__(
        self,
        name: str,
        train: list[Problem],
        validation: list[Problem],
        rewards: RewardSet,
        seed: int,
        prompts_per_step: int,
    ) -> None:
        """Raises `InputError` when a reward requires a column that the rows do not have."""
        for problems in (train, validation):
            if problems:
                rewards.check_columns(problems[0].columns)
        self.name = name
        self.rewards = rewards
        self._train = train
        self._validation = validation
        self._seed = seed
        self._prompts_per_step = prompts_per_step

    def train_problem(self, step: int, group: int) -> Problem:
        epoch, offset = divmod(step * self._prompts_per_step + group, len(self._train))
        return self._train[permutation(len(self._train), self._seed, epoch)[offset]]

    def validation_problems(self) -> list[Problem]:
        return list(self._validation)


def hold_out(problems: list[Problem], count: int, data: str) -> tuple[list[Problem], list[Problem]]:
    """Training rows, and the last `count` rows for validation.

    Raises `InputError` when that leaves nothing to train on.
    """
    if count >= len(problems):
        raise InputError(
            f"task.data {data} has {len(problems)} rows and task.validation_prompts holds out {count}; "
            "give more rows, fewer validation prompts, or task.validation_data"
        )
    cut = len(problems) - count
    return problems[:cut], problems[cut:]


@lru_cache(maxsize=2)
def permutation(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order of the rows in one epoch: sorted by a hash of (seed, epoch, row)."""
    return tuple(sorted(range(length), key=lambda row: (draw("order", seed, epoch, row), row)))
