"""Going through a graph's launches without launching anything, so that its kernels can be compiled side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import compat
from .ir import Captured

NAMESPACE = "lockstep"  # of the operators that launch kernels of ours


def rehearse(captured: Captured, arguments: Sequence[Tensor], namespace: str = NAMESPACE) -> dict[str, Tensor]:
    """Call the implementation of each of the graph's operators, once for all calls that are alike, on tensors without
    memory; no argument is read or written.

    The caller sees to it that implementations launch nothing (`ops.kernels.precompile`).

    Returns:
        zeros in the place of the graph's outputs.
    """
    with compat.without_memory(arguments, namespace) as stand_ins:
        results = _Rehearsal(captured.module).run(*stand_ins)
    return {
        name: torch.zeros(result.shape, dtype=result.dtype, device=result.device)
        for name, result in zip(captured.outputs, results, strict=True)
    }


class _Rehearsal(fx.Interpreter):
    """Calls are alike when operator and arguments are the same; their results are then the same tensors. So the second
    layer of a model, whose weights are alike, costs nothing."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._known: dict[tuple, Any] = {}

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        key = target, repr(_identified(args)), repr(_identified(kwargs))
        if key not in self._known:
            self._known[key] = super().call_function(target, args, kwargs)
        return self._known[key]


def _identified(value: Any) -> Any:
    """Arguments with each tensor's identity in its place."""
    if isinstance(value, Tensor):
        return "tensor", id(value)
    if isinstance(value, dict):
        return {name: _identified(item) for name, item in value.items()}
    return [_identified(item) for item in value] if isinstance(value, (list, tuple)) else value
