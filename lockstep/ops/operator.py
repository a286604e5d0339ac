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
            use; or SAME, the reference.
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
OF_OTHERS = "lockstep_user"  # the namespace of operators that are defined outside the package
SAME = ":"
_OPERATORS: list[Operator] = []
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
        self._fields = layout.fields if layout.records else None
        self._leads = layout.leads
        self._composed = declared.get("composed")
        self._direct = () if gpu_only else (torch.Tensor, torch.nn.Parameter)
        self.on_cpu = ByDtype(reference, declared.get("native"))
        cuda = declared.get("cuda")
        launch = _found(cuda, reference) if cuda and cuda != SAME else reference
        self._op = torch.library.custom_op(
            name,
            layout.of_fields(launch if gpu_only else self._compute if "native" in declared else reference),
            mutates_args=mutates,
            device_types="cuda" if gpu_only else "cpu",
            schema=torch.library.infer_schema(layout.prototype, mutates_args=mutates),
        )
        if cuda and not gpu_only:
            self._op.register_kernel("cuda", layout.of_fields(launch))
        self._op.register_fake(layout.of_fields(_found(declared.get("fake", _nothing), reference)))
        if backward := declared.get("backward"):
            setup = declared.get("setup", save)
            self._op.register_autograd(_filled(backward, layout.count), setup_context=setup)
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
            or type(x := args[0][0] if self._leads else args[0]) not in self._direct
            or not x.is_cpu
            or torch.is_grad_enabled()
            or torch._C._len_torch_dispatch_stack() != 0
        ):
            return self._op(*(self._fields(args) if self._fields else args))
        return self.on_cpu[x.dtype](*args)

    def replaced(self) -> str | None:
        """A message if another implementation has been registered since, else None."""
        same = self._registration() == self._registered
        return None if same else f"operator {self._name} is not what was registered"

    def _registration(self) -> tuple[Any, ...]:
        op: Any = self._op
        own = dict(op._backend_fns), op._abstract_fn, op._backward_fn, op._setup_context_fn, op._vmap_fn
        return *own, dict(op._torch_dispatch_fns), torch._C._dispatch_dump(self._name)

    def _compute(self, *args: Any) -> Any:
        return self.on_cpu[(args[0][0] if self._leads else args[0]).dtype](*args)


def in_c(x: torch.Tensor) -> bool:
    """Whether a helper of an operator, not an operator itself, runs in C for x."""
    return x.is_cpu and x.dtype is torch.float32 and library.current is not None


class ByDtype(dict[torch.dtype, Callable[..., Any]]):
    """CPU implementations: chosen when a dtype is first seen, and again when the C library changes."""

    def __init__(self, reference: Callable[..., Any], native: Callable[..., Any] | None) -> None:
        self._reference, self._native = reference, native
        library.when_changed.append(self.clear)

    def __missing__(self, dtype: torch.dtype) -> Callable[..., Any]:
        in_c = self._native and library.current is not None and (dtype is torch.float32 or not dtype.is_floating_point)
        self[dtype] = self._native if self._native and in_c else self._reference
        return self[dtype]


class ArgumentLayout:
    """An operator's arguments. Some are records (`NamedTuple`s), which its schema replaces by their fields.

    Attributes:
        prototype: a function with the signature of the schema.
        records: whether any argument is a record.
        leads: whether the first argument is a record.
        count: how many arguments the schema has.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        hints, flat = get_type_hints(function), []
        if hints["return"] is type(None):
            hints["return"] = None
        signature = inspect.signature(function)
        self._kinds = [getattr(hints[name], "_make", None) and hints[name] for name in signature.parameters]
        self.records, self.leads = any(self._kinds), bool(self._kinds[0])
        for parameter, record in zip(signature.parameters.values(), self._kinds, strict=True):
            given = get_type_hints(record) if record else {parameter.name: hints[parameter.name]}
            defaults = record._field_defaults if record else {parameter.name: parameter.default}
            for name, kind in given.items():
                default = defaults.get(name, parameter.empty)
                flat.append(parameter.replace(name=name, annotation=kind, default=default))
        self.count = len(flat)
        self.prototype: Callable[..., Any] = lambda: None
        vars(self.prototype)["__signature__"] = signature.replace(parameters=flat, return_annotation=hints["return"])

    @staticmethod
    def fields(args: Iterable[Any]) -> Iterator[Any]:
        """The arguments as the schema has them, given as records or already as their fields."""
        return itertools.chain.from_iterable(x if hasattr(x, "_fields") else (x,) for x in args)

    def of_fields(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, callable with the schema's arguments. Trailing ones may be omitted."""
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


def operator(name: str = "", **declared: Unpack[Declaration]) -> Callable[[Callable[..., Any]], Operator]:
    """Decorate the reference of operator "namespace::name". By default it has the reference's own name, in the
    package's namespace or, outside the package, in `OF_OTHERS`. Its first argument is a tensor or a record that begins
    with one."""

    def made(reference: Callable[..., Any]) -> Operator:
        space = NAMESPACE if reference.__module__.partition(".")[0] == __package__.partition(".")[0] else OF_OTHERS
        return Operator(name or f"{space}::{reference.__name__.lstrip('_')}", reference, declared)

    return made


def _replaced() -> str | None:
    return next(filter(None, (made.replaced() for made in _OPERATORS)), None)


loaded_code.FURTHER_CHECKS.append(_replaced)


def _found(function: Callable[..., Any] | str, beside: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; if it is given by name, it is imported when it is first called."""
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    package = beside.__module__.rpartition(".")[0]
    imported = functools.cache(lambda: importlib.import_module(f".{module}", package))
    return lambda *args: getattr(imported(), name)(*args)


def _nothing(*_: Any) -> None:
    return None


def like(*places: int, contiguous: bool = False) -> Callable[..., Any]:
    """For `Declaration.fake`: an empty result for each argument at these places, with its shape and dtype, and with its
    strides unless `contiguous`."""
    form = torch.contiguous_format if contiguous else torch.preserve_format

    def results(*args: Any) -> Any:
        made = tuple(torch.empty_like(args[place], memory_format=form) for place in places)
        return made if len(made) > 1 else made[0]

    return results


def save(ctx: Any, inputs: Sequence[Any], output: Any = None) -> None:
    """Keep values of any kind for `saved`; as a setup, all inputs."""
    ctx.save_for_backward(*[x if isinstance(x, torch.Tensor) else None for x in inputs])
    ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]


def saved(ctx: Any) -> list[Any]:
    """What `save` kept. Read it once: under activation checkpointing, each read unpacks the tensors anew."""
    return [other if x is None else x for x, other in zip(ctx.saved_tensors, ctx.others, strict=True)]


def save_inputs_and_results(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """A setup that keeps all inputs, then all results. Results without a gradient get None, not zeros."""
    save(ctx, [*inputs, *output])
    ctx.set_materialize_grads(False)


def _filled(backward: Callable[..., Any], count: int) -> Callable[..., tuple[Any, ...]]:
    """`backward`, returning None for the remaining arguments too."""

    def filled(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        found = backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return *found, *[None] * (count - len(found))

    return filled


@contextmanager
def recording_gradients() -> Iterator[None]:
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


def sizes_apart() -> AbstractContextManager[None]:
    """Within it, `torch.compile` does not unify dynamic sizes that happen to be equal at compile time."""
    patched: AbstractContextManager[None] = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore
    return patched
