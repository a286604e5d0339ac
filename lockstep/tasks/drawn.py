"""Tasks whose problems are drawn from a hash of their place in the run, with worked examples, and need no data."""

from __future__ import annotations

from abc import abstractmethod

from .base import Problem, Task
from .rewards import RewardSet


class DrawnTask(Task):
    """Training, validation and warm-up problems, each of its own draw.

    What decides whether a problem is kept for validation is the problem alone, whatever the seeds, so none of those is
    ever trained on.
    """

    def __init__(self, seed: int, validation_seed: int, validation_prompts: int, rewards: RewardSet) -> None:
        self._seed = seed
        self._validation_seed = validation_seed
        self._validation_prompts = validation_prompts
        self.rewards = rewards

    @abstractmethod
    def draw_problem(self, held_out: bool, *key: int | str) -> Problem:
        """The problem of this key, among those that are kept for validation or among the others."""

    def train_problem(self, step: int, group: int) -> Problem:
        return self.draw_problem(False, "train", self._seed, step, group)

    def validation_problems(self) -> list[Problem]:
        return [
            self.draw_problem(True, "validation", self._validation_seed, i) for i in range(self._validation_prompts)
        ]

    def warmup_problem(self, step: int, index: int) -> Problem:
        return self.draw_problem(False, "warmup", self._seed, step, index)
