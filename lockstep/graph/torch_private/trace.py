"""Tracing, node metadata, operator schemas and fake tensors. Uses private interfaces of torch 2.11 to 2.13."""

from __future__ import annotations

import functools
import gc
import logging
import threading
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
ALIGNMENT = 16  # bytes; Triton specializes kernels on pointers that are multiples of this
Flat = Callable[..., list[Tensor]]  # takes only tensors
ONE_AT_A_TIME = threading.RLock()  # held during a trace, whose state torch keeps for the whole process
_TAGS = "custom"  # key of the tags of `annotate` in a node's metadata


class Argument(NamedTuple):
    """An operator's argument or result as its schema declares it."""

    name: str
    aliases: frozenset[str]
    is_write: bool


class Untraceable(Exception):
    """The function does something that a graph cannot represent."""


def traced_size(size: int | torch.SymInt) -> int:
    """The value that a size of a traced tensor had during the trace."""
    return size if isinstance(size, int) else size.node.hint


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A graph as a module whose Python code is generated at the first call, so not after every pass."""
    return _LazyGraphModule(root, graph)


def import_tracer() -> None:
    """Import what a trace needs, sympy and half of torch's compiler, which takes most of a second."""
    import torch._dynamo.source
    import torch.fx.experimental.symbolic_shapes  # noqa: F401


