"""Calls modules through `torch.compile`. Uses private interfaces of torch 2.11 to 2.13."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from ...ops.operator import disable_duck_shapes


def compiled_call(
    compile_module: Callable[..., Any] | None, limit: int, compiled: Callable[[], None], fault: type[Exception]
) -> Callable[..., Any]:
    """Returns `call(module, *args)`, which torch compiles for each kind of module and arguments with dynamic shapes and
    integers; see `layer_compiler`. A call raises `fault` if it cannot be captured as one graph, or needs more than
    `limit` variants."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported, UserError

    dynamo: Any = torch._dynamo.config

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled()
        if compile_module is not None:
            return compile_module(module, inputs)
        return aot_eager(module, inputs) if torch.is_grad_enabled() else module.forward

    def call(module: nn.Module, *args: Any) -> Any:
        return module(*args)

    own = types.FunctionType(call.__code__.replace(), call.__globals__)  # Dynamo counts variants per code object
    run = torch.compile(own, fullgraph=True, dynamic=True, backend=backend)

    def guarded(module: nn.Module, *args: Any) -> Any:
        with dynamo.patch(specialize_float=True, recompile_limit=limit), disable_duck_shapes():  # floats stay constants
            try:
                return run(module, *args)
            except (FailOnRecompileLimitHit, Unsupported, UserError) as error:
                said, instead = str(error).splitlines()[0], "use compile.capture none"
                reason = f"{type(module).__name__} cannot be compiled whole: {said}; {instead}"
                if isinstance(error, FailOnRecompileLimitHit):
                    reason = f"more than {limit} variants of a layer are needed; {instead} ({said})"
                raise fault(f"compile.capture layer: {reason}") from error

    return guarded
