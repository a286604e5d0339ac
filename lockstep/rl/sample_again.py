"""Sampling one trajectory of a step again, alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

from ..environments import Branch, End, Environment, Failures, Problem, Turn
from ..environments.base import draw
from ..environments.episodes import Asked, Play, Round
from ..errors import LockstepError
from ..types import SampleIdentity, SamplingParams, Trajectory
from .loop import Loop


class Recorded(Environment):
    """An environment that gives the recorded tokens."""

    instant: ClassVar[bool] = True
    given: ClassVar[list[tuple[list[int], bool]]]
    ends: ClassVar[list[list[int]]]  # the sampled turns, if the environment may have ended them early

    def __init__(self) -> None:
        self._left, self._ends = list(self.given), list(self.ends)

    def start(self, row: dict[str, Any], seed: int) -> Any:
        return self._left.pop(0)[0]

    def step(self, turn: Turn) -> Any:
        if not self._left:
            return End(0.0)
        tokens, anew = self._left.pop(0)
        return Branch(tokens) if anew else tokens or ""  # "": the environment gave nothing

    def until(self, sampling: SamplingParams) -> SamplingParams:
        if not self._ends:
            return sampling
        turn = self._ends.pop(0)
        further = turn[-1:] if turn.count(turn[-1]) == 1 else []  # an earlier occurrence did not end it
        stops = (*sampling.stop_token_ids, *further)
        return replace(sampling, max_completion_length=len(turn), stop_token_ids=stops)


def sample_again(
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
        ends = [] if kind.until is Environment.until else turns  # the run's own settings ended the turns
        kind = type("Again", (Recorded,), {"given": given, "ends": ends})
    by = Round(kind, run.policy.tokens, lambda *_: run.engine, loop.limits, Failures(allowed=0), run.timings)
    seed = draw("environment", identity.seed, identity.domain, identity.step, identity.group)
    with closing(Play(by)) as play:
        ((episode,),) = play.run([Asked(identity.group, problem, seed, where)], replace(run.sampling, n=1), identity)
    if episode.trajectory is None:
        raise LockstepError(f"{where}: nothing was sampled")
    return episode.trajectory
