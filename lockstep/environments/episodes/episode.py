"""A trajectory in the making, and what the samples of some prompts are played with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...errors import LockstepError
from ...timings import Timings
from ...types import SampleIdentity, SamplingParams, Trajectory
from ...user_functions import ATOMS, one_line, own
from ..base import Problem
from ..calls import Failure
from ..environment import End, Environment
from ..tokens import Messages, Tokens

FAILURES = 16  # trajectories in a row that their environment fails end the run

_log = logging.getLogger("lockstep")


class NewTokens(Protocol):
    """A sample that has new tokens, and once it is finished its trajectory."""

    @property
    def request_id(self) -> int: ...
    @property
    def identity(self) -> SampleIdentity: ...
    @property
    def completion(self) -> Trajectory | None: ...


class Sampler(Protocol):
    """The generator, as `generator.Engine` is one."""

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int: ...
    def advance(self) -> Sequence[NewTokens]: ...
    def abort(self, request_id: int) -> list[Trajectory]: ...


@dataclass(frozen=True)
class Limits:
    """Of a trajectory: the tokens of its prompt and those after it (None: no limit but a turn's), its turns, and the
    seconds that its environment may take to answer (0: any); in words where the first comes from; the rows that its
    branches may take together, where they must stand in one micro-batch; and the model's context, where no other holds
    a trajectory to it."""

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    turns: int = 1
    timeout: float = 0.0
    prompt_reason: str = ""
    packed_tokens: int | None = None
    context: int | None = None


@dataclass(eq=False)
class Episode:
    """A trajectory in the making. `prompt` is what its environment began with, `failure` tells why an answer of it is
    missing."""

    environment: Environment
    group: int
    sample: int
    tokens: Tokens
    trajectory: Trajectory | None = None
    prompt: str | Messages = ""
    messages: Messages | None = None
    turns: int = 0
    cut: bool = False
    rewarded: bool = False  # before its end
    failure: Failure | None = None
    end: End | None = None


@dataclass
class Failures:
    """Environments that failed: how many in a row, of those that are allowed to, 0 once one went well, and the first of
    them; and what was told of each, until `take` has it."""

    allowed: int = FAILURES - 1
    in_a_row: int = 0
    first: Failure | None = None
    told: list[str] = field(default_factory=list)

    def add(self, where: str, failure: Failure) -> None:
        """Log it. Raises `LockstepError`, with the first one's traceback as a note, when there are too many."""
        message = f"{where}: its environment failed: {failure.reason}"
        self.told.append(f"{failure.traceback}{message}")
        _log.warning("%s", self.told[-1])
        if not self.in_a_row or self.first is None:
            self.first = failure
        self.in_a_row += 1
        if self.in_a_row > self.allowed:
            error = LockstepError(
                f"{where}: the environment failed for {self.in_a_row} trajectories in a row; the first: "
                f"{one_line(self.first.reason)}"
            )
            if self.first.traceback:
                error.add_note(self.first.traceback.rstrip())
            raise error

    def take(self) -> list[str]:
        """What was told since the last call."""
        taken, self.told = self.told, []
        return taken


class Asked(NamedTuple):
    """A problem to play: its group, and what its environments start from; `where` names it in messages."""

    group: int
    problem: Problem
    seed: int
    where: str

    @property
    def row(self) -> dict[str, Any]:
        """The problem's columns and its prompt, of which each sample has its own. `InputError`: one contains itself."""
        columns = {**self.problem.columns, "prompt": self.problem.prompt}
        return {n: v if type(v) in ATOMS else own(v, f"{self.where}: {n}") for n, v in columns.items()}


class Round(NamedTuple):
    """What the samples of some prompts are played with.

    Attributes:
        sampler: makes the generator for the first prompts, of which each is sampled as the parameters say.
        ended: is given a prompt's episodes once all of them have ended or failed, while others go on.
    """

    environment: type[Environment]
    tokens: Tokens
    sampler: Callable[[list[list[int]], list[SamplingParams]], Sampler]
    limits: Limits
    failures: Failures
    timings: Timings
    ended: Callable[[list[Episode]], None] | None = None
