"""Values that a graph's body takes from its owner and bakes into the graph, by name, for the key of a stored graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

Constants = Mapping[str, Any]  # of numbers, text, None, classes, dataclasses, and sequences and mappings of these


def flatten(constants: Constants) -> dict[str, Any]:
    """Every value under a name of its own, such as `section.field`. `TypeError`: a value of an unsupported type."""
    found: dict[str, Any] = {}
    for name, value in constants.items():
        found.update(_flat(name, value))
    return found


def classes(value: Any) -> Iterator[type]:
    """The classes whose code may be in a graph with these constants: those among the values, and the dataclasses'."""
    if isinstance(value, type) or is_dataclass(value):
        yield value if isinstance(value, type) else type(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        yield from classes(item)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        parts = {"": type(value).__name__} | {f".{f.name}": getattr(value, f.name) for f in fields(value)}
        return {k: v for part, item in parts.items() for k, v in _flat(name + part, item).items()}
    if isinstance(value, Mapping):
        return {k: v for part, item in value.items() for k, v in _flat(f"{name}.{part}", item).items()}
    return {name: _plain(name, value)}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value) if isinstance(value, float) else value  # JSON has no infinities
    raise TypeError(f"constant {name} is {value!r}; it must be a number, text, None, a class, or a dataclass of such")
