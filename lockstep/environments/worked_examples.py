"""Worked examples as trajectories: their environment is played with known turns instead of sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from ..errors import InputError, refuse
from ..timings import Timings
from ..types import WARMUP_DOMAIN, FinishReason, SampleIdentity, SamplingParams, Segment, Trajectory
from ..user_functions import as_input_error, one_line
from .base import Problem
from .codec import ChatCodec
from .environment import Environment
from .episodes import Episode, EpisodeContext, EpisodeRunner, Failures, GroupRequest, Limits
from .tools import begins_with_chat


@dataclass(frozen=True)
class _ScriptedOutput:
    request_id: int
    identity: SampleIdentity
    completion: Trajectory


class _ScriptedSampler:
    """Replaces the generator: returns each group's turns one after another."""

    def __init__(self, turns: dict[int, list[Segment]]) -> None:
        self._turns = turns
        self._waiting: list[_ScriptedOutput] = []
        self._requests = 0

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        turns = self._turns[identity.group]
        if not turns:
            raise InputError(
                f"worked example {identity.group}: the environment goes on after its last turn; its worked_turns must "
                "be all that is to be sampled"
            )
        turn = turns.pop(0)
        reason: FinishReason = "stop" if len(turn.token_ids) <= sampling.max_completion_length else "length"
        completion = Trajectory([Segment(prompt_ids), turn], reason, identity, f"example {identity.group}")
        self._requests += 1
        self._waiting.append(_ScriptedOutput(self._requests, identity, completion))
        return self._requests

    def advance(self) -> Sequence[_ScriptedOutput]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def abort(self, request_id: int) -> list[Trajectory]:
        return []


def worked_trajectories(
    environment: type[Environment],
    problems: Sequence[Problem],
    codec: ChatCodec,
    encode_completion: Callable[[str, bool], list[int]],
    limits: Limits,
) -> list[Trajectory]:
    """The trajectory of each problem's worked example, with what its environment gives between turns.
    `encode_completion` also takes whether the turns are those of a chat. `InputError`: the turns are no texts, the
    environment ends before the last of them or continues after it, or `limits` cut the trajectory."""
    origins = [f" ({problem.origin})" if problem.origin else "" for problem in problems]
    requests = [GroupRequest(i, p, 0, f"worked example {i}{origins[i]}") for i, p in enumerate(problems)]
    turns: dict[int, list[Segment]] = {}
    for request in requests:
        texts = _worked_turns(environment, request)
        in_chat = begins_with_chat(environment, request.problem.prompt)
        turns[request.group] = [Segment(encode_completion(text, in_chat), sampled=True, text=text) for text in texts]
    longest = max(len(turn.token_ids) for turns_of_one in turns.values() for turn in turns_of_one)
    sampler, sampling = _ScriptedSampler(turns), SamplingParams(max_completion_length=longest)
    context = EpisodeContext(environment, codec, lambda *_: sampler, limits, Failures(allowed=0, setting=""), Timings())
    with closing(EpisodeRunner(context)) as runner:
        episodes = [e for (e,) in runner.run(requests, sampling, SampleIdentity(0, WARMUP_DOMAIN, 0, 0))]
    for request, episode in zip(requests, episodes, strict=True):
        _require_whole(episode, request.where, len(turns[request.group]), limits)
    return [episode.trajectory for episode in episodes if episode.trajectory is not None]


def _worked_turns(environment: type[Environment], request: GroupRequest) -> Sequence[str]:
    what = f"{request.where}: task.environment: {environment.__name__}.worked_turns"
    with as_input_error(f"{what} raised"):
        texts = environment.worked_turns(request.row, request.problem.worked_example or "")
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{what} returned {one_line(texts, repr)}; it must return a list of texts, one a turn")
    reason = "its worked_turns are none; name what is to be learned, or leave the row out"
    refuse(not any(texts), f"{request.where}: {reason}")
    return texts


def _require_whole(episode: Episode, where: str, left: int, limits: Limits) -> None:
    """Raise `InputError` for a worked example that a limit would cut, as what follows cannot be sampled, or of which
    turns are `left` when its environment ends it, as they would not be learned."""
    if episode.trajectory is not None and (episode.cut or episode.trajectory.cut_off):
        after = sum(len(segment.token_ids) for segment in episode.trajectory.segments[1:])
        raise InputError(
            f"{where} is cut in turn {episode.turns} of at most {limits.turns}, after {after} "
            f"of at most {limits.response_tokens} tokens, sampled and given; it needs a larger task.max_turns or "
            "task.max_response_length"
        )
    refuse(
        left > 0,
        f"{where}: the environment ends it after turn {episode.turns} of {episode.turns + left} that its worked_turns "
        "are; they must be what its step answers",
    )
