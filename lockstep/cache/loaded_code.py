"""Whether what runs of this package is what stands in its files: only then does a hash of these say what was made.

Each module of the package is noted as it is when it has been imported: its functions, classes and constants, what its
classes have of these, and what its tables hold. What is another object later, somebody has replaced.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

PACKAGE = Path(__file__).parent.parent
SUFFIXES = (".py", ".c", ".h", ".json")
IMPORTED_NS = time.time_ns()  # since the epoch; the package imports this before the rest
_NAME = __package__.partition(".")[0]
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")
_PLAIN = bool, int, float, str, tuple, type(None)
_HOOKS = "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"

_noted: dict[str, tuple[ModuleType, dict[str, Any]]] = {}


class NotingFinder:
    """Finds the package's modules as the other finders do, and notes each once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder for finder in sys.meta_path if finder is not self) if name.startswith(f"{_NAME}.") else ()
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def noting(module: ModuleType) -> None:
                execute(module)
                note(module)

            spec.loader.exec_module = noting  # type: ignore[method-assign]
        return spec


def note(module: ModuleType) -> None:
    """From here on a module of the package is to stay as it is."""
    _noted[module.__name__] = module, dict(_parts(module))


def files() -> list[Path]:
    """Every source file of the package: Python, C, and tables."""
    found = (path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES and not path.name.startswith("."))
    return sorted(path for path in found if path.is_file())


def difference() -> str | None:
    """What is not as it was when the package was imported, or as its files have it, in words; None where nothing is: a
    file written since, a function, a class, a constant or an entry of a table that somebody has replaced, or a hook on
    every module of torch's."""
    paths = files()
    if not any(path.suffix == ".py" for path in paths):
        return f"{PACKAGE} has no sources"
    for path in paths:
        about = path.stat()
        if (written := max(about.st_mtime_ns, about.st_ctime_ns)) > IMPORTED_NS:
            late = "was written after it may have been imported"
            return f"{path.relative_to(PACKAGE.parent)} {'is of the future' if written > time.time_ns() else late}"
    for name, (module, before) in list(_noted.items()):
        now = dict(_parts(module))
        for part, value in before.items():
            if now.get(part, _noted) is not value and now.get(part, _noted) != value:
                return f"{name}.{part} is not what was imported"
    torch_modules = sys.modules.get("torch.nn.modules.module")
    hooked = next((name for name in _HOOKS if getattr(torch_modules, name, None)), None)
    return hooked and f"torch.nn.modules.module.{hooked} has a hook"


def _parts(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What to compare of a module, by name; of functions their code too."""
    for name, value in list(vars(module).items()):
        if name.startswith("__"):
            continue
        if isinstance(value, Mapping) and _CONSTANT.match(name):
            for key, entry in value.items():
                yield from _part(f"{name}[{key!r}]", entry, constant=True)
        else:
            yield from _part(name, value, constant=bool(_CONSTANT.match(name)))
        if isinstance(value, type) and value.__module__ == module.__name__:
            members: list[tuple[str, Any]] = []
            for part, member in list(vars(value).items()):
                if not part.startswith("_abc") and part not in ("__doc__", "__dict__", "__weakref__"):
                    members += _part(f"{name}.{part}", member, constant=not part.startswith("_"))
            yield from members
            yield f"{name}'s members", sorted(part for part, _ in members)  # one may come over an inherited one


def _part(name: str, value: Any, constant: bool) -> Iterator[tuple[str, Any]]:
    is_code = callable(value) or isinstance(value, (ModuleType, property, staticmethod, classmethod))
    if is_code or constant and isinstance(value, _PLAIN):
        yield name, value
    if isinstance(value, FunctionType):
        yield f"{name}'s code", (value.__code__, value.__defaults__)


sys.meta_path.insert(0, NotingFinder())
