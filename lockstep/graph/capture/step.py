"""Traces a function of named tensors into a flat graph.

Between launches only tensors vary, and of their shapes only the sizes declared open. All other Python values become
constants, so the function takes them as declared statics. In-place writes to inputs are not functionalized: a launch
changes the very gradients, weights and KV cache that it is bound to.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..ir.captured import BACKWARD, BACKWARD_TAG, MODULE_TAG, Captured, Dynamic, GraphError, Inputs, Role, Static
from ..torch_private import trace as torch_trace

GraphBody = Callable[..., Mapping[str, Tensor]]  # (inputs: Inputs, **statics) -> named outputs


@dataclass(frozen=True)
class Differentiated:
    """A `GraphBody` that adds the gradients of a loss to the inputs of role `grad`.

    Attributes:
        forward: maps (inputs, **statics) to a 0-dim loss and named outputs without gradients.
        accumulate: (totals, gradients): adds each gradient to its total, in place.
    """

    forward: Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
    accumulate: Callable[[Sequence[Tensor], Sequence[Tensor]], None]

    def __call__(self, inputs: Inputs, **statics: Static) -> Mapping[str, Tensor]:
        """Run forward, backward and accumulation; returns the outputs. `grad` and `param` correspond by name."""
        with torch.enable_grad():
            loss, outputs = self.forward(inputs, **statics)
            with backward():
                found = torch.autograd.grad(loss, [inputs.param[name] for name in inputs.grad])
        self.accumulate(list(inputs.grad.values()), found)
        return outputs


def backward() -> AbstractContextManager[None]:
    """Marks nodes traced within as the backward pass; put it around `torch.autograd.grad`."""
    return torch_trace.annotate({BACKWARD_TAG: BACKWARD})


def in_module(path: str) -> AbstractContextManager[None]:
    """Marks nodes traced within as made by the module at `path`."""
    return torch_trace.annotate({MODULE_TAG: path})


def capture(
    name: str,
    body: GraphBody,
    inputs: Inputs,
    *,
    statics: Mapping[str, Static] | None = None,
    writes: Collection[Role] = (),
    dynamic: Dynamic | None = None,
) -> Captured:
    """Trace `body(inputs, **statics)` with gradients off; no input is read or written. `GraphError`: the body closes
    over a number or tensor, reads a tensor's value, or specializes an open size to a number.

    Args:
        body: returns its outputs by name; none may be a view of an input.
        statics: Python values that become constants of the graph.
        writes: roles that the body writes in place (checked by the verifier).
        dynamic: inputs with open sizes; one trace serves every value from 2 on. For each input the sizes' names, one
            per dimension, None if fixed; equal names are one size.
    """
    statics = dict(statics or {})
    check_closure(name, body)
    outputs: list[str] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        result = body(inputs.with_tensors(tensors), **statics)
        outputs.extend(result)
        return list(result.values())

    specs = inputs.specs(dynamic or {})
    try:
        module, sizes = torch_trace.trace(flat, inputs.tensors(), [spec.sizes for spec in specs])
    except torch_trace.Untraceable as error:
        raise GraphError(f"{name}: cannot be captured: {error}") from error
    return Captured(name, module, specs, tuple(outputs), statics, frozenset(writes), sizes=sizes)


def check_closure(name: str, body: Callable[..., Any]) -> None:
    """Refuse a body that closes over values or tensors, which would become undeclared constants."""
    hidden: dict[str, Any] = {}
    if isinstance(body, Differentiated):
        body = body.forward
    while isinstance(body, functools.partial):
        hidden |= {f"argument {i}": value for i, value in enumerate(body.args)} | body.keywords
        body = body.func
    if inspect.isroutine(body):
        hidden |= inspect.getclosurevars(body).nonlocals
    for variable, value in hidden.items():
        if isinstance(value, (bool, int, float, str, Tensor)):
            kind = "tensor; pass it as an input" if isinstance(value, Tensor) else "value; pass it as a static"
            raise GraphError(f"{name}: the traced function closes over {variable!r}, a {type(value).__name__} {kind}")


def substitute_inputs(module: nn.Module, inputs: Inputs) -> AbstractContextManager[None]:
    """For use in a function that may be traced. Within, `module` uses the traced tensors in `inputs` (see
    `module_inputs`), and its calls are marked by module path. If `inputs` are its own tensors, nothing changes."""
    return nullcontext() if inputs.module is module else _on_traced(module, inputs)


@contextmanager
def _on_traced(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    own = module_inputs(module)
    traced = {name: inputs.param[name] for name in own.param} | {name: inputs.buffer[name] for name in own.buffer}
    with torch_trace.swap_tensors(module, traced), _tag_submodules(module):
        yield


def module_inputs(module: nn.Module) -> Inputs:
    """A module's parameters (role `param`) and its other tensors (role `buffer`), for `substitute_inputs`."""
    parameters, others = torch_trace.module_tensors(module)
    return Inputs(param=parameters, buffer=others, module=module)


@contextmanager
def _tag_submodules(module: nn.Module) -> Iterator[None]:
    """Within, nodes traced in the forward of a submodule carry its path."""
    contexts: list[AbstractContextManager[None]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            contexts.append(torch_trace.annotate({MODULE_TAG: path}))
            contexts[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        contexts.pop().__exit__(None, None, None)

    def leave_all() -> None:
        while contexts:
            leave()

    with ExitStack() as stack:
        stack.callback(leave_all)  # after a signal's exception, for which torch calls no hooks
        for path, submodule in module.named_modules():
            if path:
                stack.callback(submodule.register_forward_pre_hook(enter(path)).remove)
                stack.callback(submodule.register_forward_hook(leave, always_call=True).remove)
        yield
