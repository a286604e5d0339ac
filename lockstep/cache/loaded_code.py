"""Whether what runs of this package is what stands in its files: only then does a hash of these say what was made."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import lockstep

PACKAGE = Path(__file__).parent.parent
SUFFIXES = (".py", ".c", ".h", ".json")
_NAME = __package__.partition(".")[0]
IMPORTED = {  # what names in the package's modules may be of, besides the package and Python
    *("datasets", "fastapi", "huggingface_hub", "jinja2", "math_verify", "numpy", "orjson", "prometheus_client"),
    *(
        "pyarrow",
        "pydantic",
        "pydantic_core",
        "reasoning_gym",
        "renderers",
        "rich",
        "safetensors",
        "starlette",
        "sympy",
        "tokenizers",
    ),
    *("torch", "trackio", "transformers", "triton", "tyro", "uvicorn", "verifiers", "wandb", "yaml"),
}


def files() -> list[Path]:
    """Every source file of the package: Python, C, and tables."""
    return sorted(path for path in PACKAGE.rglob("*") if path.suffix in SUFFIXES)


def difference() -> str | None:
    """What is not as it was when the package was imported, or as its files have it, in words; None where nothing is: a
    file written since, or a function or class of the package that code from outside has replaced."""
    for path in files():
        about = path.stat()
        if max(about.st_mtime_ns, about.st_ctime_ns) > lockstep.IMPORTED_NS:
            return f"{path.relative_to(PACKAGE.parent)} was written after it may have been imported"
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == _NAME]
    return next((found for module in modules for found in _replaced(module)), None)


def _replaced(module: ModuleType) -> Iterator[str]:
    for name, value in list(vars(module).items()):
        place = f"{module.__name__}.{name}"
        if (origin := _origin(value)) and not _expected(origin):
            yield f"{place} is of {origin}"
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for part, member in list(vars(value).items()):
                if (origin := _origin(member)) and not _expected(origin):
                    yield f"{place}.{part} is of {origin}"


def _origin(value: Any) -> str | None:
    """The module in which a function or a class was made, whatever it was given as its name; None for other values."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__"))
    return value.__module__ if isinstance(value, type) else None


def _expected(origin: str) -> bool:
    root = origin.partition(".")[0]
    generated = root.startswith("namedtuple_")
    return root == _NAME or root in IMPORTED or root in sys.stdlib_module_names or generated
