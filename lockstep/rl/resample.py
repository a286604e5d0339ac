"""Sampling one trajectory of a step again, alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

from ..environments import Branch, End, Environment, Failures, Problem, Turn
from ..environments.base import draw
from ..environments.episodes import EpisodeContext, EpisodeRunner, GroupRequest
from ..errors import LockstepError
from ..types import SampleIdentity, SamplingParams, Trajectory
from .loop import Loop


class RecordedEnvironment(Environment):
    """An environment that gives the recorded tokens."""

    instant: ClassVar[bool] = True
    given: ClassVar[list[tuple[list[int], bool]]]
    turns: ClassVar[list[list[int]]]  # as sampled, if the environment may have ended them early; else empty

    def __init__(self) -> None:
        self._given, self._turns = iter(self.given), iter(self.turns)

    def start(self, row: dict[str, Any], seed: int) -> Any:
        prompt, _ = next(self._given)
        return prompt

    def step(self, turn: Turn) -> Any:
        tokens, begins_branch = next(self._given, (None, False))
        if tokens is None:
            return End(0.0)
        if begins_branch:
            return Branch(tokens)
        return tokens or ""  # "": the environment gave nothing

    def until(self, sampling: SamplingParams) -> SamplingParams:
        turn = next(self._turns, None)
        if turn is None:
            return sampling
        stops = sampling.stop_token_ids
        if turn.count(turn[-1]) == 1:  # otherwise an earlier occurrence did not end it
            stops = (*stops, turn[-1])
        return replace(sampling, max_completion_length=len(turn), stop_token_ids=stops)


def resample_trajectory(
    loop: Loop, identity: SampleIdentity, given: list[tuple[list[int], bool]] | None, turns: list[list[int]]
) -> Trajectory:
    """Sample the trajectory of `identity` with the current weights. `given`: the tokens of the prompt and of what was
    given after each turn, each with whether they begin a branch (None: ask the task and the environment again).
    `turns`: the tokens of each turn as sampled originally. `LockstepError`: the environment fails."""
    run, where = loop.run, f"step {identity.step + 1} group {identity.group}"
    kind, problem = run.environment, Problem("")
    if given is None:
        problem = run.task.train_problem(identity.step, identity.group)
    else:
        if kind.until is Environment.until:  # the run's own settings ended the turns
            turns = []
        kind = type("Recorded", (RecordedEnvironment,), {"given": given, "turns": turns})
    context = EpisodeContext(
        kind, run.policy.tokens, lambda *_: run.engine, loop.limits, Failures(allowed=0, setting=""), run.timings
    )
    seed = draw("environment", identity.seed, identity.domain, identity.step, identity.group)
    with closing(EpisodeRunner(context)) as runner:
        request = GroupRequest(identity.group, problem, seed, where)
        ((episode,),) = runner.run([request], replace(run.sampling, n=1), identity)
    if episode.trajectory is None:
        raise LockstepError(f"{where}: nothing was sampled")
    return episode.trajectory
