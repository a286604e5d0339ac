"""The processes that torchrun started, for as long as they do something together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from .. import machine
from ..cache import fingerprint
from ..config import RunConfig, yaml_file
from ..distributed import World, join
from ..models import glances
from ..types import SampleIdentity, SamplingParams
from .build import resolve_device

T = TypeVar("T")
GENERATING = "a launch of the generator"  # what is done, where others are waited for


@contextlib.contextmanager
def together(config: RunConfig) -> Iterator[World]:
    """This process among the others, which are given the same configuration; one by itself without them. In the end
    they leave together. `InputError`: they do not fit `config.parallel`, or one has another configuration or other
    models; `PeerLost`: one did not come, or is gone."""
    machine.own_gpu()
    with machine.told("joining the other processes"):
        world = join(config.parallel, resolve_device(config.device).type)
    try:
        with world.peers():
            world.same("the processes of this run", lambda: _code(config) | _models(config) | yaml_file.flat(config))
            yield world
    except GeneratorExit:  # nobody closed it, and this process ends
        raise
    except BaseException:
        world.close(failed=True)
        raise
    world.close()


def _models(config: RunConfig) -> dict[str, str]:
    """What tells the files of the models that are read from others."""
    given = {"model": config.model, "loss.teacher": config.loss.teacher}
    return {f"{field} {m}: {name}": of for field, m in given.items() if m for name, of in glances(m).items()}


def _code(config: RunConfig) -> dict[str, str]:
    """What computes: the package's source files and the libraries, which an installation on another host may not have
    alike; steps of other code would be added up as if they were those of this one."""
    found = {name: fingerprint.version(name) for name in ("transformers", "tokenizers", "datasets")}
    found |= fingerprint.origin(resolve_device(config.device).type)
    return {"the hash of lockstep's source files": found.pop("sources"), **found}


class Requests(NamedTuple):
    """Prompts, with how each is sampled and what keys its random numbers."""

    prompt_ids: list[list[int]]
    sampling: list[SamplingParams]
    identities: list[SampleIdentity]

    def share(self, world: World) -> Requests:
        own = world.generator.fsdp.own
        return Requests(list(own(self.prompt_ids)), list(own(self.sampling)), list(own(self.identities)))


def of_all(world: World, completed: Callable[[], Sequence[T]]) -> list[T]:
    """What all ranks `completed`, each of its share of some requests (`Requests.share`), by request."""

    def told() -> Sequence[T]:
        found = completed()
        return found if world.leads else []

    groups = world.share(told)[:: world.generator_tp]
    return [groups[i % len(groups)][i // len(groups)] for i in range(sum(map(len, groups)))]
