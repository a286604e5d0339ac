"""What an environment is: it is told what was sampled, and answers with what is given next, or with an end."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from statistics import mean
from typing import Any, ClassVar

from ..errors import InputError
from ..types import FinishReason, SamplingParams, Segment, Trajectory
from ..user_functions import is_unicode, one_line

# What a trajectory goes on with: text as it is, chat messages through the model's template, or tokens.
Given = str | list[dict[str, Any]] | list[int]
Message = dict[str, Any]
Reward = float | Mapping[str, float]  # a number, or several by name, which are added up
PLAIN = "reward"  # the name of a number


@dataclass(frozen=True)
class Turn:
    """What was sampled: its text without special tokens, its tokens, how it ended, and the chat message that it is,
    with `tool_calls` where the model called `Environment.tools` in the form that its chat template teaches.
    `malformed`: it began a call that is none. `last`: no other can follow. `sampled` is the trajectory's own segment,
    with its log-probabilities and the weights' versions: read it, and leave it as it is."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    message: Message = field(default_factory=dict)
    malformed: bool = False
    last: bool = False
    sampled: Segment | None = None


@dataclass(frozen=True)
class Next:
    """What follows a turn that has a reward of its own, whatever becomes of the trajectory."""

    given: Given
    reward: Reward


@dataclass(frozen=True)
class Branch:
    """What is given begins anew: the model goes on from this alone, as from another prompt. What was sampled before is
    trained in the branch that it was sampled in."""

    given: Given


@dataclass(frozen=True)
class End:
    """The end of a trajectory. `reward` is the last turn's, added to what other turns had; None leaves it to the task's
    reward functions, and with `functions` they are asked as well, and added.

    What these are given as the completion is all that was sampled as one text, or the chat messages in `completion`;
    `columns` are further ones of this trajectory, beside the data's.
    """

    reward: Reward | None = None
    functions: bool = False
    completion: list[Message] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def by_name(reward: Reward | None) -> dict[str, float]:
    """A reward's parts, as they are recorded; none of None."""
    named = reward if isinstance(reward, Mapping) else {} if reward is None else {PLAIN: reward}
    return {name: float(value) for name, value in named.items()}


class Environment:
    """One trajectory's surroundings: subclass it in a file of its own. Every sample has an object of its own, made
    without arguments.

    `start` and `step` may be `async def`. A plain one is called in a thread of its own, so it may wait for as long as
    `task.environment_timeout` allows; what it shares with other objects it must guard. While some wait, others are
    sampled. What is sampled depends on no tool's time, only on what was given.
    """

    instant: ClassVar[bool] = False  # `start` and `step` never wait: they are called between the generator's launches
    begin_alike: ClassVar[bool] = True  # samples of a prompt whose `start` differs are refused
    begin_together: ClassVar[bool] = True  # samples of a prompt are begun when all of them have started
    plays: ClassVar[Any] = None  # what plays a round of them, as `episodes.Play` does; None: that
    variant: str = ""  # which of several environments in one run this is, for metrics, once `start` has returned

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """What the model may call, for its chat template: JSON schemas, known once `start` has returned."""
        return ()

    @classmethod
    def toolsets(cls) -> Sequence[Sequence[Mapping[str, Any]]]:
        """All that `tools` may be, which plans memory."""
        return ((),)

    @property
    def exposed(self) -> Any:
        """What reward functions that take `environments` are given for this one."""
        return self

    def start(self, row: dict[str, Any], seed: int) -> Given | Awaitable[Given]:
        """The prompt: by default that of the row, which is the problem's `prompt` and other columns. `seed` is the same
        for all samples of a prompt, whose prompts must be the same."""
        return row["prompt"]

    def step(self, turn: Turn) -> Given | Branch | Next | End | Awaitable[Given | Branch | Next | End]:
        """What follows a turn. One that ended by "length" or "truncated" is the last, whatever is answered."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def cut(self) -> End | Awaitable[End]:
        """What a trajectory is worth that a limit ended: of its turns, its tokens, or the turn's own. Called as `step`
        is."""
        return End(0.0)

    def until(self, sampling: SamplingParams) -> SamplingParams:
        """How the next turn of a trajectory that began by itself is sampled: as the run says, or ended earlier, by
        fewer tokens or further stop tokens. Nothing else of it may be other."""
        return sampling

    def close(self) -> None:
        """Called once the trajectory was scored, or left out; this object is not used any more."""

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Sequence[str]:
        """What is to be sampled, turn by turn, in a trajectory that supervised warm-up steps train on."""
        return [worked_example]

    @classmethod
    def metrics(cls, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """What a step records of its trajectories."""
        given = [[s for s in t.segments[1:] if not s.sampled] for t in trajectories]
        return {
            "environment/turns": mean(len(t.turns) for t in trajectories),
            "environment/given_tokens": mean(sum(len(s.token_ids) for s in of_one) for of_one in given),
            "environment/sampled_tokens": mean(t.length for t in trajectories),
            "environment/wait_s": mean(sum(turn.wait_s for turn in t.turns) for t in trajectories),
            "environment/branches": mean(len(t.branches) - 1 for t in trajectories),
            "environment/truncated": mean(float(t.finish_reason == "truncated") for t in trajectories),
        }


def metrics_of(kind: type[Environment], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`Environment.metrics`. Raises `InputError` where it raises, or returns something else than numbers by name."""
    what = f"task.environment: {kind.__name__}.metrics"
    try:  # not `blamed`, as every step comes this way
        found = kind.metrics(trajectories)
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {one_line(error)}") from error
    named = isinstance(found, Mapping) and all(isinstance(name, str) and is_unicode(name) for name in found)
    if not named or "step" in found or not all(isinstance(value, Real) for value in found.values()):
        raise InputError(
            f"{what} returned {one_line(found, repr)}; it must return numbers by name, none of them `step`"
        )
    return {name: float(value) for name, value in found.items()}


class SingleTurn(Environment):
    """The row's prompt, completed once; the task's reward functions score it."""

    instant = True

    def step(self, turn: Turn) -> End:
        return End()

    def cut(self) -> End:
        return End()

    @classmethod
    def metrics(cls, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        return {}
