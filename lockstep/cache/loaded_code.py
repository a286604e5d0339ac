"""Whether the code of this package that runs is that of its files; only then does a hash of the files describe it.

Each module of the package is recorded right after its import: its functions, classes and constants, the members of its
classes, and the entries of its tables. If one of them is a different object later, somebody has replaced it.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parent.parent
_IMPORTED_FROM = PACKAGE.resolve()  # a symlink in the path may change later
SUFFIXES = (".py", ".c", ".h", ".json")
IMPORTED_NS = time.time_ns()  # since the epoch; the package imports this before the rest
_NAME = __package__.partition(".")[0]
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")
# What wraps functions, and the attributes that hold them.
_WRAPPERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    cached_property: ("func",),
    type(cache(len)): ("__wrapped__",),
}
_PLAIN = bool, int, float, str, tuple, type(None)
_HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"


class _Attribute(NamedTuple):
    """The value that was under a key of a namespace or table; for a function, and those that a property or another
    wrapper holds, also the code and defaults. `name`: in messages."""

    name: str
    owner: Mapping[Any, Any]
    key: Any
    value: Any
    code: Any


class _ModuleRecord(NamedTuple):
    """The record of a module: its attributes, and for each class it defines the names in the class's own namespace."""

    attributes: list[_Attribute]
    classes: list[tuple[str, type, frozenset[str]]]


_records: dict[str, _ModuleRecord] = {}
# Additional checks of `find_difference`, such as of torch's operator registry.
FURTHER_CHECKS: list[Callable[[], str | None]] = []


class RecordingFinder:
    """Finds the package's modules through the other finders, and records each after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None and "exec_module" not in vars(spec.loader):
            execute = spec.loader.exec_module

            def execute_and_record(module: ModuleType) -> None:
                execute(module)
                record_module(module)

            spec.loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def record_module(module: ModuleType) -> None:
    """Record the current state of a module, for `find_difference`."""
    attributes, classes = _records[module.__name__] = _ModuleRecord([], [])
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        path, constant = f"{module.__name__}.{name}", bool(_CONSTANT.match(name))
        if _is_code(value) or constant and isinstance(value, _PLAIN):
            attributes.append(_record_attribute(path, vars(module), name))
        if constant and isinstance(value, Mapping):
            keys = [key for key, entry in value.items() if _is_code(entry) or isinstance(entry, _PLAIN)]
            attributes += [_record_attribute(f"{path}[{key!r}]", value, key) for key in keys]
        if isinstance(value, type) and value.__module__ == module.__name__:
            own = vars(value)
            classes.append((path, value, frozenset(own)))
            keys = [key for key in own if _is_code(own[key]) or _is_setting(key, own[key])]
            attributes += [_record_attribute(f"{path}.{key}", own, key) for key in keys]


def _record_attribute(name: str, owner: Mapping[Any, Any], key: Any) -> _Attribute:
    value = owner[key]
    return _Attribute(name, owner, key, value, _code(value))


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, (ModuleType, *_WRAPPERS))


def _is_own(name: str, value: Any) -> bool:
    """Whether a new attribute of a class was set by somebody, not by Python itself, which adds some later."""
    return _is_code(value) if name.startswith("__") else not name.startswith("_abc")


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, _PLAIN)


def _code(value: Any) -> Any:
    if isinstance(value, FunctionType):
        return value.__code__, value.__defaults__, dict(value.__kwdefaults__ or {})
    names = next((names for kind, names in _WRAPPERS.items() if isinstance(value, kind)), ())
    return [_code(getattr(value, name)) for name in names] or None


def files() -> list[Path]:
    """All source files of the package: Python, C, and JSON tables."""
    return sorted(Path(entry.path) for entry in _source_files(PACKAGE))


def _source_files(folder: os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    """The source files in a folder and in those below it, which links may lead to."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() and not os.path.exists(entry):  # a link to itself
                continue
            if entry.name.endswith(SUFFIXES) and entry.name[0] != "." and entry.is_file():
                yield entry
            elif entry.name != "__pycache__" and entry.is_dir():
                yield from _source_files(entry)


def _written_ns(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def find_difference() -> str | None:
    """What differs, in words, from the package as it was imported and from its files; None if nothing does. It may be a
    file written since, a replaced function, class, constant or table entry, an operator registered anew, or a global
    hook on torch modules."""
    if (now := PACKAGE.resolve()) != _IMPORTED_FROM:
        return f"{PACKAGE} is {now}, and was {_IMPORTED_FROM} when it was imported"
    written = {entry.path: _written_ns(entry.stat()) for entry in _source_files(PACKAGE)}
    if not any(path.endswith(".py") for path in written):
        return f"{PACKAGE} has no sources"
    if late := sorted(path for path, at in written.items() if at > IMPORTED_NS):
        in_future = written[late[0]] > time.time_ns()
        reason = "is of the future" if in_future else "was written after it may have been imported"
        return f"{Path(late[0]).relative_to(PACKAGE.parent)} {reason}"
    for record in list(_records.values()):
        for name, owner, key, value, code in record.attributes:
            now = owner.get(key, _records)
            if (now is not value and now != value) or (code is not None and _code(now) != code):
                return f"{name} is not what was imported"
        for name, kind, names in record.classes:
            if new := [name for name in vars(kind).keys() - names if _is_own(name, vars(kind)[name])]:
                return f"{name}.{new[0]} is not what was imported"
    for check in FURTHER_CHECKS:
        if found := check():
            return found
    torch_modules = sys.modules.get("torch.nn.modules.module")
    hooked = next((name for name in _HOOKS if getattr(torch_modules, name, None)), None)
    return hooked and f"torch.nn.modules.module.{hooked} has a hook"


sys.meta_path.insert(0, RecordingFinder())
