"""Goes through a graph's calls without launching anything, so that its kernels can be compiled in parallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...ops.operator import NAMESPACE
from ..ir.captured import Captured
from ..torch_private import trace as torch_trace


def dry_run(captured: Captured, arguments: Sequence[Tensor], namespace: str = NAMESPACE) -> dict[str, Tensor]:
    """Call the implementations of the graph's operators on tensors without memory, once for all equivalent calls. No
    argument is read or written; the caller makes sure that nothing is launched (`ops.precompile`). Returns zeros as
    the graph's outputs."""
    memory = torch_trace.StandIns(namespace)
    stand_ins = [memory.stand_in(tensor) for tensor in arguments]
    with memory.computing():
        results = _DryRun(captured.module, memory.alignment).run(*stand_ins)
    return {
        name: torch.zeros(result.shape, dtype=result.dtype, device=result.device)
        for name, result in zip(captured.outputs, results, strict=True)
    }


class _DryRun(fx.Interpreter):
    """Makes one of all equivalent calls (same operator, equivalent arguments) and reuses its results for the others, so
    a model's second layer costs nothing."""

    def __init__(self, module: fx.GraphModule, alignment: Callable[[Tensor], int]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._alignment = alignment
        self._made: dict[str, Any] = {}
        self._likeness: dict[int, str] = {}  # by id of a tensor; all tensors are kept alive

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = f"{id(target)} {self._described(args)} {self._described(kwargs)}"
        if key not in self._made:
            self._made[key] = super().call_function(target, args, kwargs)
        return self._made[key]

    def _described(self, value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in self._likeness:
                about = value.shape, value.stride(), value.dtype, value.device, self._alignment(value)
                self._likeness[id(value)] = repr(about)
            return self._likeness[id(value)]
        if isinstance(value, dict):
            return repr({name: self._described(item) for name, item in value.items()})
        return repr([self._described(item) for item in value]) if isinstance(value, (list, tuple)) else repr(value)
