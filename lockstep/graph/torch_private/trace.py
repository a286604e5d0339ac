"""Every private interface of torch that the graph toolkit uses, here and in the files beside this one; no other
file touches one. For torch 2.11 to 2.13."""

from __future__ import annotations

import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ..ir.sizes import Sizes, expression

_log = logging.getLogger("lockstep.graph")
_ADDRESS_WARNING = "Accessing the data pointer of FakeTensor"
ALIGNMENT = 16  # bytes that the address of a tensor may be a multiple of, to the benefit of a kernel
Flat = Callable[..., list[Tensor]]  # of tensors alone
_TAGS = "custom"  # where `annotate` leaves its tags in a node's metadata


class Argument(NamedTuple):
    """An operator's argument or result as its schema declares it."""

    name: str
    aliases: frozenset[str]
    is_write: bool


class Untraceable(Exception):
    """The function did something that a graph cannot hold."""


def traced_size(size: int | torch.SymInt) -> int:
    """A size of a traced tensor as it was at the trace."""
    return size if isinstance(size, int) else size.node.hint


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module, whose code is written when it is first called: between two passes nobody does."""
    return _LazyGraphModule(root, graph)


def import_tracer() -> None:
    """Import what a trace needs: sympy and half of torch's compiler, most of a second."""
    import torch._dynamo.source
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def flat_graph(fn: Flat, fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The operators that `fn(*fakes)` calls, its autograd's among them."""
    return make_fx(fn)(*fakes)


def trace(
    fn: Flat,
    tensors: Sequence[Tensor],
    dims: Sequence[tuple[str | None, ...]],
    graph_of: Callable[[Flat, Sequence[Tensor]], fx.GraphModule] = flat_graph,
) -> tuple[fx.GraphModule, Sizes]:
    """The flat graph of `fn(*tensors)`, traced with fake tensors: nothing is computed and no input is written.

    Args:
        dims: for each tensor the names of its open sizes, None for a fixed one; empty: all are fixed. Tensors with open
            sizes are contiguous, and these sizes are at least 2; equal names are one size.
        graph_of: makes the graph of a function of fake tensors.

    Raises:
        Untraceable: Python asks for a tensor's value or address, or takes an open size for a number.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    with torch.inference_mode(False), torch.no_grad():
        fakes, names = _fakes(mode, env, tensors, dims)
        # One thread, so that the backward pass sees the tags that are set around it.
        with mode, tracing(TracingContext(mode)), traceback.preserve_node_meta(), _one_thread(), _no_addresses():
            try:
                with _use_lazy_graph_module(True):
                    module = graph_of(fn, fakes)
            except GuardOnDataDependentSymNode as error:
                raise Untraceable(
                    "Python asked for the value of a tensor; compute on the device (torch.where), or make it a static "
                    f"({str(error).splitlines()[0]})"
                ) from error
    return module, _open_sizes(env, names)


def _fakes(
    mode: FakeTensorMode, env: Any, tensors: Sequence[Tensor], dims: Sequence[tuple[str | None, ...]]
) -> tuple[list[Tensor], dict[Any, str]]:
    """Fake tensors for the trace, and the symbols of the open sizes with their names."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    symbols: dict[str, Any] = {}

    def size(value: int, name: str | None) -> Any:
        if name is None:
            return value
        if name not in symbols:
            source = ConstantSource(name)
            symbol = env.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
            symbols[name] = env.create_symintnode(symbol, hint=value, source=source)
        return symbols[name]

    fakes = []
    for tensor, named in zip(tensors, dims, strict=True):
        if any(named):
            with mode:
                shape = [size(*pair) for pair in zip(tensor.shape, named, strict=True)]
                fakes.append(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))
        else:
            fakes.append(mode.from_tensor(tensor, static_shapes=True))
    return fakes, {symbol.node.expr: name for name, symbol in symbols.items()}


def _open_sizes(env: Any, names: Mapping[Any, str]) -> Sizes:
    """The sizes with what the trace assumed of them; `Untraceable` if one is not open any more."""
    for symbol, value in env.replacements.items():
        if symbol in names:
            asked = next((_where(guard) for guard in env.guards if symbol in guard.expr.free_symbols), "unknown")
            raise Untraceable(
                f"size {names[symbol]} was taken for {Sizes(symbols=names).text(value)} ({asked}), so the graph would "
                "hold for no other; let tensors have the size, or do not declare it dynamic"
            )
    try:
        conditions = tuple((expression(guard.expr, names), _where(guard)) for guard in env.guards)
    except KeyError as unknown:
        raise Untraceable(f"a condition on a size has {unknown}, which cannot be checked at a launch") from unknown
    return Sizes(tuple(names.values()), conditions, names)


def _where(guard: Any) -> str:
    return str(guard.sloc).strip("()")


