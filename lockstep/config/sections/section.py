"""What every section of a configuration is made of: fields that say their ranges, and checks."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

from ...errors import InputError, refuse

_T = TypeVar("_T")
MAX_SEED = 2**63 - 1


def between(low: float, high: float, *, default: _T, off: str = "") -> _T:
    """A field that takes finite numbers from `low` to `high`, or None where that is the default. `off`: which of them
    turns it off, where other libraries write another."""
    return field(default=default, metadata={"range": (low, high), "off": f" ({off} is off)" * bool(off)})


def at_least(low: float, *, default: _T) -> _T:
    return between(low, math.inf, default=default)


def check_range(path: str, value: object, low: float, high: float, whole: bool = False, more: str = "") -> None:
    """Raise `InputError` when `value` is no finite number from `low` to `high`, or no whole one; with `more` words."""
    if not isinstance(value, int if whole else (int, float)):
        kind = "a whole number" if whole else "a number"
        raise InputError(f"{path} is {value!r}, a {type(value).__name__}; it must be {kind}")
    finite = abs(value) <= sys.float_info.max  # `math.isfinite` raises for a whole number that no float holds
    if not finite or not low <= value <= high:
        bounds = f"at least {low}{'' if finite else ' and finite'}" if math.isinf(high) else f"between {low} and {high}"
        raise InputError(f"{path} is {value!r}; it must be {bounds}{more}")


def require_kind(name: str, given: object, kind: type) -> None:
    """Raise `InputError` naming the argument or field that is of another type."""
    refuse(type(given) is not kind, f"{name} is of type {type(given).__name__}; give a {kind.__name__}")


def given_or_default(name: str, given: _T | None, kind: type[_T]) -> _T:
    """The argument `name`, by default the section without settings. Raises as `require_kind`."""
    section = kind() if given is None else given
    require_kind(name, section, kind)
    return section


class Section:
    """A frozen dataclass of settings that go together; what sections need of each other is checked by `RunConfig`.

    Attributes:
        tables: by field, what its names are those of: entries of one's own are among them.
    """

    tables: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def path(self, name: str) -> str:
        """The field `name` as messages and config.yaml have it: `sampling.top_p`."""
        return f"{type(self).__name__.removesuffix('Config').lower()}.{name}"

    def validate(self) -> None:
        """Raise `InputError` naming the first field that is not usable."""
        for item in fields(self):  # type: ignore[arg-type] # every section is a dataclass
            value = getattr(self, item.name)
            if "range" in item.metadata and not (value is item.default is None):
                (low, high), off = item.metadata["range"], item.metadata["off"]
                check_range(self.path(item.name), value, low, high, type(item.default) is int, off)
        for name, why in self.without_effect():
            refuse(getattr(self, name) != getattr(type(self)(), name), f"{self.path(name)} has no effect {why}")
        self.check()

    def check(self) -> None:
        """Raise `InputError` for values that do not go together."""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """(field, why) of each setting that nothing reads, because of what others are set to; it is refused at any
        value but its default. Why goes on after "FIELD has no effect"."""
        yield from ()

    def unread(self) -> Iterator[tuple[str, str]]:
        """As `without_effect`, and settings that a recipe may have left behind: refused where someone gives them."""
        yield from self.without_effect()
