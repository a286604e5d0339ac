"""The base of a configuration's sections: fields with ranges, and checks."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

from ...errors import InputError, refuse

_T = TypeVar("_T")
MAX_SEED = 2**63 - 1


def between(low: float, high: float, *, default: _T, off: str = "") -> _T:
    """A field that takes finite numbers from `low` to `high`, or None if that is its default. `off`: the value that
    turns it off, named in errors because other libraries use a different one."""
    return field(default=default, metadata={"range": (low, high), "off": f" ({off} is off)" * bool(off)})


def at_least(low: float, *, default: _T) -> _T:
    return between(low, math.inf, default=default)


def check_range(path: str, value: object, low: float, high: float, whole: bool = False, note: str = "") -> None:
    """Raise `InputError`, ending with `note`, unless `value` is a finite number (`whole`: an integer) in the range."""
    if not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{path} is {value!r}, a {type(value).__name__}; it must be {kind}")
    finite = abs(value) <= sys.float_info.max  # `math.isfinite` raises for an integer beyond the range of floats
    if not finite or not low <= value <= high:
        bounds = f"at least {low}{'' if finite else ' and finite'}" if math.isinf(high) else f"between {low} and {high}"
        raise InputError(f"{path} is {value!r}; it must be {bounds}{note}")


def require_type(name: str, given: object, kind: type) -> None:
    """Raise `InputError` naming the argument or field unless it is of this type."""
    refuse(type(given) is not kind, f"{name} is of type {type(given).__name__}; give a {kind.__name__}")


def given_or_default(name: str, given: _T | None, kind: type[_T]) -> _T:
    """The value of the argument `name`, by default a section with default settings. Raises as `require_type`."""
    section = kind() if given is None else given
    require_type(name, section, kind)
    return section


class Section:
    """A frozen dataclass of related settings; `RunConfig` checks settings of different sections against each other.

    Attributes:
        tables: for some fields, the table whose names they take, including entries that users added.
    """

    tables: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def path(self, name: str) -> str:
        """The field's name in messages and config.yaml, such as `sampling.top_p`."""
        return f"{type(self).__name__.removesuffix('Config').lower()}.{name}"

    def validate(self) -> None:
        """Raise `InputError` naming the first invalid field."""
        for item in fields(self):  # type: ignore[arg-type] # every section is a dataclass
            value = getattr(self, item.name)
            if "range" in item.metadata and not (value is item.default is None):
                (low, high), off = item.metadata["range"], item.metadata["off"]
                check_range(self.path(item.name), value, low, high, type(item.default) is int, off)
        for name, why in self.ineffective_fields():
            is_set = getattr(self, name) != getattr(type(self)(), name)
            refuse(is_set, f"{self.path(name)} has no effect {why}")
        self.check()

    def check(self) -> None:
        """Raise `InputError` for values that contradict each other."""

    def ineffective_fields(self) -> Iterator[tuple[str, str]]:
        """(field, why) of each setting that nothing reads because of other settings; any value but its default is an
        error. The reason continues the sentence "FIELD has no effect"."""
        yield from ()

    def ineffective_if_given(self) -> Iterator[tuple[str, str]]:
        """As `ineffective_fields`, and settings that recipes may set, an error only if the user gives them."""
        yield from self.ineffective_fields()
