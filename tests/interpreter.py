"""A plugin of pytest for the processes that run Triton's interpreter (`processes.run_interpreted`): the same words, and
sooner."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def replace_the_language_once_a_launch() -> None:
    """The interpreter puts its own functions in the place of Triton's at a launch, and again wherever a function calls
    another, which takes a third of its time; here not again for one that sees the same modules."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an earlier version's, which undoes it by other means
        return
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[int] = set()

    @functools.cache
    def seen(function: Any) -> set[int]:
        return {id(value) for value in function.__globals__.values() if value is language or value is language.core}

    def once(function: Any) -> Any:
        if seen(function) <= replaced:
            return interpreter._LangPatchScope()
        outermost, scope = not replaced, replace(function)
        replaced.update(seen(function))
        undo = scope.restore
        if outermost:
            scope.restore = lambda: (replaced.clear(), undo())
        return scope

    interpreter._patch_lang = once


def leave_out_what_nobody_sees() -> None:
    """Of each sum and product of integers the interpreter computes whether it overflowed, and then asserts nothing, as
    kernels assert only where they are debugged."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def describe_once() -> None:
    """What follows from a type is the same for all tensors of it: the interpreter finds it anew for each."""
    from triton.language import core
    from triton.runtime import interpreter

    def of_block(element_ty: Any, shape: Any) -> tuple[Any, ...]:
        return element_ty.name, *(getattr(size, "value", size) for size in shape)

    share(core.block_type, of_block)
    share(core.tensor, lambda handle, type: type.name, "handle", "type")
    numpy_type, found = interpreter._get_np_dtype, {}

    def of_scalar(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = numpy_type(kind)
        return found[name]

    interpreter._get_np_dtype = of_scalar


def pass_what_needs_nothing() -> None:
    """Values that are nobody's wrapper, and operands of one shape, are what they are without a search for it."""
    from triton.language import core, semantic

    unwrap, broadcast = core._unwrap_if_constexpr, semantic.TritonSemantic.broadcast_impl_value
    several = list, tuple, core.tuple

    def unwrapped(value: Any) -> Any:
        if type(value) is core.constexpr:
            return value.value
        return unwrap(value) if isinstance(value, several) else value

    def together(self: Any, a: Any, b: Any) -> Any:
        same = a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values
        return (a, b) if same else broadcast(self, a, b)

    core._unwrap_if_constexpr = unwrapped
    semantic.TritonSemantic.broadcast_impl_value = together


def share(of: type, key: Callable[..., Any], *own: str) -> None:
    """Objects of a class whose arguments have one key share their attributes, but for the arguments named `own`."""
    build: Callable[..., None] = of.__init__  # type: ignore[misc]
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        name = key(*args)
        if name not in known:
            build(self, *args)
            known[name] = {k: v for k, v in vars(self).items() if k not in own}
        else:
            attributes = known[name].copy()
            attributes.update(zip(own, args, strict=False))
            self.__dict__ = attributes

    of.__init__ = init  # type: ignore[misc]


replace_the_language_once_a_launch()
leave_out_what_nobody_sees()
describe_once()
pass_what_needs_nothing()
