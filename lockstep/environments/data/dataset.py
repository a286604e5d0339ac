"""Problems from data rows, visited in a seeded order."""

from __future__ import annotations

from ...config import TaskConfig
from ...errors import InputError
from ..base import Encode, Problem, PromptLimit, Task, draw
from ..rewards.reward_set import RewardSet
from .rows import Problems

_FEISTEL_ROUNDS = 6


class DatasetTask(Task):
    """Training rows, in a new permutation every epoch or always in the data's order, and separate validation rows.

    The row for (step, group) is a pure function of the seed and `prompts_per_step`, so resuming needs no state.
    """

    def __init__(
        self,
        config: TaskConfig,
        train: Problems,
        validation: Problems | None,
        rewards: RewardSet,
        prompts_per_step: int,
    ) -> None:
        """Raises `InputError` if a reward requires a column that the rows do not have."""
        for problems in (train, validation):
            if problems:
                rewards.check_columns(problems.columns)
        self.name, self.rewards, self._config = config.name, rewards, config
        self._train, self.rows, self._validation = train, len(train), validation
        self._prompts_per_step = prompts_per_step

    def train_problem(self, step: int, group: int) -> Problem:
        epoch, offset = divmod(step * self._prompts_per_step + group, len(self._train))
        if self._config.shuffle:
            offset = permute(offset, len(self._train), self._config.seed, epoch)
        return self._train[offset]

    def warmup_problem(self, step: int, index: int) -> Problem:
        """A random row, for an environment whose `worked_turns` make a worked example of it."""
        if self._config.environment is None:
            return super().warmup_problem(step, index)
        return self._train[draw("warm-up", self._config.seed, step, index) % len(self._train)]

    def validation_problems(self) -> list[Problem]:
        return list(self._validation or ())

    def check_lengths(self, encode: Encode, limit: PromptLimit, training: bool = True, must_fit: bool = True) -> None:
        """Leave out over-long prompts with `task.filter_overlong_prompts`, else refuse them if they `must_fit`."""
        leave_out = self._config.filter_overlong_prompts
        if not leave_out and not must_fit:
            return
        if training:
            self._train = self._train.filter_overlong(encode, limit, leave_out)
            self.rows = len(self._train)
        if self._validation:
            self._validation = self._validation.filter_overlong(encode, limit, leave_out, "validation")


def hold_out(problems: Problems, count: int) -> tuple[Problems, Problems | None]:
    """The rows for training, and the last `count` rows for validation. `InputError`: no rows are left for training."""
    if count == 0:
        return problems, None
    if count >= len(problems):
        raise InputError(
            f"{problems.label} has {len(problems)} rows and task.validation_prompts holds out {count}; "
            "give more rows, fewer validation prompts (0 turns validation off: --task.validation-prompts 0), or "
            "task.validation_data"
        )
    cut = len(problems) - count
    return problems[:cut], problems[cut:]


def permute(index: int, length: int, seed: int, epoch: int) -> int:
    """The image of `index` under a permutation of `range(length)` keyed by (seed, epoch), without state or table.

    A Feistel network over the next even number of bits, with cycle walking until the value is below `length` (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((length - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (draw("order", seed, epoch, turn, right) & mask)
        index = left << half | right
        if index < length:
            return index
