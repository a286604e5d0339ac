"""The choice of `parallel.generator_tp` from memory, load and measured links; all ranks make the same one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config import RunConfig
from ...distributed import World, join_generator_groups
from ...distributed.mesh import Axis, Mesh
from ...generator.cache_capacity import bytes_per_token
from ...models import ModelConfig, num_parameters
from ...models.checks import is_divisible
from ..build import planned_workload, resolve_device, resolve_dtype
from ..memory import Workload, as_run, memory_at_hand, model_config, plan
from . import links
from .decode_time import DecodeTime, Exchanged, Load

ROOM = 0.75  # of a process's memory that weights and a given cache capacity may take, where there is no plan
GAIN = 0.95  # more ranks must take less than this fraction of the time of fewer, as measurements scatter


@dataclass(frozen=True)
class DegreeChoice:
    """How many ranks generate together, and what that was chosen from.

    Attributes:
        bandwidth: of memory, bytes per second. considered: in ascending order of ranks.
    """

    ranks: int
    bandwidth: float
    considered: Sequence[DecodeTime]

    def to_dict(self) -> dict[str, Any]:
        considered = [found.to_dict() for found in self.considered]
        return {"generator_tp": self.ranks, "bandwidth_gb_s": round(self.bandwidth / 1e9, 2), "considered": considered}

    def text(self) -> str:
        """The choice and its reasons, in lines."""
        chosen = f"{self.ranks} (memory copies at {self.bandwidth / 1e9:.3g} GB/s)"
        return "\n  ".join([f"chose {chosen}", *(found.line() for found in self.considered)])


def choose(config: RunConfig, world: World) -> tuple[RunConfig, World, DegreeChoice | None]:
    """Choose how many processes generate together, and group them. Every rank calls it, and the first prints why.

    If `parallel.generator_tp` is 0, the number that takes the least time for a step's samples; if it is 1 and the run
    does not fit, the fewest with which it does. Returns the run's configuration, its processes, and the choice (None if
    nothing was measured).

    Args:
        config: resolved.

    Raises:
        InputError: the run is invalid with any choice.
    """
    if world.size == 1 or config.parallel.generator_tp > 1:
        return config, world, None
    device = resolve_device(config.device)
    memory = min(world.gather(memory_at_hand(device, world)))
    w = world.run_on_all(lambda: planned_workload(config, world.size, device))
    if config.parallel.generator_tp == 1:
        return *_that_fit(w, world, memory), None
    shared = range(1, 2 if config.parallel.zero_stage == 2 else 65)  # ZeRO stage 2 needs whole weights
    of_each = [w.having("parallel", generator_tp=ranks) for ranks in degrees(w.model, world.size) if ranks in shared]
    loads = [Load.of(each, plan(each, memory)) for each in of_each]
    world.require_same("the processes of this run", lambda: {"the loads of groups of processes": loads})
    speed = links.bandwidth(world, device)
    found = []
    for each, load in zip(of_each, loads, strict=True):
        waited = Exchanged()
        if load.ranks > 1 and load.fits:  # else there is nobody to wait for, or no room
            world = join_generator_groups(world, load.ranks)
            rows = torch.empty(load.rows, 0, dtype=w.dtype, device=device)
            waited = links.exchanged(world, w.config.compile, w.model, rows, device)
        found.append(DecodeTime.of(each, load, speed, waited))
    choice = DegreeChoice(best(found), speed, found)
    return *_grouped(config, world, choice.ranks, choice.text()), choice


def _grouped(config: RunConfig, world: World, ranks: int, why: str) -> tuple[RunConfig, World]:
    """The configuration and processes in groups of `ranks`; the first process prints `why` unless that is empty."""
    if world.is_first and why:
        print(f"parallel.generator_tp: {why}", file=sys.stderr, flush=True)
    return replace(config, parallel=replace(config.parallel, generator_tp=ranks)), join_generator_groups(world, ranks)


def _that_fit(w: Workload, world: World, memory: int) -> tuple[RunConfig, World]:
    """The configuration and processes in the smallest groups that fit by plan; unchanged if none does."""
    larger = as_run(w, memory)
    if larger is w:
        return w.config, world
    together, needed = larger.config.parallel.generator_tp, plan(w, memory).total / 2**30
    why = f"{together} instead of 1, with which the run needs {needed:.1f} GiB a GPU and may take {memory / 2**30:.1f}"
    return _grouped(w.config, world, together, why)


def choose_by_memory(config: RunConfig, world: World) -> tuple[RunConfig, World]:
    """`choose` for commands other than training, with no known number of samples: the fewest ranks that have room for
    their parts of the weights, since the most groups complete the most requests at a time.

    Raises:
        InputError: the model cannot be read.
    """
    if config.parallel.generator_tp:
        return config, world
    found = world.gather_results(
        lambda: (_loaded(config, world.size), memory_at_hand(resolve_device(config.device), world))
    )
    (needed, _), memory = found[0], min(of_rank for _, of_rank in found)
    ranks = next((ranks for ranks, size in needed.items() if size <= ROOM * memory), max(needed))
    held, room = needed[ranks] / 2**30, memory / 2**30
    why = f"chose {ranks}, whose weights and cache take {held:.3g} GiB of a process's {room:.3g}"
    return _grouped(config, world, ranks, why if world.size > 1 else "")


def _loaded(config: RunConfig, processes: int) -> dict[int, int]:
    """By the number that generate together, the bytes of a process's weights and of a given cache capacity."""
    model, dtype = model_config(config), resolve_dtype(config.dtype, resolve_device(config.device))
    needed = {}
    for ranks in degrees(model, processes):
        cache = config.generator.kv_cache_tokens * bytes_per_token(model.per_rank(ranks), dtype)
        needed[ranks] = num_parameters(model, Mesh(tp=Axis("tp", ranks))) * dtype.itemsize + cache
    return needed


def degrees(model: ModelConfig, processes: int) -> Iterator[int]:
    """The group sizes that divide `processes` and the model evenly."""
    return (n for n in range(1, min(processes, 64) + 1) if processes % n == 0 and is_divisible(model, n))


def best(found: Sequence[DecodeTime]) -> int:
    """The fewest ranks that fit, unless more take clearly less time; if none fits, the fewest, to be refused later."""
    fitting = [one for one in found if one.load.fits]
    chosen = fitting[0] if fitting else found[0]
    for one in fitting:
        if one.of_all < GAIN * chosen.of_all:
            chosen = one
    return chosen.load.ranks
