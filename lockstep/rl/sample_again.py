"""One trajectory sampled again, alone, as a step samples it among others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from ..environments import Branch, End, Environment, Failures, Problem, Turn
from ..environments.base import draw
from ..environments.episodes import Asked, Play
from ..errors import LockstepError
from ..types import SampleIdentity, Trajectory
from .loop import Loop


class Recorded(Environment):
    """Gives what a record says was given, as its tokens."""

    instant: ClassVar[bool] = True
    given: ClassVar[list[tuple[list[int], bool]]]

    def __init__(self) -> None:
        self._left = list(self.given)

    def start(self, row: dict[str, Any], seed: int) -> Any:
        return self._left.pop(0)[0]

    def step(self, turn: Turn) -> Any:
        if not self._left:
            return End(0.0)
        tokens, anew = self._left.pop(0)
        return Branch(tokens) if anew else tokens


def sample_again(loop: Loop, identity: SampleIdentity, given: list[tuple[list[int], bool]] | None) -> Trajectory:
    """Sample the trajectory of `identity` with the weights of now. `given` are the tokens of its prompt and of what is
    given after each turn, with whether they begin a branch; None asks the task and the environment anew.

    Raises `LockstepError` when the environment fails.
    """
    run, where = loop.run, f"step {identity.step + 1} group {identity.group}"
    kind, problem = run.environment, Problem("")
    if given is None:
        problem = run.task.train_problem(identity.step, identity.group)
    else:
        kind = type("Again", (Recorded,), {"given": given})
    play = Play(kind, run.policy.tokens, lambda *_: run.engine, loop.limits, Failures(allowed=0), run.timings)
    seed = draw("environment", identity.seed, identity.domain, identity.step, identity.group)
    try:
        asked = [Asked(identity.group, problem, seed, where)]
        ((episode,),) = play.run(asked, replace(run.sampling, n=1), identity)
    finally:
        play.close()
    if episode.trajectory is None:
        raise LockstepError(f"{where}: nothing was sampled")
    return episode.trajectory
