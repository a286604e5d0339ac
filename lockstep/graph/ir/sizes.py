"""The open (dynamic) sizes of a trace, by name, and its guards on them, as plain data that can be stored and checked
without sympy. A condition is an expression: a number, a name or `[operator, argument, ...]`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

Expression = int | bool | str | list[Any]
Condition = tuple[Expression, str]  # with the source line that required it

_INFIX: dict[str, tuple[str, Callable[..., Any]]] = {  # by sympy's or torch's class name
    "Add": ("+", lambda *terms: sum(terms)),
    "Mul": ("*", lambda *factors: math.prod(factors)),
    "Pow": ("**", operator.pow),
    "FloorDiv": ("//", operator.floordiv),
    "CleanDiv": ("//", operator.floordiv),
    "Mod": ("%", operator.mod),
    "PythonMod": ("%", operator.mod),
    "Equality": ("==", operator.eq),
    "Unequality": ("!=", operator.ne),
    "StrictLessThan": ("<", operator.lt),
    "LessThan": ("<=", operator.le),
    "StrictGreaterThan": (">", operator.gt),
    "GreaterThan": (">=", operator.ge),
    "And": ("and", lambda *terms: all(terms)),
    "Or": ("or", lambda *terms: any(terms)),
    "Not": ("not", operator.not_),
    "Max": ("max", max),
    "Min": ("min", min),
}
_OPERATORS = dict(_INFIX.values())


@dataclass(frozen=True)
class Sizes:
    """Open sizes and the conditions on them. `symbols` maps the sympy symbols in the shapes of traced tensors to the
    sizes' names; it is empty for a loaded graph."""

    names: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    symbols: Mapping[Any, str] = field(default_factory=dict, compare=False)
    _names: dict[Any, str] = field(default_factory=dict, init=False, repr=False, compare=False)  # cache of `name`

    def name(self, size: int | torch.SymInt) -> int | str:
        """A size of a traced tensor: its value, or an expression in the names of open sizes."""
        if isinstance(size, int):
            return size
        found = size.node.expr
        if found not in self._names:
            self._names[found] = self.symbols.get(found) or self.text(found)
        return self._names[found]

    def text(self, found: Any) -> str:
        """An expression in symbols as text in the names."""
        import sympy  # type: ignore[import-untyped]

        return str(found.xreplace({symbol: sympy.Symbol(name) for symbol, name in self.symbols.items()}))

    def broken_conditions(self, values: Mapping[str, int]) -> list[str]:
        return [f"{text(c)} ({where})" for c, where in self.conditions if not holds(c, values)]

    def with_conditions(self, conditions: Iterable[Condition]) -> Sizes:
        found = {repr(c): (c, where) for c, where in (*self.conditions, *conditions)}
        return replace(self, conditions=tuple(found.values()))


def rename_conditions(conditions: Iterable[Condition], meaning: Mapping[str, Any], sizes: Sizes) -> list[Condition]:
    """Conditions with their names replaced: `meaning` maps each to an expression in the symbols of `sizes`."""
    found = {name: expression(e, sizes.symbols) for name, e in meaning.items()}

    def renamed(e: Expression) -> Expression:
        if isinstance(e, list):
            return [e[0], *map(renamed, e[1:])]
        return found[e] if isinstance(e, str) else e

    return [(renamed(condition), where) for condition, where in conditions]


def expression(found: Any, symbols: Mapping[Any, str]) -> Expression:
    """A sympy expression as plain data, with symbols by name. `KeyError`: a symbol without a name, or an unsupported
    operator."""
    if found in symbols:
        return symbols[found]
    if not found.args:
        if found.is_Boolean or found.is_Integer:
            return bool(found) if found.is_Boolean else int(found)
        raise KeyError(str(found))
    return [_INFIX[type(found).__name__][0], *(expression(argument, symbols) for argument in found.args)]


def holds(condition: Expression, values: Mapping[str, int]) -> bool:
    """Whether a condition holds. One that divides by a size of 0 does not: an earlier condition on that size is then
    broken as well."""
    try:
        return bool(evaluate(condition, values))
    except ZeroDivisionError:
        return False


def evaluate(e: Expression, values: Mapping[str, int]) -> Any:
    if isinstance(e, list):
        return _OPERATORS[e[0]](*(evaluate(argument, values) for argument in e[1:]))
    return values[e] if isinstance(e, str) else e


def text(e: Expression) -> str:
    if not isinstance(e, list):
        return str(e)
    parts = [f"({text(a)})" if isinstance(a, list) else text(a) for a in e[1:]]
    if e[0] in ("max", "min"):
        return f"{e[0]}({', '.join(parts)})"
    return f"{e[0]} {parts[0]}" if len(parts) == 1 else reduce(lambda a, b: f"{a} {e[0]} {b}", parts)
