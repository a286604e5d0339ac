"""How an operator is defined, so that it can be traced, differentiated and called cheaply."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypedDict, Unpack, get_type_hints

import torch
import torch.fx.experimental._config

from .native import library


class Declaration(TypedDict, total=False):
    """What there is of an operator beside its reference, whose annotations are its schema.

    Attributes:
        native: what computes float32 on a CPU where the C library is there; by the first argument's dtype.
        cuda: what computes on a GPU, "module:function" beside the operator's own module, imported when it first does;
            or SAME, where the reference does.
        gpu_only: the reference is for a GPU, and there is none for a CPU.
        mutates: names of the arguments that it writes.
        fake: empty results of the right shape; by default there is no result.
        backward: its gradients; `setup` says what they need, by default all inputs.
    """

    native: Callable[..., Any]
    cuda: str
    gpu_only: bool
    mutates: tuple[str, ...]
    fake: Callable[..., Any]
    backward: Callable[..., Any]
    setup: Callable[..., None]


SAME = ":"
MISSING = object()


class Operator:
    """A `torch.library` operator, called past the dispatcher where nobody but the CPU is concerned.

    Autograd, tracers and other devices need the dispatcher, which costs 3 to 5 us a call; decoding one token of a
    small model makes forty. In inference mode on a CPU none of them is there.
    """

    def __init__(self, name: str, reference: Callable[..., Any], declared: Declaration) -> None:
        functools.update_wrapper(self, reference)
        gpu_only, mutates = declared.get("gpu_only", False), declared.get("mutates", ())
        layout = ArgumentLayout(reference)
        self._fields = layout.fields if layout.records else None
        self.on_cpu = _on_cpu(reference, declared.get("native"))
        self._direct = () if gpu_only else (torch.Tensor, torch.nn.Parameter)
        self._op = torch.library.custom_op(
            name,
            layout.of_fields(self.on_cpu),
            mutates_args=mutates,
            device_types="cuda" if gpu_only else "cpu",
            schema=torch.library.infer_schema(layout.prototype, mutates_args=mutates),
        )
        if cuda := declared.get("cuda"):
            launch = reference if cuda == SAME else _imported(cuda, reference.__module__)
            self._op.register_kernel("cuda", layout.of_fields(launch))
        self._op.register_fake(layout.of_fields(declared.get("fake", _nothing)))
        if backward := declared.get("backward"):
            self._op.register_autograd(backward, setup_context=declared.get("setup", _save_inputs))

    def __call__(self, *args: Any) -> Any:
        """Directly where nothing records, intercepts or replaces a call on the first argument."""
        if (
            torch.compiler.is_compiling()  # first: its tracer understands none of the others
            or type(args[0]) not in self._direct
            or not args[0].is_cpu
            or not torch.is_inference_mode_enabled()
            or torch._C._len_torch_dispatch_stack() != 0
        ):
            return self._op(*(self._fields(args) if self._fields else args))
        return self.on_cpu(*args)


class ArgumentLayout:
    """An operator's arguments, some of which are records, that is, classes of `NamedTuple`; its schema has their fields
    in their place.

    Attributes:
        prototype: what has the signature of the schema.
        records: whether there are any.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints, flat = get_type_hints(function), []
        if hints["return"] is type(None):
            hints["return"] = None
        signature = inspect.signature(function)
        self._kinds = [getattr(hints[name], "_make", None) and hints[name] for name in signature.parameters]
        self.records = any(self._kinds)
        for parameter, record in zip(signature.parameters.values(), self._kinds, strict=True):
            given = get_type_hints(record) if record else {parameter.name: hints[parameter.name]}
            defaults = record._field_defaults if record else {parameter.name: parameter.default}
            for name, kind in given.items():
                default = defaults.get(name, parameter.empty)
                flat.append(parameter.replace(name=name, annotation=kind, default=default))
        self.prototype: Callable[..., Any] = lambda: None
        vars(self.prototype)["__signature__"] = signature.replace(parameters=flat, return_annotation=hints["return"])

    @staticmethod
    def fields(args: Iterable[Any]) -> Iterator[Any]:
        """The arguments as the schema has them, of those that are records or their fields already."""
        return itertools.chain.from_iterable(x if hasattr(x, "_fields") else (x,) for x in args)

    def of_fields(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, called with the arguments that the schema has. Those at the end may be left out."""
        if not self.records:
            return function

        def together(*flat: Any) -> Any:
            rest = iter(flat)
            args = [
                record(*itertools.islice(rest, len(record._fields))) if record else next(rest, MISSING)
                for record in self._kinds
            ]
            return function(*(x for x in args if x is not MISSING))

        return together


def operator(name: str, **declared: Unpack[Declaration]) -> Callable[[Callable[..., Any]], Operator]:
    """Decorates the reference of operator "namespace::name"; the first argument is a tensor."""
    return lambda reference: Operator(name, reference, declared)


def _on_cpu(reference: Callable[..., Any], native: Callable[..., Any] | None) -> Callable[..., Any]:
    """What computes on a CPU, past the dispatcher."""
    if native is None:
        return reference

    def chosen(*args: Any) -> Any:
        in_c = args[0].dtype is torch.float32 and library.current is not None
        return native(*args) if in_c else reference(*args)

    return chosen


def _imported(path: str, beside: str) -> Callable[..., Any]:
    """A function that is imported when it is first called."""
    name, _, function = path.partition(":")
    module = functools.cache(lambda: importlib.import_module(f".{name}", beside.rpartition(".")[0]))
    return lambda *args: getattr(module(), function)(*args)


def _nothing(*_: Any) -> None:
    return None


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


@contextmanager
def recording_gradients() -> Iterator[None]:
    """Autograd within the implementation of an operator, which the dispatcher reaches with autograd behind it."""
    keys = [torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradCUDA, torch._C.DispatchKey.ADInplaceOrView]
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for key, excluded in zip(keys, before, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, excluded)


def sizes_apart() -> AbstractContextManager[None]:
    """Within, `torch.compile` does not take open sizes for one because they are equal when it compiles."""
    patched: AbstractContextManager[None] = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore
    return patched