@contextmanager
def no_collection() -> Iterator[None]:
    """A graph's thousands of objects stay: looking through them for garbage takes a fifth of the time of a trace, and
    half a second in the middle of a pass."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


annotate = traceback.annotate  # nodes traced within carry the tags of a dict, and those of enclosing contexts too


def tags(node: fx.Node) -> dict[str, str]:
    return node.meta.get(_TAGS, {})


def set_tag(node: fx.Node, key: str, value: str) -> None:
    node.meta[_TAGS] = {**tags(node), key: value}


def copy_tags(source: fx.Node, targets: Sequence[fx.Node]) -> None:
    for node in targets:
        node.meta[_TAGS] = dict(tags(source))


def fake_value(node: fx.Node) -> Any:
    return node.meta.get("val")


def set_fake_value(node: fx.Node, value: Any) -> fx.Node:
    node.meta["val"] = value
    return node


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A call at the graph's point of insertion, with what it computes as a trace would have recorded it."""
    values = tree_map(lambda item: fake_value(item) if isinstance(item, fx.Node) else item, args)
    mode = next(v.fake_mode for v in tree_flatten(values)[0] if isinstance(v, FakeTensor))
    with mode, torch.no_grad():
        return set_fake_value(graph.call_function(target, args), target(*values))


def is_operator(target: object) -> bool:
    return isinstance(target, OpOverload)


def operator_name(op: Any) -> str:
    """`namespace.operator` of an operator overload."""
    namespace, _, name = op.name().partition("::")
    return f"{namespace}.{name.partition('.')[0]}"


def operator_named(name: str) -> Any:
    """The operator overload that `str` gives as `namespace.operator.overload`; `AttributeError` if there is none."""
    namespace, operator, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    if not is_operator(found):
        raise AttributeError(f"{name} is no operator")
    return found


@functools.cache
def arguments(op: Any) -> tuple[Argument, ...]:
    return tuple(_declared(a) for a in op._schema.arguments)


@functools.cache
def results(op: Any) -> tuple[Argument, ...]:
    """The results of an operator overload; those with aliases are views of the arguments with the same ones."""
    return tuple(_declared(r) for r in op._schema.returns)


def _declared(item: Any) -> Argument:
    info = item.alias_info
    if info is None:
        return Argument(item.name, frozenset(), False)
    shared = frozenset(info.before_set | info.after_set) or frozenset("*")  # a list's elements share with "-> *"
    return Argument(item.name, shared, info.is_write)


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


def watched(fn: Callable[[], Any], seen: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]) -> Any:
    """`fn()`, with `seen(operator, args, kwargs, result)` after each operator call, in the backward pass too."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            with _disable_current_modes():
                seen(op, args, kwargs or {}, result)
            return result

    with Watch(), _one_thread():
        return fn()


# Where they are called on stand-ins, torch 2.11 takes the dtype for a factor. What they give is what they write to.
NO_STAND_IN = (torch.ops.aten.addmm.dtype_out,)


class WithoutMemory:
    """Stand-ins for real tensors, with shapes and addresses and nothing else. Within `computing`, operators find the
    shapes of their results, and those of `namespace` run their implementation for the device, as if to launch its
    kernels."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._places: dict[int, int] = {}  # of the memory that a stand-in's would be

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A stand-in for this one, as well aligned."""
        with torch.inference_mode(False), self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._places[made.untyped_storage()._cdata] = tensor.data_ptr() % ALIGNMENT
        return made

    def alignment(self, tensor: Tensor) -> int:
        """The address of a stand-in or of what was computed from some, less a multiple of `ALIGNMENT`."""
        place = self._places.get(tensor.untyped_storage()._cdata, 0)
        return (place + int(tensor.storage_offset()) * tensor.element_size()) % ALIGNMENT

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See above."""
        outer = self

        class Implementations(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if op.namespace == outer._namespace:
                    try:
                        with self:
                            return outer._implementation(op, args, kwargs or {})
                    except Exception as error:  # its kernels are then compiled when they are launched
                        _log.debug("%s was not rehearsed (%s: %s)", op, type(error).__name__, error)
                return kwargs["out"] if op in NO_STAND_IN and kwargs else op(*args, **(kwargs or {}))

        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), _silenced(FakeTensorMode):
            warnings.filterwarnings("ignore", message=_ADDRESS_WARNING)
            with self._mode, Implementations():
                yield

    def _implementation(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):  # a kernel is compiled for an address of this alignment
                tensor.data_ptr = functools.partial(int, self.alignment(tensor))  # type: ignore[method-assign]
        key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}[tensors[0].device.type]
        return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@contextmanager
def _silenced(of: type) -> Iterator[None]:
    """Without log lines of a class's module, which says at length what it also raises."""
    log = logging.getLogger(of.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def spare_dynamo(namespace: str) -> None:
    """Have operators' kernels called as they are: torch wraps each kernel of `torch.library.custom_op` so that
    `torch._dynamo` leaves it alone, and the first call of one imports that: one or two seconds. Nothing here runs under
    it."""
    for name, definition in OPDEFS.items():
        if name.startswith(f"{namespace}::"):
            for wrapper in getattr(definition, "_backend_fns", {}).values():
                kernel = getattr(wrapper, "__wrapped__", None)
                if kernel is not None and not hasattr(kernel, "__dynamo_disable"):
                    vars(kernel)["__dynamo_disable"] = kernel  # what the wrapper looks for before it imports


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in as few launches as there can be."""
    torch._foreach_copy_(targets, sources)


def viewed_tensor(tensor: Tensor) -> Tensor:
    """The tensor whose memory this one is a view of; itself, if it is none or was given other memory since."""
    base = tensor._base
    if base is None or base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return tensor
    return base


def clear_matmul_workspaces() -> None:
    """Let go of cuBLAS's scratch memory, which otherwise keeps the pool that it was allocated in."""
    torch._C._cuda_clearCublasWorkspaces()
