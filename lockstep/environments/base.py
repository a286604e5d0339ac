"""What a task is: a source of problems, each a pure function of its place in the run, and their rewards."""

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
    """One prompt with what its reward needs to know.

    `prompt` is plain text or chat messages; `columns` go to the reward functions by name. `worked_example` is a
    completion, without the end-of-sequence token, that earns the full reward. `origin` names the data row in
    messages, for example "train.jsonl line 3".
    """

    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)
    worked_example: str | None = None
    origin: str = ""


class Source:
    """Data rows, read one at a time; `data` names them in messages."""

    def __init__(self, data: str, rows: Sequence[Any]) -> None:
        self._data, self._rows = data, rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index`, read or made anew."""
        return self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.row, range(len(self)))

    def origin(self, index: int) -> str:
        """The data and the row, counted from 0."""
        return f"{self._data} row {index}"


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens a prompt may have, and in words where that comes from."""

    tokens: int
    reason: str


class Task(ABC):
    """A prompt source and its rewards. Nothing in it advances, so a run resumes from a step's number alone."""

    name: str
    rewards: RewardSet
    rows = 0  # of an epoch; 0: problems are drawn, without end

    @abstractmethod
    def train_problem(self, step: int, group: int) -> Problem:
        """The problem that group `group` of step `step` trains on."""

    @abstractmethod
    def validation_problems(self) -> list[Problem]:
        """The held-out problems, the same at every call; empty when validation is off."""

    def selection_problems(self) -> list[Problem]:
        """As many held-out problems as validation has, and none of those: they decide when a warm-up ends."""
        raise InputError(f"task {self.name} has no held-out problems beside those of validation, which warm-ups end by")

    def warmup_problem(self, step: int, index: int) -> Problem:
        """Example `index` of supervised step `step`, with its worked example."""
        raise InputError(f"task {self.name} has no worked examples, which supervised warm-up steps need")

    def check_lengths(self, encode: Encode, limit: PromptLimit) -> None:  # noqa: B027 (most tasks need none)
        """Refuse or leave out the prompts that have more tokens than `limit` allows, once, before the first step."""


def setting(text: str, label: str, form: str) -> tuple[str, Any]:
    """The name, perhaps of parts with dots between them, and the value of NAME=VALUE, the value in JSON. Raises
    `InputError` for anything else, naming `label`, what the text is a part of, and the `form` that is right."""
    name, _, value = text.partition("=")
    with suppress(ValueError):
        if all(part.isidentifier() for part in name.split(".")):
            return name, json.loads(value)
    raise InputError(f"{label} has the setting {text!r}; each must be {form}")


def draw(*key: int | str) -> int:
    """64 random bits that are a pure function of `key`: BLAKE2b of its parts. Used modulo small bounds only."""
    text = "/".join(str(part) for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
