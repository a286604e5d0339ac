"""Backends run captured graphs, as they are or after passes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...config import CompileConfig
from ...timings import Timings
from ..ir.captured import Captured
from . import Pass


class Backend:
    """The default backend, which runs the operators of a graph as captured; the base class of others.

    Attributes:
        passes: run after all other passes of a trace.
        shared: it rewrites forward passes, identically in both roles (`share`).
        compile_module: compiles (module, example inputs) from Dynamo where single layers are compiled.
    """

    shared = False
    compile_module: Callable[..., Any] | None = None

    def __init__(self, config: CompileConfig, device: torch.device, timings: Timings) -> None:
        self.passes: list[Pass] = []

    @staticmethod
    def lacks(device: torch.device) -> str | None:
        """What the backend needs for a device and this machine lacks; None if nothing."""
        return None

    def settings(self) -> dict[str, Any]:
        """Settings of this process that its graphs depend on, by name."""
        return {}

    def check(self, captured: Captured) -> None:
        """Refuse a graph that is inconsistent with the others."""

    def share(self, traces: Sequence[Captured]) -> bool:
        """Decide what to rewrite in both roles, given all their traces. Returns whether there is anything."""
        return False
