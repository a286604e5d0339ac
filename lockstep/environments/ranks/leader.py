"""One tensor-parallel generator: its first rank plays the environments, and the others repeat its generator's calls.

The ranks' generators stay in the same state, as each gets the same requests between the same launches. Once no more
requests can come, as with trajectories of a single turn, nothing more is broadcast until all have finished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...distributed import World
from ...types import SampleIdentity, SamplingParams, Trajectory
from ..episodes import MakeSampler, SampleOutput, Sampler

_LAUNCH = "a launch of the generator"
MethodCalls = list[tuple[Any, ...]]  # of a generator: each a method's name, and its arguments


class _CountingSampler:
    """A generator that counts each request's unfinished samples; `on_launch` is called after each launch."""

    def __init__(self, sampler: Sampler, on_launch: Callable[[], None]) -> None:
        self._sampler, self._on_launch = sampler, on_launch
        self._unfinished: dict[int, int] = {}  # samples, by request

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        request_id = self._sampler.add_request(prompt_ids, sampling, identity)
        self._unfinished[request_id] = sampling.n
        return request_id

    def advance(self) -> Sequence[SampleOutput]:
        outputs = self._sampler.advance()
        self._on_launch()
        for output in outputs:
            if output.completion is not None:
                self._unfinished[output.request_id] -= 1
        self._unfinished = {request_id: samples for request_id, samples in self._unfinished.items() if samples}
        return outputs

    def abort(self, request_id: int) -> list[Trajectory]:
        self._unfinished.pop(request_id, None)
        return self._sampler.abort(request_id)

    def finish(self) -> None:
        """Launch until all samples are finished."""
        while self._unfinished:
            self.advance()


class Leader(_CountingSampler):
    """The first rank's generator, as a `Sampler`, whose calls are broadcast to the other ranks, which `repeat_calls`.
    `samples`: the number of samples that will be requested in all; None if unknown."""

    def __init__(
        self,
        sampler: Sampler,
        on_launch: Callable[[], None],
        broadcast: Callable[[MethodCalls], object],
        samples: int | None,
    ) -> None:
        super().__init__(sampler, on_launch)
        self._broadcast, self._samples_to_request = broadcast, samples
        self._unsent: MethodCalls = []
        self._others_finish = False  # all requests, by themselves

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        assert not self._others_finish, "more samples than were to come"
        request_id = super().add_request(prompt_ids, sampling, identity)
        self._unsent.append(("add_request", prompt_ids, sampling, identity))
        if self._samples_to_request is not None:
            self._samples_to_request -= sampling.n
        return request_id

    def advance(self) -> Sequence[SampleOutput]:
        if not self._others_finish:
            self._others_finish = self._samples_to_request == 0
            self._broadcast([*self._unsent, ("finish",) if self._others_finish else ("advance",)])
            self._unsent = []
        return super().advance()

    def abort(self, request_id: int) -> list[Trajectory]:
        """Abort a request. If the others finish by themselves, finish here as well first. After Ctrl-C or a signal do
        nothing, as all ranks got it."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return []
        if self._others_finish:
            self.finish()
        self._unsent.append(("abort", request_id))
        return super().abort(request_id)

    def end(self) -> None:
        """Let the other ranks return from `repeat_calls`."""
        self._broadcast([*self._unsent, ("end",)])


@contextmanager
def broadcast_calls(world: World, make_sampler: MakeSampler, samples: int | None) -> Iterator[MakeSampler]:
    """A context that gives the function that makes the generator; if several ranks generate together, it makes a
    `Leader` of `samples`, which ends with the context."""
    if world.generator_group is None:
        yield make_sampler
        return
    with world.rolling_deadline(_LAUNCH) as on_launch:
        leader = Leader(make_sampler([], []), on_launch, world.broadcast_in_group, samples)
        try:
            yield lambda *_: leader
        except KeyboardInterrupt:  # all ranks got it
            raise
        except BaseException:
            leader.end()
            raise
        leader.end()


def repeat_calls(world: World, sampler: Sampler) -> None:
    """Repeat the first rank's calls on this rank's generator, until it ends."""
    with world.rolling_deadline(_LAUNCH) as on_launch:
        own = _CountingSampler(sampler, on_launch)
        while True:
            calls: MethodCalls = world.broadcast_in_group()
            for name, *arguments in calls:
                if name == "end":
                    return
                getattr(own, name)(*arguments)
