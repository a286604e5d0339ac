"""Measures memory bandwidth, and the links between processes by the collectives that the generator will use."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...config import CompileConfig
from ...distributed import World
from ...distributed.spread import Spread
from ...graph import Inputs, Program, Runtime, Store
from ...models import ModelConfig
from .decode_time import CollectiveTimes

_COPY_BYTES = {"cuda": 256 << 20, "cpu": 16 << 20}  # bytes, more than a hardware cache holds
_TRIES, _LAUNCHES = 3, 10


def measure_bandwidth(world: World, device: torch.device) -> float:
    """The bytes per second that a copy reads and writes in memory, on the slowest rank."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / _shortest_time(world, device, partial(target.copy_, source))
    del source, target
    torch.cuda.empty_cache()  # a run's plan counts free memory
    return min(world.gather(rate))


def measure_collectives(
    world: World, compile: CompileConfig, model: ModelConfig, x: Tensor, device: torch.device
) -> CollectiveTimes:
    """Seconds of a layer's collectives (four all-gathers of columns) and of the head's, on the slowest rank; run as the
    generator will, eagerly or in graphs.

    Args:
        compile: resolved.
        x: [R, 0], a row for each sequence, in the compute dtype.
    """
    rows, ranks = x.shape[0], world.generator_tp
    widths = {
        "attention": model.num_heads * (model.head_dim if model.mla is None else model.mla.v_dim),
        "stream": model.hidden_size,
        "feed_forward": model.intermediate_size if model.moe is None else model.hidden_size,
        "residual": model.hidden_size,
    }
    columns = {name: x.new_zeros(rows, width // ranks) for name, width in widths.items()}
    logits = {"logits": torch.zeros(rows, model.vocab_size // ranks, device=device)}
    collectives = _Collectives(Spread(world.generator_mesh.tp, device))
    runtime = Runtime(compile, device, store=Store(), mesh=world.sizes, peers=world)
    constants = {"pushes": world.generator_mesh.tp.pushes}
    try:
        layer = runtime.program("exchange_layer", collectives.layer, Inputs(buffer=columns), constants=constants)
        head = runtime.program("exchange_head", collectives.head, Inputs(buffer=logits), constants=constants)
        with world.deadline("measuring the links", timeouts=2):
            return CollectiveTimes(
                *(max(world.gather(_seconds_per_launch(world, device, program))) for program in (layer, head))
            )
    finally:
        runtime.close()


class _Collectives:
    """The collectives of a decode step."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread

    def layer(self, inputs: Inputs) -> dict[str, Tensor]:
        """All-gathers the columns of attention's heads and of three products."""
        return {name: self._spread.gather_columns(part) for name, part in inputs.buffer.items()}

    def head(self, inputs: Inputs) -> dict[str, Tensor]:
        """Exchanges logits, then all-gathers three words per row, the size of a sampled result."""
        logits_RW = inputs.buffer["logits"]
        own_RV = self._spread.columns_to_rows(logits_RW)
        return {"drawn": self._spread.gather_rows(own_RV[:, :3].contiguous(), logits_RW.shape[0])}


def _seconds_per_launch(world: World, device: torch.device, program: Program) -> float:
    program()  # makes the graph
    return _shortest_time(world, device, lambda: program(times=_LAUNCHES)) / _LAUNCHES


def _shortest_time(world: World, device: torch.device, launch: Callable[[], object]) -> float:
    """The shortest of several launches to their end on the device, in seconds; all ranks start each together."""
    seconds, synchronize = [], torch.get_device_module(device).synchronize
    for _ in range(_TRIES):
        world.gather(None)
        synchronize()
        start = time.perf_counter()
        launch()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