def flat_graph(fn: Flat, fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The operators that `fn(*fakes)` calls, including those of its backward pass."""
    return make_fx(fn)(*fakes)


def trace(
    fn: Flat,
    tensors: Sequence[Tensor],
    dims: Sequence[tuple[str | None, ...]],
    graph_of: Callable[[Flat, Sequence[Tensor]], fx.GraphModule] = flat_graph,
) -> tuple[fx.GraphModule, Sizes]:
    """The flat graph of `fn(*tensors)`, traced with fake tensors: nothing is computed and no input is written.

    Args:
        dims: for each tensor the names of its open sizes, one per dimension, None if fixed; empty: all are fixed.
            Tensors with open sizes are contiguous, these sizes are at least 2, and equal names are one size.
        graph_of: makes the graph of a function and its fake inputs.

    Raises:
        Untraceable: Python reads a tensor's value or address, or specializes an open size to a number.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad():
        fakes, names = _fakes(mode, env, tensors, dims)
        # One thread, so that nodes of the backward pass get the tags that are set around it.
        with mode, tracing(TracingContext(mode)), traceback.preserve_node_meta(), _one_thread(), _refuse_addresses():
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
    """Fake tensors for the trace, and the names of the open sizes by symbol."""
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
    """The open sizes with the conditions of the trace. `Untraceable`: a size was specialized."""
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
def pause_garbage_collection() -> Iterator[None]:
    """Within, garbage collection is off. A graph's thousands of objects stay alive, and scanning them would take a
    fifth of a trace's time, or half a second in the middle of a pass."""
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
def _refuse_addresses() -> Iterator[None]:
    """Turns torch's warning about the address of a fake tensor, which it gives only once, into `Untraceable`: a kernel
    that is called outside an operator reads that address, which is 0."""
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


annotate = traceback.annotate  # nodes traced within carry the given tags, besides those of enclosing contexts


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
    """Insert a call at the graph's insertion point, with the fake value that a trace would have recorded."""
    values = tree_map(lambda item: fake_value(item) if isinstance(item, fx.Node) else item, args)
    mode = next(v.fake_mode for v in tree_flatten(values)[0] if isinstance(v, FakeTensor))
    with mode, torch.no_grad():
        return set_fake_value(graph.call_function(target, args), target(*values))


def move_placeholders_first(graph: fx.Graph) -> None:
    """Move the placeholders of a finished graph before its calls, in order."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        first.prepend(node)


def is_operator(target: object) -> bool:
    return isinstance(target, OpOverload)


def operator_name(op: Any) -> str:
    """`namespace.operator` of an operator overload."""
    namespace, _, name = op.name().partition("::")
    return f"{namespace}.{name.partition('.')[0]}"


def operator_named(name: str) -> Any:
    """The operator overload named `namespace.operator.overload`, as by `str`; `AttributeError`: there is none."""
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
    """The results of an operator overload; a result is a view of the arguments that share one of its aliases."""
    return tuple(_declared(r) for r in op._schema.returns)


def _declared(item: Any) -> Argument:
    info = item.alias_info
    if info is None:
        return Argument(item.name, frozenset(), False)
    shared = frozenset(info.before_set | info.after_set) or frozenset("*")  # "*": elements of a list
    return Argument(item.name, shared, info.is_write)


def module_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's parameters, and its other tensors: buffers and plain attributes. A tensor that appears several times
    is named by its first place."""
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
def swap_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, `tensors` replace the module's own, by their names in `module_tensors`, wherever they appear."""
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


def run_observed(fn: Callable[[], Any], seen: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None]) -> Any:
    """Run `fn()`, with `seen(operator, args, kwargs, result)` after each operator call, also in the backward pass."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            with _disable_current_modes():
                seen(op, args, kwargs or {}, result)
            return result

    with Watch(), _one_thread():
        return fn()


# torch 2.11 mistakes the dtype for a scalar factor if these are called on fake tensors. They return their `out`.
NO_STAND_IN = (torch.ops.aten.addmm.dtype_out,)


class StandIns:
    """Stand-ins for real tensors: fake tensors that also have an address alignment. Within `computing`, operators only
    infer their results' shapes, and those of `namespace` run their implementation up to its kernel launches."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._places: dict[int, int] = {}  # by storage: its address modulo `ALIGNMENT`

    def stand_in(self, tensor: Tensor) -> Tensor:
        """A stand-in for this tensor, with the same alignment."""
        with torch.inference_mode(False), self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        self._places[made.untyped_storage()._cdata] = tensor.data_ptr() % ALIGNMENT
        return made

    def alignment(self, tensor: Tensor) -> int:
        """The address, modulo `ALIGNMENT`, of a stand-in or of a result of some."""
        place = self._places.get(tensor.untyped_storage()._cdata, 0)
        return (place + int(tensor.storage_offset()) * tensor.element_size()) % ALIGNMENT

    @contextmanager
    def computing(self) -> Iterator[None]:
        """See the class."""
        outer = self

        class Implementations(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if op.namespace == outer._namespace:
                    try:
                        with self:
                            return outer._implementation(op, args, kwargs or {})
                    except Exception as error:  # its kernels are compiled at their first launch instead
                        _log.debug("%s was not rehearsed (%s: %s)", op, type(error).__name__, error)
                return kwargs["out"] if op in NO_STAND_IN and kwargs else op(*args, **(kwargs or {}))

        with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings(), _silence_logger(FakeTensorMode):
            warnings.filterwarnings("ignore", message=_ADDRESS_WARNING)
            with self._mode, Implementations():
                yield

    def _implementation(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        for tensor in tensors:
            if isinstance(tensor, FakeTensor):  # kernels are specialized on it
                tensor.data_ptr = functools.partial(int, self.alignment(tensor))  # type: ignore[method-assign]
        key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}[tensors[0].device.type]
        return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@contextmanager
def _silence_logger(of: type) -> Iterator[None]:
    """Within, the logger of a class's module is off: it logs at length what it also raises."""
    log = logging.getLogger(of.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def skip_dynamo_wrappers(namespace: str) -> None:
    """Let operators' kernels be called without a wrapper. torch wraps each kernel of `torch.library.custom_op` to hide
    it from `torch._dynamo`, and the wrapper's first call imports that, which takes one or two seconds. No kernel here
    runs under Dynamo."""
    for name, definition in OPDEFS.items():
        if name.startswith(f"{namespace}::"):
            for wrapper in getattr(definition, "_backend_fns", {}).values():
                kernel = getattr(wrapper, "__wrapped__", None)
                if kernel is not None and not hasattr(kernel, "__dynamo_disable"):
                    vars(kernel)["__dynamo_disable"] = kernel  # what the wrapper looks for before it imports


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, in as few launches as possible."""
    torch._foreach_copy_(targets, sources)


def base_tensor(tensor: Tensor) -> Tensor:
    """The base that a tensor is a view of; the tensor itself if it is not a view, or was given other memory since."""
    base = tensor._base
    if base is None or base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return tensor
    return base


def clear_matmul_workspaces() -> None:
    """Release cuBLAS's workspaces, which would otherwise keep alive the memory pool that they were allocated in."""
    torch._C._cuda_clearCublasWorkspaces()
