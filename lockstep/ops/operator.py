"""How an operator is defined, so that it can be traced, differentiated and called cheaply."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypedDict, Unpack, get_type_hints

import torch
import torch.fx.experimental._config

from ..cache import loaded_code
from .native import library


class Declaration(TypedDict, total=False):
    """What an operator has besides its reference, whose annotations are its schema.

    Attributes:
        native: the implementation for float32 (and for integers) on a CPU, used if the C library is loaded; the dtype
            is the first tensor's.
        cuda: the implementation on a GPU, "module:function" relative to the operator's own folder, imported on first
            use (of an operator in no package, any module that can be imported); or SAME, the reference.
        gpu_only: there is no CPU implementation, and the reference has no body.
        mutates: names of the arguments that it writes in place.
        fake: returns empty results of the right shape; a function or, as in `cuda`, its place. Default: no result.
        composed: called instead where autograd records: differentiable operators, to which this one is a shortcut.
        backward: maps ctx and the results' gradients to the gradients of the first arguments; the rest have none.
        setup: saves what the backward reads, by default all inputs; see `save`.
    """

    native: Callable[..., Any]
    cuda: str
    gpu_only: bool
    mutates: tuple[str, ...]
    fake: Callable[..., Any] | str
    composed: Callable[..., Any]
    backward: Callable[..., Any]
    setup: Callable[..., None]


NAMESPACE = "lockstep"
USER_NAMESPACE = "lockstep_user"  # the namespace of operators that are defined outside the package
SAME = ":"
_OPERATORS: list[Operator] = []
_REFERENCES: dict[str, Callable[..., Any]] = {}  # by operator: the function that was the first to have the name
MISSING = object()


class Operator:
    """A `torch.library` operator whose calls skip the dispatcher when only the CPU implementation is concerned.

    Autograd, tracers and other devices need the dispatcher, which costs 3 to 5 us per call, and decoding one token of
    a small model makes forty calls. On a CPU without autograd or a tracer, none of that is needed.

    Attributes:
        on_cpu: the CPU implementation by dtype, for operators that are composed of others.
    """

    def __init__(self, name: str, reference: Callable[..., Any], declared: Declaration) -> None:
        functools.update_wrapper(self, reference)
        gpu_only, mutates = declared.get("gpu_only", False), declared.get("mutates", ())
        layout = ArgumentLayout(reference)
        self._flatten = layout.flatten if layout.has_records else None
        self._starts_with_record = layout.starts_with_record
        self._composed = declared.get("composed")
        self._direct_types = () if gpu_only else (torch.Tensor, torch.nn.Parameter)
        self.on_cpu = CpuImplementations(reference, declared.get("native"))
        cuda = declared.get("cuda")
        launch = _resolve(cuda, reference) if cuda and cuda != SAME else reference
        self._op = torch.library.custom_op(
            name,
            layout.accept_fields(launch if gpu_only else self._compute if "native" in declared else reference),
            mutates_args=mutates,
            device_types="cuda" if gpu_only else "cpu",
            schema=torch.library.infer_schema(layout.prototype, mutates_args=mutates),
        )
        if cuda and not gpu_only:
            self._op.register_kernel("cuda", layout.accept_fields(launch))
        self._op.register_fake(layout.accept_fields(_resolve(declared.get("fake", lambda *_: None), reference)))
        if backward := declared.get("backward"):
            setup = declared.get("setup", save)
            self._op.register_autograd(_pad_gradients(backward, layout.count), setup_context=setup)
        self._name = name
        self._registered = self._registration()
        if name.partition("::")[0] == NAMESPACE:
            _OPERATORS.append(self)

    def __call__(self, *args: Any) -> Any:
        """Skip the dispatcher if nothing records, intercepts or replaces calls on the first tensor."""
        if self._composed is not None and torch.is_grad_enabled():
            return self._composed(*args)
        if (
            torch.compiler.is_dynamo_compiling()  # first: Dynamo cannot trace the other conditions
            or type(x := args[0][0] if self._starts_with_record else args[0]) not in self._direct_types
            or not x.is_cpu
            or torch.is_grad_enabled()
            or torch._C._len_torch_dispatch_stack() != 0
        ):
            return self._op(*(self._flatten(args) if self._flatten else args))
        return self.on_cpu[x.dtype](*args)

    def describe_replacement(self) -> str | None:
        """A message if another implementation has been registered since, else None."""
        same = self._registration() == self._registered
        return None if same else f"operator {self._name} is not what was registered"

    def _registration(self) -> tuple[Any, ...]:
        op: Any = self._op
        own = dict(op._backend_fns), op._abstract_fn, op._backward_fn, op._setup_context_fn, op._vmap_fn
        return *own, dict(op._torch_dispatch_fns), torch._C._dispatch_dump(self._name)

    def _compute(self, *args: Any) -> Any:
        return self.on_cpu[(args[0][0] if self._starts_with_record else args[0]).dtype](*args)


class CpuImplementations(dict[torch.dtype, Callable[..., Any]]):
    """CPU implementations: chosen when a dtype is first seen, and again when the C library changes."""

    def __init__(self, reference: Callable[..., Any], native: Callable[..., Any] | None) -> None:
        self._reference, self._native = reference, native
        library.when_changed.append(self.clear)

    def __missing__(self, dtype: torch.dtype) -> Callable[..., Any]:
        supported = dtype is torch.float32 or not dtype.is_floating_point
        native = self._native if supported and library.current is not None else None
        self[dtype] = native or self._reference
        return self[dtype]


class ArgumentLayout:
    """An operator's arguments. Some are records (`NamedTuple`s), which its schema replaces by their fields.

    Attributes:
        prototype: a function with the signature of the schema.
        has_records: whether any argument is a record.
        starts_with_record: whether the first argument is one.
        count: how many arguments the schema has.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints, flat = get_type_hints(function), []
        if hints["return"] is type(None):
            hints["return"] = None
        signature = inspect.signature(function)
        self._records = [hints[name] if hasattr(hints[name], "_make") else None for name in signature.parameters]
        self.has_records, self.starts_with_record = any(self._records), bool(self._records[0])
        for parameter, record in zip(signature.parameters.values(), self._records, strict=True):
            fields = get_type_hints(record) if record else {parameter.name: hints[parameter.name]}
            defaults = record._field_defaults if record else {parameter.name: parameter.default}
            for name, kind in fields.items():
                default = defaults.get(name, parameter.empty)
                flat.append(parameter.replace(name=name, annotation=kind, default=default))
        self.count = len(flat)
        self.prototype: Callable[..., Any] = lambda: None
        vars(self.prototype)["__signature__"] = signature.replace(parameters=flat, return_annotation=hints["return"])

    @staticmethod
    def flatten(args: Iterable[Any]) -> Iterator[Any]:
        """The arguments as the schema has them, given as records or already as their fields."""
        return itertools.chain.from_iterable(x if hasattr(x, "_fields") else (x,) for x in args)

    def accept_fields(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, callable with the schema's arguments. Trailing ones may be omitted."""
        if not self.has_records:
            return function

        def call_with_records(*flat: Any) -> Any:
            rest = iter(flat)
            args = [
                record(*itertools.islice(rest, len(record._fields))) if record else next(rest, MISSING)
                for record in self._records
            ]
            return function(*(x for x in args if x is not MISSING))

        return call_with_records


def operator(name: str = "", **declared: Unpack[Declaration]) -> Callable[[Callable[..., Any]], Operator]:
    """Decorate the reference of operator "namespace::name". By default it has the reference's own name, in the
    package's namespace or, outside the package, in `USER_NAMESPACE`. Its first argument is a tensor, or a record that
    begins with one. A function that is defined again, as in a notebook, replaces itself. `ValueError`: another function
    has the name, or it is in the package's namespace and the function is outside."""

    def register(reference: Callable[..., Any]) -> Operator:
        own = reference.__module__.partition(".")[0] == __package__.partition(".")[0]
        chosen = name or f"{NAMESPACE if own else USER_NAMESPACE}::{reference.__name__.lstrip('_')}"
        file = reference.__code__.co_filename
        if chosen.partition("::")[0] == NAMESPACE and not own:
            raise ValueError(f"operator {chosen} of {file} is in the package's namespace; give it another, or no name")
        first = _REFERENCES.setdefault(chosen, reference)
        same = first.__module__ == reference.__module__ or first.__code__.co_filename == file
        if not same or first.__qualname__ != reference.__qualname__:
            raise ValueError(
                f"operator {chosen} is {first.__qualname__} of {first.__code__.co_filename}, which "
                f"{reference.__qualname__} of {file} would replace; give one another name, as @operator('mine::name')"
            )
        return Operator(chosen, reference, declared)

    return register


def _find_replaced_operator() -> str | None:
    return next(filter(None, (op.describe_replacement() for op in _OPERATORS)), None)


loaded_code.FURTHER_CHECKS.append(_find_replaced_operator)


def _resolve(function: Callable[..., Any] | str, beside: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; if it is given by name, it is imported when it is first called."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    package = beside.__module__.rpartition(".")[0]
    imported = functools.cache(lambda: importlib.import_module(f".{module}" if package else module, package))
    return lambda *args: getattr(imported(), name)(*args)


def like(*places: int, contiguous: bool = False) -> Callable[..., Any]:
    """For `Declaration.fake`: an empty result for each argument at these places, with its shape and dtype, and with its
    strides unless `contiguous`."""
    form = torch.contiguous_format if contiguous else torch.preserve_format

    def fake(*args: Any) -> Any:
        results = tuple(torch.empty_like(args[place], memory_format=form) for place in places)
        return results if len(results) > 1 else results[0]

    return fake


def save(ctx: Any, inputs: Sequence[Any], output: Any = None) -> None:
    """Keep values of any kind for `saved_values`; as a setup, all inputs."""
    ctx.save_for_backward(*[x if isinstance(x, torch.Tensor) else None for x in inputs])
    ctx.non_tensors = [None if isinstance(x, torch.Tensor) else x for x in inputs]


def saved_values(ctx: Any) -> list[Any]:
    """What `save` kept. Read it once: under activation checkpointing, each read unpacks the tensors anew."""
    return [value if x is None else x for x, value in zip(ctx.saved_tensors, ctx.non_tensors, strict=True)]


def save_inputs_and_results(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A setup that keeps all inputs, then all results. Results without a gradient get None, not zeros."""
    save(ctx, [*inputs, *output])
    ctx.set_materialize_grads(False)


def _pad_gradients(backward: Callable[..., Any], count: int) -> Callable[..., tuple[Any, ...]]:
    """`backward`, returning None for the remaining arguments too."""

    def padded_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        results = backward(ctx, *grads)
        results = results if isinstance(results, tuple) else (results,)
        return *results, *[None] * (count - len(results))

    return padded_backward


@contextmanager
def enable_autograd() -> Iterator[None]:
    """Enable autograd within an operator's implementation, where the dispatcher has excluded its keys."""
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


def disable_duck_shapes() -> AbstractContextManager[None]:
    """Within it, `torch.compile` does not unify dynamic sizes that happen to be equal at compile time."""
    patched: AbstractContextManager[None] = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore
    return patched
