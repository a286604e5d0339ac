"""Calls in code that no test here runs: whether what they name is there, and takes what it is given."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def wrong_calls(path: Path, module: ModuleType, ours: tuple[str, ...]) -> list[str]:
    """Names that a module of `ours` does not have, and calls of functions of `ours` that their signatures refuse.

    What is looked at is called by a name that the file imports or defines and never assigns: `f(...)`, `module.f(...)`.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assigned |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    found, imported = [], {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(ours):
            source = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(source, name.name) and not importlib.util.find_spec(f"{node.module}.{name.name}"):
                    found.append(f"{path.name}:{node.lineno}: {node.module} has no {name.name}")
                imported[name.asname or name.name] = getattr(source, name.name, None)
    known = {name: value for name, value in (imported | vars(module)).items() if name not in assigned}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(of := _value(node.value, known), ModuleType):
            if of.__name__.startswith(ours) and not hasattr(of, node.attr):
                found.append(f"{path.name}:{node.lineno}: {of.__name__} has no {node.attr}")
        elif isinstance(node, ast.Call):
            called = _value(node.func, known)
            if str(getattr(called, "__module__", "")).startswith(ours):
                found += [
                    f"{path.name}:{node.lineno}: {ast.unparse(node.func)}: {why}" for why in _refused(node, called)
                ]
    return found


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """What a name stands for, or a name of a module or a class."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    of = _value(node.value, known) if isinstance(node, ast.Attribute) else None
    return getattr(of, node.attr, None) if isinstance(of, ModuleType | type) else None


def _refused(call: ast.Call, called: Any) -> Iterator[str]:
    """Why the signature does not take these arguments; starred ones may be any."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a kernel's
        return
    words = [word.arg for word in call.keywords if word.arg]
    places = [place for place in call.args if not isinstance(place, ast.Starred)]
    whole = len(words) == len(call.keywords) and len(places) == len(call.args)
    try:
        (signature.bind if whole else signature.bind_partial)(*places, **dict.fromkeys(words))
    except TypeError as error:
        yield str(error)
