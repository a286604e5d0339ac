"""`Task`, a source of problems, each a pure function of its place in the run, and of their rewards."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .rewards.reward_set import RewardSet

Prompt = str | list[dict[str, Any]]
Encode = Callable[[Prompt], list[int]]


@dataclass(frozen=True)
class Problem:
    """A prompt, with what its rewards need.

    `prompt` is plain text or chat messages; `columns` are passed to the reward functions by name. `worked_example` is a
    completion that earns the full reward, without the end-of-sequence token. `origin` names the data row in messages,
    for example "train.jsonl line 3".
    """

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    worked_example: str | None = None
    origin: str = ""


class RowSource:
    """Data rows, read one at a time; `data` names them in messages."""

    def __init__(self, data: str, rows: Sequence[Any]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, read or generated at each call."""
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.row, range(len(self)))

    def origin(self, index: int) -> str:
        """The name of row `index` in messages: the data and the row's number, from 0."""
        return f"{self._data} row {index}"


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens that a prompt may have, and the reason in words."""

    tokens: int
    reason: str


class Task(ABC):
    """A source of problems and their rewards. It has no state, so a run resumes from a step's number alone."""

    name: str
    rewards: RewardSet
    rows = 0  # in an epoch; 0: problems are generated without end

    @abstractmethod
    def train_problem(self, step: int, group: int) -> Problem:
        """The problem that group `group` of step `step` trains on."""

    @abstractmethod
    def validation_problems(self) -> list[Problem]:
        """The held-out problems, the same at every call; empty if validation is off."""

    def selection_problems(self) -> list[Problem]:
        """The held-out problems that decide when a warm-up ends: as many as validation has, and none of those."""
        raise InputError(f"task {self.name} has no held-out problems beside those of validation, which warm-ups end by")

    def warmup_problem(self, step: int, index: int) -> Problem:
        """Example `index` of supervised step `step`, with its worked example."""
        raise InputError(f"task {self.name} has no worked examples, which supervised warm-up steps need")

    def check_lengths(  # noqa: B027 (most tasks need none)
        self, encode: Encode, limit: PromptLimit, training: bool = True, must_fit: bool = True
    ) -> None:
        """Leave out prompts with more tokens than `limit`, or refuse them if they `must_fit`: those of validation, and
        unless `training` is off, of training. Called once, before the first step."""


def parse_setting(text: str, label: str, form: str) -> tuple[str, Any]:
    """The name, which may be dotted, and the value of NAME=VALUE, where the value is JSON. Raises `InputError` for
    anything else, naming `label`, which the text is a part of, and the expected `form`."""
    name, _, value = text.partition("=")
    with suppress(ValueError):
        if all(part.isidentifier() for part in name.split(".")):
            return name, json.loads(value)
    raise InputError(f"{label} has the setting {text!r}; each must be {form}")


def draw(*key: int | str) -> int:
    """64 pseudorandom bits, a pure function of `key` (BLAKE2b of its parts). Used modulo small bounds only."""
    text = "/".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
