"""Tasks that need no data: problems, with worked examples, are generated from a hash of their place in the run."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from ..base import Problem, Task
from ..rewards.reward_set import RewardSet

Split = Literal["train", "selection", "validation"]

_SPLITS: dict[int, Split] = {0: "validation", 8: "selection"}  # by hash modulo 16; the rest is for training


def split_of(hashed: int) -> Split:
    """The split that problems with this hash belong to."""
    return _SPLITS.get(hashed % 16, "train")


class GeneratedTask(Task):
    """Training, selection, validation and warm-up problems, each with separate random keys.

    The problem alone, whatever the seeds, decides its split: no held-out problem is trained on, and no problem is used
    both for selection and validation.
    """

    def __init__(self, seed: int, validation_seed: int, validation_prompts: int, rewards: RewardSet) -> None:
        self._seed, self._validation_seed, self._validation_prompts = seed, validation_seed, validation_prompts
        self.rewards = rewards

    @abstractmethod
    def draw_problem(self, split: Split, *key: int | str) -> Problem:
        """The problem with this key, from the problems of the split."""

    def train_problem(self, step: int, group: int) -> Problem:
        return self.draw_problem("train", "train", self._seed, step, group)

    def validation_problems(self) -> list[Problem]:
        return self._held_out("validation")

    def selection_problems(self) -> list[Problem]:
        return self._held_out("selection")

    def _held_out(self, split: Split) -> list[Problem]:
        return [self.draw_problem(split, split, self._validation_seed, i) for i in range(self._validation_prompts)]

    def warmup_problem(self, step: int, index: int) -> Problem:
        return self.draw_problem("train", "warmup", self._seed, step, index)
