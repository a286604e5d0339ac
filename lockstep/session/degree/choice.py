"""The choice of `parallel.generator_tp` from memory, load and measured links; all ranks make the same one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config import RunConfig
from ...distributed import World, join_generator_groups
from ...distributed.mesh import Axis, Mesh
from ...generator.cache_capacity import bytes_per_token
from ...models import ModelConfig, num_parameters
from ...models.checks import is_divisible
from ..build import ReadTask, planned_workload, resolve_device, resolve_dtype
from ..memory import Workload, available_memory, fit_generator_groups, model_config, plan
from . import links
from .decode_time import CollectiveTimes, DecodeTime, Load

# The part of a process's memory that weights and a given cache capacity may take, where there is no plan.
WEIGHTS_FRACTION = 0.75
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

    def describe(self) -> str:
        """The choice and its reasons, in lines."""
        chosen = f"{self.ranks} (memory copies at {self.bandwidth / 1e9:.3g} GB/s)"
        return "\n  ".join([f"chose {chosen}", *(found.describe() for found in self.considered)])


def choose_generator_tp(
    config: RunConfig, world: World, read: ReadTask
) -> tuple[RunConfig, World, DegreeChoice | None]:
    """Choose how many processes generate together, and group them. Every rank calls it, and the first prints why.

    If `parallel.generator_tp` is 0, the number that takes the least time for a step's samples; if it is 1 and the run
    does not fit, the fewest with which it does. Returns the run's configuration, its processes, and the choice (None if
    nothing was measured).

    Args:
        config: resolved.
        read: as in `TrainingSession`; called only if the prompts matter.

    Raises:
        InputError: the run is invalid with any choice.
    """
    if world.size == 1 or config.parallel.generator_tp > 1:
        return config, world, None
    device = resolve_device(config.device)
    memory = min(world.gather(available_memory(device, world)))
    w = world.run_on_all(lambda: planned_workload(config, world.size, device, read))
    if config.parallel.generator_tp == 1:
        return *_smallest_fitting_groups(w, world, memory), None
    # ZeRO stage 2 needs whole weights.
    degrees = [1] if config.parallel.zero_stage == 2 else possible_degrees(w.model, world.size)
    workloads = [w.with_settings("parallel", generator_tp=degree) for degree in degrees]
    loads = [Load.of(workload, plan(workload, memory)) for workload in workloads]
    world.require_same("the processes of this run", lambda: {"the loads of groups of processes": loads})
    bandwidth = links.measure_bandwidth(world, device)
    considered = []
    for workload, load in zip(workloads, loads, strict=True):
        collectives = CollectiveTimes()
        if load.ranks > 1 and load.fits:  # else there is nobody to wait for, or no room
            world = join_generator_groups(world, load.ranks)
            rows = torch.empty(load.rows, 0, dtype=w.dtype, device=device)
            collectives = links.measure_collectives(world, w.config.compile, w.model, rows, device)
        considered.append(DecodeTime.of(workload, load, bandwidth, collectives))
    choice = DegreeChoice(select_degree(considered), bandwidth, considered)
    return *_regroup(config, world, choice.ranks, choice.describe()), choice


def _regroup(config: RunConfig, world: World, ranks: int, why: str) -> tuple[RunConfig, World]:
    """The configuration and processes in groups of `ranks`; the first process prints `why` unless that is empty."""
    if world.is_first and why:
        print(f"parallel.generator_tp: {why}", file=sys.stderr, flush=True)
    return replace(config, parallel=replace(config.parallel, generator_tp=ranks)), join_generator_groups(world, ranks)


def _smallest_fitting_groups(w: Workload, world: World, memory: int) -> tuple[RunConfig, World]:
    """The configuration and processes in the smallest groups that fit by plan; unchanged if none does."""
    larger = fit_generator_groups(w, memory)
    if larger is w:
        return w.config, world
    degree, needed = larger.config.parallel.generator_tp, plan(w, memory).total / 2**30
    why = f"{degree} instead of 1, with which the run needs {needed:.1f} GiB a GPU and may take {memory / 2**30:.1f}"
    return _regroup(w.config, world, degree, why)


def choose_generator_tp_by_memory(config: RunConfig, world: World) -> tuple[RunConfig, World]:
    """`choose_generator_tp` for commands other than training, with no known number of samples: the fewest ranks that
    have room for their parts of the weights, since the most groups complete the most requests at a time.

    Raises:
        InputError: the model cannot be read.
    """
    if config.parallel.generator_tp:
        return config, world

    def measure() -> tuple[dict[int, int], int]:
        return _bytes_by_degree(config, world.size), available_memory(resolve_device(config.device), world)

    of_ranks = world.gather_results(measure)
    needed, memory = of_ranks[0][0], min(available for _, available in of_ranks)
    ranks = next((ranks for ranks, size in needed.items() if size <= WEIGHTS_FRACTION * memory), max(needed))
    held, available = needed[ranks] / 2**30, memory / 2**30
    why = f"chose {ranks}, whose weights and cache take {held:.3g} GiB of a process's {available:.3g}"
    return _regroup(config, world, ranks, why if world.size > 1 else "")


def _bytes_by_degree(config: RunConfig, processes: int) -> dict[int, int]:
    """By the number that generate together, the bytes of a process's weights and of a given cache capacity."""
    model, dtype = model_config(config), resolve_dtype(config.dtype, resolve_device(config.device))
    needed = {}
    for ranks in possible_degrees(model, processes):
        cache = config.generator.kv_cache_tokens * bytes_per_token(model.per_rank(ranks), dtype)
        needed[ranks] = num_parameters(model, Mesh(tp=Axis("tp", ranks))) * dtype.itemsize + cache
    return needed


def possible_degrees(model: ModelConfig, processes: int) -> list[int]:
    """The group sizes that divide `processes` and the model evenly."""
    return [n for n in range(1, min(processes, 64) + 1) if processes % n == 0 and is_divisible(model, n)]


def select_degree(considered: Sequence[DecodeTime]) -> int:
    """The fewest ranks that fit, unless more take clearly less time; if none fits, the fewest, to be refused later."""
    fitting = [time for time in considered if time.load.fits]
    selected = fitting[0] if fitting else considered[0]
    for time in fitting:
        if time.of_all < GAIN * selected.of_all:
            selected = time
    return selected.load.ranks
