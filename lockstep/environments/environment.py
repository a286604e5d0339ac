"""`Environment`: it is told what was sampled, and answers with what the model is given next, or with an end."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from statistics import mean
from typing import Any, ClassVar

from ..errors import InputError
from ..types import FinishReason, SamplingParams, Segment, Trajectory
from ..user_functions import is_unicode, one_line

# What a trajectory continues with: plain text, chat messages for the model's template, or token ids.
Given = str | list[dict[str, Any]] | list[int]
Message = dict[str, Any]
Reward = float | Mapping[str, float]  # a number, or several by name, which are summed
UNNAMED_REWARD = "reward"  # the name of a reward given as a number


@dataclass(frozen=True)
class Turn:
    """A turn that was sampled: its text without special tokens, its tokens, how it ended, and its chat message, with
    `tool_calls` if the model called `Environment.tools` in the format of its chat template. `malformed`: a call began
    but is invalid. `last`: no turn can follow. `sampled` is the trajectory's segment, with its log-probabilities and
    weight versions; do not change it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    message: Message = field(default_factory=dict)
    malformed: bool = False
    last: bool = False
    sampled: Segment | None = None


@dataclass(frozen=True)
class Next:
    """What follows a turn, with a reward for that turn, which counts however the trajectory ends."""

    given: Given
    reward: Reward


@dataclass(frozen=True)
class Branch:
    """Starts a new branch: the model continues from what is given alone, as from a new prompt. What was sampled before
    is trained on in the branch in which it was sampled."""

    given: Given


@dataclass(frozen=True)
class End:
    """The end of a trajectory. `reward` is that of the last turn, added to those of other turns; None leaves it to the
    task's reward functions. With `functions`, these are called in any case, and their rewards added.

    Reward functions get as the completion all that was sampled as one text, or the chat messages in `completion`;
    `columns` are passed to them in addition to the data's.
    """

    reward: Reward | None = None
    functions: bool = False
    completion: list[Message] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def named_rewards(reward: Reward | None) -> dict[str, float]:
    """A reward as it is recorded, by name; empty for None."""
    if reward is None:
        return {}
    if isinstance(reward, Mapping):
        return {name: float(value) for name, value in reward.items()}
    return {UNNAMED_REWARD: float(reward)}


class Environment:
    """The environment of one trajectory; subclass it in a separate file. Each sample has its own object, constructed
    without arguments.

    `start` and `step` may be `async def`. Plain ones are called in a separate thread, so they may block, for up to
    `task.environment_timeout`, and must guard what they share with other objects. While some wait, others are sampled.
    What is sampled does not depend on timing, only on what was given.
    """

    instant: ClassVar[bool] = False  # `start` and `step` never block: they are called between the generator's launches
    begin_alike: ClassVar[bool] = True  # `start` must return the same for all samples of a prompt
    begin_together: ClassVar[bool] = True  # sampling of a prompt begins once `start` has returned for all its samples
    plays: ClassVar[Any] = None  # a class that replaces `episodes.EpisodeRunner`
    variant: str = ""  # for metrics: the name among several environments in one run, set once `start` has returned

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of what the model may call, for its chat template; known once `start` has returned."""
        return ()

    @classmethod
    def toolsets(cls) -> Sequence[Sequence[Mapping[str, Any]]]:
        """All values that `tools` may have, for memory planning."""
        return ((),)

    @classmethod
    def begins_with_rows(cls) -> bool:
        """Whether what `start` returns is the row's prompt, perhaps with more text: a row that is too long is then
        refused before the first step."""
        return cls.start is Environment.start and cls.plays is None

    @property
    def exposed(self) -> Any:
        """What reward functions with an argument `environments` are given for this one."""
        return self

    def start(self, row: dict[str, Any], seed: int) -> Given | Awaitable[Given]:
        """The prompt; by default, that of the row. `row` has the problem's `prompt` and columns. `seed` is the same for
        all samples of a prompt, which must all return the same. Define `begins_with_rows`, too, if it begins with the
        row's prompt: else a row that is too long ends the run only once it is played."""
        return row["prompt"]

    def step(self, turn: Turn) -> Given | Branch | Next | End | Awaitable[Given | Branch | Next | End]:
        """What follows a turn. A turn that ended by "length" or "truncated" is the last, whatever this returns."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def cut(self) -> End | Awaitable[End]:
        """The end of a trajectory that was cut by a limit: on turns, on its tokens, or on a turn's tokens. Called like
        `step`."""
        return End(0.0)

    def until(self, sampling: SamplingParams) -> SamplingParams:
        """How to sample the next turn, if it is sampled by itself (not a prompt's several samples together): as given,
        or with fewer tokens or additional stop tokens. Nothing else may differ."""
        return sampling

    def close(self) -> None:
        """Called once the trajectory was scored or left out; the object is then no longer used."""

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Sequence[str]:
        """The model's turns in a trajectory that supervised warm-up steps train on."""
        return [worked_example]

    @classmethod
    def metrics(cls, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """The metrics of a step's trajectories."""
        given = [[s for s in t.segments[1:] if not s.sampled] for t in trajectories]
        return {
            "environment/turns": mean(len(t.turns) for t in trajectories),
            "environment/given_tokens": mean(sum(len(s.token_ids) for s in of_one) for of_one in given),
            "environment/sampled_tokens": mean(t.length for t in trajectories),
            "environment/wait_s": mean(sum(turn.wait_s for turn in t.turns) for t in trajectories),
            "environment/branches": mean(len(t.branches) - 1 for t in trajectories),
            "environment/truncated": mean(float(t.finish_reason == "truncated") for t in trajectories),
        }


def environment_metrics(kind: type[Environment], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`Environment.metrics`. Raises `InputError` if that raises, or returns anything but numbers by name."""
    what = f"task.environment: {kind.__name__}.metrics"
    try:  # without `as_input_error`, as this runs in every step
        metrics = kind.metrics(trajectories)
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {one_line(error)}") from error
    named = isinstance(metrics, Mapping) and all(isinstance(name, str) and is_unicode(name) for name in metrics)
    if not named or "step" in metrics or not all(isinstance(value, Real) for value in metrics.values()):
        raise InputError(
            f"{what} returned {one_line(metrics, repr)}; it must return numbers by name, none of them `step`"
        )
    return {name: float(value) for name, value in metrics.items()}


class SingleTurn(Environment):
    """The row's prompt is completed once, and the task's reward functions score the completion."""

    instant = True

    def step(self, turn: Turn) -> End:
        return End()

    def cut(self) -> End:
        return End()

    @classmethod
    def metrics(cls, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {}
