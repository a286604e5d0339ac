"""What runs captured graphs: as they are, or another backend, which adds passes of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...config import CompileConfig
from ...timings import Timings
from ..ir.captured import Captured
from . import Pass


class Backend:
    """Runs the operators of graphs as they were captured.

    Attributes:
        passes: run after all others that a trace goes through.
        shared: it rewrites forward passes, in both roles alike (`share`).
        compile_module: compiles a module that torch traced and its example inputs, where layers are compiled.
    """

    shared = False
    compile_module: Callable[..., Any] | None = None

    def __init__(self, config: CompileConfig, device: torch.device, timings: Timings) -> None:
        self.passes: list[Pass] = []

    @staticmethod
    def lacks(device: torch.device) -> str | None:
        """What it needs to run on a device and this machine does not have; None if it has all."""
        return None

    def settings(self) -> dict[str, Any]:
        """What of this process graphs depend on besides, by name."""
        return {}

    def check(self, captured: Captured) -> None:
        """Refuse a graph that other graphs do not go with."""

    def share(self, traces: Sequence[Captured]) -> bool:
        """Decide what is rewritten in both roles, whose traces these are; whether anything is."""
        return False
