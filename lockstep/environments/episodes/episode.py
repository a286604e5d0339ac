"""`Episode`, a trajectory in progress, and `EpisodeContext`, what a number of them are played with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ...config import TaskConfig
from ...errors import LockstepError
from ...timings import Timings
from ...types import SampleIdentity, SamplingParams, Trajectory
from ...user_functions import IMMUTABLE_TYPES, copy_nested, one_line
from ..base import Problem
from ..calls import Failure
from ..codec import ChatCodec, Messages
from ..environment import End, Environment

_log = logging.getLogger("lockstep")


class SampleOutput(Protocol):
    """A sample with new tokens and, once it is finished, its trajectory."""

    @property
    def request_id(self) -> int: ...
    @property
    def identity(self) -> SampleIdentity: ...
    @property
    def completion(self) -> Trajectory | None: ...


class Sampler(Protocol):
    """The generator's interface, which `generator.Engine` implements."""

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int: ...
    def advance(self) -> Sequence[SampleOutput]: ...
    def abort(self, request_id: int) -> list[Trajectory]: ...


MakeSampler = Callable[[list[list[int]], list[SamplingParams]], Sampler]


@dataclass(frozen=True)
class Limits:
    """Limits of a trajectory.

    Attributes:
        prompt_tokens, response_tokens: in the prompt, and after it; None: only a turn's limit holds.
        timeout: seconds for each answer of the environment; 0: any.
        prompt_reason: where `prompt_tokens` comes from, in words.
        packed_tokens: rows of all branches together, if they must be in one micro-batch.
        context: the model's context, if no other limit implies it.
    """

    prompt_tokens: int | None = None
    response_tokens: int | None = None
    turns: int = 1
    timeout: float = 0.0
    prompt_reason: str = ""
    packed_tokens: int | None = None
    context: int | None = None


@dataclass(eq=False)
class Episode:
    """A trajectory in progress.

    Attributes:
        prompt: what its environment began with.
        messages: the chat so far, as the template is given it; None: the trajectory is not a chat.
        cut: a limit ended it. rewarded: a turn before the end has a reward.
        failure: why its environment failed, if it did.
    """

    environment: Environment
    group: int
    sample: int
    codec: ChatCodec
    trajectory: Trajectory | None = None
    prompt: str | Messages = ""
    messages: Messages | None = None
    turns: int = 0
    cut: bool = False
    rewarded: bool = False
    failure: Failure | None = None
    end: End | None = None


@dataclass
class Failures:
    """Counts environments that fail in a row; more than `allowed` end the run. `setting` has that number, if any does.
    `first` is the first of them; `messages` are those since the last `take_messages`. A traceback that equals the one
    before is not logged again."""

    allowed: int = TaskConfig.max_environment_failures - 1
    setting: str = "task.max_environment_failures"
    in_a_row: int = 0
    first: Failure | None = None
    messages: list[str] = field(default_factory=list)
    logged_traceback: str = ""

    def add(self, where: str, failure: Failure) -> None:
        """Count and log a failure. `LockstepError`, with the first one's traceback as a note: there were too many."""
        message = f"{where}: its environment failed: {failure.reason}"
        self.messages.append(f"{failure.traceback}{message}")
        _log.warning("%s", message if failure.traceback == self.logged_traceback else self.messages[-1])
        self.logged_traceback = failure.traceback or self.logged_traceback
        if not self.in_a_row or self.first is None:
            self.first = failure
        self.in_a_row += 1
        if self.in_a_row > self.allowed:
            limit = f", as many as end the run ({self.setting})" if self.setting else ""
            error = LockstepError(
                f"{where}: the environment failed for {self.in_a_row} trajectories in a row{limit}; the first: "
                f"{one_line(self.first.reason)}"
            )
            if self.first.traceback:
                error.add_note(self.first.traceback.rstrip())
            raise error

    def take_messages(self) -> list[str]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken


class GroupRequest(NamedTuple):
    """A problem to play: its group's number, and what its environments start from; `where` names it in messages."""

    group: int
    problem: Problem
    seed: int
    where: str

    @property
    def row(self) -> dict[str, Any]:
        """The problem's columns and prompt, copied at each access. `InputError`: a value contains itself."""
        row = {**self.problem.columns, "prompt": self.problem.prompt}
        for name, value in row.items():
            if type(value) not in IMMUTABLE_TYPES:
                row[name] = copy_nested(value, f"{self.where}: {name}")
        return row


class EpisodeContext(NamedTuple):
    """What the samples of several prompts are played with.

    Attributes:
        make_sampler: makes the generator, given the token ids and sampling parameters of the first prompts.
        on_group_end: called with a prompt's episodes once all of them have ended or failed, while others continue.
    """

    environment: type[Environment]
    codec: ChatCodec
    make_sampler: MakeSampler
    limits: Limits
    failures: Failures
    timings: Timings
    on_group_end: Callable[[list[Episode]], None] | None = None
