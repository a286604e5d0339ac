"""Checks on two ranks: each compares what they do together with one process that runs the same micro-batches, in every
bit. Under torchrun the first rank prints what was found, a JSON object; `ranks.py cuda` does so on two GPUs.
"""

from __future__ import annotations

import json
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import rank_agreement
import rank_graphs
import rank_updates
from fake_recorder import FakeRecorder
from processes import PATIENCE
from rank_setup import CHECKS, DEVICE
from small import two_layers

from lockstep import machine
from lockstep.config import CompileConfig, ParallelConfig
from lockstep.distributed import join
from lockstep.graph import Runtime
from lockstep.models.init import ARCHITECTURES

MODULES = rank_updates, rank_graphs, rank_agreement  # whose checks are in `CHECKS`


class Left(FakeRecorder):
    """Of a runtime that nobody closes."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Cycle:
    """Of graphs whose runtime is gone."""

    def __init__(self) -> None:
        self.itself = self


def checked() -> dict[str, Any]:
    """What each check found, on each rank."""
    machine.restrict_to_local_gpu()
    world = join(ParallelConfig(timeout=PATIENCE), DEVICE.type)
    torch.set_num_threads(1)
    ARCHITECTURES.update(two_layers())
    found: dict[str, Any] = {}
    for name, function in CHECKS.items():
        try:
            found[name] = function(world)
        except Exception:
            print(traceback.format_exc(), file=sys.stderr)
            raise
    full = CompileConfig("step", cudagraph_mode="full")
    left = Runtime(full, DEVICE, recorder=Left(), mesh={"fsdp": world.size}, peers=world)
    gone, first = weakref.ref(Cycle()), world.is_first
    world.close()
    assert gone() is None
    assert left.recorder is not None and left.recorder.closed  # type: ignore[attr-defined]
    return found if first else {}


if __name__ == "__main__":
    if of_the_first := checked():
        print(json.dumps(of_the_first))
