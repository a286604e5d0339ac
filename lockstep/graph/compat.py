"""Every private interface of torch that the graph toolkit uses; no other file touches one. For torch 2.11 to 2.13."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

_ADDRESS_WARNING = "Accessing the data pointer of FakeTensor"
_TAGS = "custom"  # where `annotate` leaves its tags in a node's metadata


class Argument(NamedTuple):
    """An operator's argument or result as its schema declares it."""

    name: str
    aliases: frozenset[str]
    is_write: bool


class Untraceable(Exception):
    """The function did something that a graph cannot hold."""


def trace(fn: Callable[..., list[Tensor]], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The flat graph of `fn(*tensors)`, traced with fake tensors: nothing is computed and no input is written.

    Raises:
        Untraceable: Python asks for a tensor's value or address.
    """
    # Imported late: it brings in sympy, a third of a second.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with torch.inference_mode(False), torch.no_grad():
        fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
        # One thread, so that the backward pass sees the tags that are set around it.
        with mode, tracing(TracingContext(mode)), traceback.preserve_node_meta(), _one_thread(), _no_addresses():
            try:
                return make_fx(fn)(*fakes)
            except GuardOnDataDependentSymNode as error:
                raise Untraceable(
                    "Python asked for the value of a tensor; compute on the device (torch.where), or make it a static "
                    f"({str(error).splitlines()[0]})"
                ) from error


def _one_thread() -> AbstractContextManager[None]:
    return torch.autograd.set_multithreading_enabled(False)


@contextmanager
def _no_addresses() -> Iterator[None]:
    """A kernel called outside an operator reads a fake tensor's address, which is 0; torch warns of it, once."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_ADDRESS_WARNING)
            yield
    except UserWarning as warning:
        if not str(warning).startswith(_ADDRESS_WARNING):
            raise
        raise Untraceable("a kernel was called outside an operator; register it with torch.library") from warning
    finally:
        torch.set_warn_always(always)


def annotate(**tags: str) -> AbstractContextManager[None]:
    """Nodes traced within carry these tags, those of enclosing contexts too."""
    return traceback.annotate(tags)


def tags(node: fx.Node) -> dict[str, str]:
    """The tags that `annotate` gave a node."""
    return node.meta.get(_TAGS, {})


def set_tag(node: fx.Node, key: str, value: str) -> None:
    """Give a node a tag of its own."""
    node.meta[_TAGS] = {**tags(node), key: value}


def fake_value(node: fx.Node) -> Any:
    """What a node computes: a fake tensor, a sequence of them, a symbolic number, or None."""
    return node.meta.get("val")


def is_operator(target: object) -> bool:
    """Whether a node's target is one overload of a registered operator."""
    return isinstance(target, OpOverload)


@functools.cache
def arguments(op: Any) -> tuple[Argument, ...]:
    """The arguments of an operator overload, in order."""
    return tuple(_declared(a) for a in op._schema.arguments)


@functools.cache
def results(op: Any) -> tuple[Argument, ...]:
    """The results of an operator overload; those with aliases are views of the arguments with the same ones."""
    return tuple(_declared(r) for r in op._schema.returns)


def _declared(item: Any) -> Argument:
    info = item.alias_info
    if info is None:
        return Argument(item.name, frozenset(), False)
    return Argument(item.name, frozenset(info.before_set), info.is_write)


def module_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's parameters, and its other tensors: buffers and plain attributes. A tensor that stands in several
    places has the name of the first."""
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    others: dict[str, Tensor] = {}
    seen = {id(p) for p in parameters.values()}
    for prefix, slot in _slots(module):
        for name, value in slot.items():
            if isinstance(value, Tensor) and id(value) not in seen:
                seen.add(id(value))
                others[f"{prefix}.{name}" if prefix else name] = value
    return parameters, others


@contextmanager
def swapped(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """The module with the named tensors of `module_tensors` in place of its own, wherever they stand."""
    parameters, others = module_tensors(module)
    own = parameters | others
    new = {id(own[name]): tensor for name, tensor in tensors.items()}
    replaced = [
        (slot, name, value)
        for _, slot in _slots(module)
        for name, value in slot.items()
        if isinstance(value, Tensor) and id(value) in new
    ]
    try:
        for slot, name, value in replaced:
            slot[name] = new[id(value)]
        yield
    finally:
        for slot, name, value in replaced:
            slot[name] = value


def _slots(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for prefix, owner in module.named_modules():
        for slot in (owner._parameters, owner._buffers, owner.__dict__):
            yield prefix, slot


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in as few launches as there can be."""
    torch._foreach_copy_(targets, sources)


def graph_pool(pool: torch.cuda.MemPool) -> Any:
    """A memory pool as `torch.cuda.graph` takes it."""
    return pool.id


def clear_matmul_workspaces() -> None:
    """Let go of cuBLAS's scratch memory, which otherwise keeps the pool that it was allocated in."""
    torch._C._cuda_clearCublasWorkspaces()
