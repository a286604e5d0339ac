"""The processes that torchrun started, while they work together."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from .. import machine
from ..cache import fingerprint
from ..config import RunConfig, yaml_file
from ..distributed import World, join
from ..models import sampled_hashes
from ..types import SampleIdentity, SamplingParams
from .build import resolve_device

T = TypeVar("T")
GENERATING = "a launch of the generator"  # names what is waited for
_CALLS = itertools.count()  # of `join_processes`: the first of a program finds nothing to collect, which takes 0.1 s


@contextlib.contextmanager
def join_processes(config: RunConfig, **arguments: Any) -> Iterator[World]:
    """Join the other processes, which are given the same configuration and other `arguments`; without torchrun, a
    process alone. They leave together at the end. Raises `InputError` if their number does not fit `config.parallel` or
    one has a different configuration, argument, model or code, or the program has set torch's default dtype or device,
    and `PeerLost` if one did not join or is lost."""
    machine.require_torch_defaults()
    if next(_CALLS):
        gc.collect()  # what earlier calls left, before memory is planned and `freeze_gc` keeps all there is
    machine.restrict_to_local_gpu()
    with machine.report_if_slow("joining the other processes"):
        world = join(config.parallel, resolve_device(config.device).type)
    try:
        with world.detect_lost_peers():
            world.require_same("the processes of this run", lambda: _identity(config) | arguments)
            yield world
    except GeneratorExit:  # the context was not closed, and this process is ending
        raise
    except BaseException:
        world.close(failed=True)
        raise
    world.close()


def _identity(config: RunConfig) -> dict[str, Any]:
    """What must be the same in all processes: the code, the files of models, the configuration."""
    return _identify_code(config) | _identify_models(config) | yaml_file.flatten(config)


def _identify_models(config: RunConfig) -> dict[str, str]:
    """What identifies the files of the models that are read."""
    found: dict[str, str] = {}
    for field, model in {"model": config.model, "loss.teacher": config.loss.teacher}.items():
        if model:
            found |= {f"{field} {model}: {name}": identity for name, identity in sampled_hashes(model).items()}
    return found


def _identify_code(config: RunConfig) -> dict[str, str]:
    """What identifies the code that computes: the package's source files and the libraries. An installation on another
    host may differ, and its gradients would silently be added to those of this one."""
    found = {name: fingerprint.version(name) for name in ("transformers", "tokenizers", "datasets")}
    found |= fingerprint.origin(resolve_device(config.device).type)
    return {"the hash of lockstep's source files": found.pop("sources"), **found}


class Requests(NamedTuple):
    """Prompts, with their sampling parameters and the identities that key their random numbers."""

    prompt_ids: list[list[int]]
    sampling: list[SamplingParams]
    identities: list[SampleIdentity]

    def share(self, world: World) -> Requests:
        """Those that this rank's group completes."""
        own = world.generator_mesh.fsdp.local_items
        return Requests(list(own(self.prompt_ids)), list(own(self.sampling)), list(own(self.identities)))


def gather_completions(world: World, completed: Callable[[], Sequence[T]]) -> list[T]:
    """What all ranks `completed`, each its share of the requests (`Requests.share`), in the order of the requests."""

    def completed_by_leader() -> Sequence[T]:
        results = completed()
        return results if world.leads_group else []

    groups = world.gather_results(completed_by_leader, what="completions")[:: world.generator_tp]
    return [groups[i % len(groups)][i // len(groups)] for i in range(sum(map(len, groups)))]
