"""The key of a stored graph: what it is found by, and what it must have been made with."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...cache.fingerprint import origin
from ...cache.loaded_code import PACKAGE
from ..capture.request import Request
from ..capture.step import Differentiated
from ..passes import Pass
from .baked_constants import classes
from .folder import Key

_PACKAGE = __package__.partition(".")[0]
_COVERED = _PACKAGE, "torch"


def key_of(request: Request, level: str, made_with: Mapping[str, Any], passes: Sequence[Pass]) -> Key | None:
    """The key of a graph, or None if the graph depends on code outside this package, which no hash covers. `made_with`:
    settings of the runtime and constants of the body, by name."""
    bodies = _bodies(request.body)
    code: list[Callable[..., Any]] = [*bodies, *(p.apply for p in passes), *classes(request.constants)]
    if any(isinstance(b, functools.partial) for b in bodies) or not all(map(is_covered, code)):
        return None
    specs = request.specs
    home = specs[0].device if specs else None
    graph = {
        "body": body_name(request.body),
        "statics": [[k, repr(v)] for k, v in request.statics.items()],
        "inputs": [
            [s.role, s.name, s.shape, s.stride, str(s.dtype), s.device == home or str(s.device), t.requires_grad]
            for s, (_, _, t) in zip(specs, request.inputs.flat(), strict=True)
        ],
        "on": home.type if home else "",
        "writes": sorted(request.writes),
        "level": level,
    }
    described = [[p.name, repr(dict(p.options))] for p in passes]
    return Key(request.name, graph, {**origin(), "passes": described, **made_with})


def body_name(body: Callable[..., Any]) -> str:
    """The qualified name of a graph's function, or of both functions of a `Differentiated`."""
    return " ".join(f"{b.__module__}.{b.__qualname__}" for b in map(_unbound, _bodies(body)))


def _bodies(body: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    return (body.forward, body.accumulate) if isinstance(body, Differentiated) else (body,)


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, functools.partial) else function


def is_covered(code: Callable[..., Any]) -> bool:
    """Whether `origin` covers the code of a function or class: it is found under its own name in this package or in
    torch, and so is every base class (or in the standard library)."""
    code = _unbound(code)
    parts = code.__mro__ if isinstance(code, type) else (code,)
    trusted = *_COVERED, *sys.stdlib_module_names
    return _is_importable(code, _COVERED) and all(_is_importable(part, trusted) for part in parts)


def _is_importable(code: Any, roots: Collection[str]) -> bool:
    module, name = getattr(code, "__module__", None) or "", getattr(code, "__qualname__", "<locals>")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    file, root = getattr(sys.modules.get(module), "__file__", None) or "", module.partition(".")[0]
    of_package = root != _PACKAGE or PACKAGE in Path(file).parents  # not a user's module of the same name
    same = getattr(found, "__func__", found) is getattr(code, "__func__", code)
    return root in roots and of_package and same
