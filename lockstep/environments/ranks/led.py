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
from ..episodes import NewTokens, Sampler

_DOING = "a launch of the generator"
Told = list[tuple[Any, ...]]  # calls of a generator: each a method's name, and its arguments


class _Counted:
    """A generator that counts each request's unfinished samples; `launched` is called after each launch."""

    def __init__(self, sampler: Sampler, launched: Callable[[], None]) -> None:
        self._sampler, self._launched = sampler, launched
        self.left: dict[int, int] = {}

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        request_id = self._sampler.add_request(prompt_ids, sampling, identity)
        self.left[request_id] = sampling.n
        return request_id

    def advance(self) -> Sequence[NewTokens]:
        grown = self._sampler.advance()
        self._launched()
        for one in grown:
            self.left[one.request_id] -= one.completion is not None
        self.left = {request_id: samples for request_id, samples in self.left.items() if samples}
        return grown

    def abort(self, request_id: int) -> list[Trajectory]:
        self.left.pop(request_id, None)
        return self._sampler.abort(request_id)

    def finish(self) -> None:
        """Launch until no samples are left."""
        while self.left:
            self.advance()


class Leader(_Counted):
    """The first rank's generator, as a `Sampler`. Its calls are sent to the other ranks, which `follow`, by `tell`.
    `samples`: the number of samples that will be requested in all; None if unknown."""

    def __init__(
        self, sampler: Sampler, launched: Callable[[], None], tell: Callable[[Told], object], samples: int | None
    ) -> None:
        super().__init__(sampler, launched)
        self._tell, self._to_come = tell, samples
        self._untold: Told = []
        self._alone = False  # the others finish all requests by themselves

    def add_request(self, prompt_ids: list[int], sampling: SamplingParams, identity: SampleIdentity) -> int:
        assert not self._alone, "more samples than were to come"
        request_id = super().add_request(prompt_ids, sampling, identity)
        self._untold.append(("add_request", prompt_ids, sampling, identity))
        if self._to_come is not None:
            self._to_come -= sampling.n
        return request_id

    def advance(self) -> Sequence[NewTokens]:
        if not self._alone:
            self._alone = self._to_come == 0
            self._tell([*self._untold, ("finish",) if self._alone else ("advance",)])
            self._untold = []
        return super().advance()

    def abort(self, request_id: int) -> list[Trajectory]:
        """Abort a request. If the others finish by themselves, finish here as well first. After Ctrl-C or a signal do
        nothing, as all ranks got it."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return []
        if self._alone:
            self.finish()
        self._untold.append(("abort", request_id))
        return super().abort(request_id)

    def end(self) -> None:
        """Let the other ranks return from `follow`."""
        self._tell([*self._untold, ("end",)])


@contextmanager
def leading(
    world: World, sampler: Callable[[list, list], Sampler], samples: int | None
) -> Iterator[Callable[[list, list], Sampler]]:
    """A context that gives the function that makes the generator; if several ranks generate together, it makes a
    `Leader` of `samples`, which ends with the context."""
    if world.generator_group is None:
        yield sampler
        return
    with world.rolling_deadline(_DOING) as launched:
        leader = Leader(sampler([], []), launched, world.broadcast_in_group, samples)
        try:
            yield lambda *_: leader
        except KeyboardInterrupt:  # all ranks got it
            raise
        except BaseException:
            leader.end()
            raise
        leader.end()


def follow(world: World, sampler: Sampler) -> None:
    """Repeat the first rank's calls on this rank's generator, until it ends."""
    with world.rolling_deadline(_DOING) as launched:
        own = _Counted(sampler, launched)
        while True:
            calls: Told = world.broadcast_in_group()
            for name, *arguments in calls:
                if name == "end":
                    return
                getattr(own, name)(*arguments)
