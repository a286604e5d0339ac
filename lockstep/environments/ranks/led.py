"""One generator on several ranks: the first of them plays with the environments, and the others do what it does.

Their generators are in one state and stay so, as each is given the same requests between the same launches. Where all
requests are known, as those of trajectories of one turn are, nothing more is told until they have finished.
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
Told = list[tuple[Any, ...]]  # a generator's calls: a method's name, and its arguments


class _Counted:
    """A generator, and of each request how many samples have not finished; `launched` is called after each launch."""

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
        """Go on until nothing is left."""
        while self.left:
            self.advance()


class Leader(_Counted):
    """The first rank's generator, as a `Sampler`. What is called is told the others, who `follow`: `tell` gives it to
    them. `samples` are as many as will be asked for in all; None where that is not known."""

    def __init__(
        self, sampler: Sampler, launched: Callable[[], None], tell: Callable[[Told], object], samples: int | None
    ) -> None:
        super().__init__(sampler, launched)
        self._tell, self._to_come = tell, samples
        self._untold: Told = []
        self._alone = False  # the others finish what there is by themselves

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
        """What the others finish by themselves is finished here as well; not behind Ctrl-C or a signal, which they were
        sent, too."""
        if isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return []
        if self._alone:
            self.finish()
        self._untold.append(("abort", request_id))
        return super().abort(request_id)

    def end(self) -> None:
        """Let the others go."""
        self._tell([*self._untold, ("end",)])


@contextmanager
def leading(
    world: World, sampler: Callable[[list, list], Sampler], samples: int | None
) -> Iterator[Callable[[list, list], Sampler]]:
    """What makes the generator; where several ranks generate together, a `Leader` of `samples` meanwhile."""
    if world.together is None:
        yield sampler
        return
    with world.watched(_DOING) as launched:
        leader = Leader(sampler([], []), launched, world.told, samples)
        try:
            yield lambda *_: leader
        except KeyboardInterrupt:  # the others were sent it, too
            raise
        except BaseException:
            leader.end()
            raise
        leader.end()


def follow(world: World, sampler: Sampler) -> None:
    """Do what the first rank does with its generator, until it ends."""
    with world.watched(_DOING) as launched:
        own = _Counted(sampler, launched)
        while True:
            calls: Told = world.told()
            for name, *arguments in calls:
                if name == "end":
                    return
                getattr(own, name)(*arguments)
