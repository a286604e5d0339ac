"""What an environment is: it is told what was sampled, and answers with what is given next, or with an end."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, ClassVar

from ..types import FinishReason, Trajectory

# What a trajectory goes on with: text as it is, chat messages through the model's template, or tokens.
Given = str | list[dict[str, Any]] | list[int]
Message = dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What was sampled: its text without special tokens, its tokens, how it ended, and the chat message that it is,
    with `tool_calls` where the model called `Environment.tools` in the form that its chat template teaches.
    `malformed`: it began a call that is none. `last`: no other can follow."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    message: Message = field(default_factory=dict)
    malformed: bool = False
    last: bool = False


@dataclass(frozen=True)
class Branch:
    """What is given begins anew: the model goes on from this alone, as from another prompt. What was sampled before is
    trained in the branch that it was sampled in."""

    given: Given


@dataclass(frozen=True)
class End:
    """The end of a trajectory. `reward` is one number, or several by name, which are added up; None leaves it to the
    task's reward functions, and with `functions` they are asked as well, and added.

    What these are given as the completion is all that was sampled as one text, or the chat messages in `completion`.
    """

    reward: float | Mapping[str, float] | None = None
    functions: bool = False
    completion: list[Message] | None = None


class Environment:
    """One trajectory's surroundings: subclass it in a file of its own. Every sample has an object of its own, made
    without arguments.

    `start` and `step` may be `async def`. A plain one is called in a thread of its own, so it may wait for as long as
    `task.environment_timeout` allows; what it shares with other objects it must guard. While some wait, others are
    sampled. What is sampled depends on no tool's time, only on what was given.
    """

    instant: ClassVar[bool] = False  # `start` and `step` never wait: they are called between the generator's launches
    begin_alike: ClassVar[bool] = True  # samples of a prompt whose `start` differs are refused

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
        """The prompt: by default the row's.

        Args:
            row: the problem's `prompt` and its other columns.
            seed: the same for all samples of a prompt, whose prompts must be the same.
        """
        return row["prompt"]

    def step(self, turn: Turn) -> Given | Branch | End | Awaitable[Given | Branch | End]:
        """What follows a turn. One that ended by "length" or "truncated" is the last, whatever is answered."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def cut(self) -> End | Awaitable[End]:
        """What a trajectory is worth that a limit ended: of its turns, its tokens, or the turn's own. Called as `step`
        is."""
        return End(0.0)

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
            "environment/sampled_tokens": mean(len(t.token_ids) for t in trajectories),
            "environment/wait_s": mean(sum(s.wait_s for s in of_one) for of_one in given),
            "environment/branches": mean(len(t.branches) - 1 for t in trajectories),
            "environment/truncated": mean(float(t.finish_reason == "truncated") for t in trajectories),
        }


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
