"""A captured graph as text: dumped, digested, compared."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import fx

from ..torch_private import trace as torch_trace
from .captured import Captured, GraphError, is_backward, module_of
from .values import Value

Namer = Callable[[fx.Node], str]


def dump(captured: Captured) -> str:
    """The graph as text, one line per node, under the node names, which passes preserve."""
    return "\n".join([captured.title, *_lines(captured, str)])


def diff(before: Captured, after: Captured) -> str:
    """What a pass changed, as a unified diff of the dumps; empty if nothing changed."""
    return "\n".join(difflib.unified_diff(dump(before).splitlines(), dump(after).splitlines(), lineterm="", n=1))


def write_stages(captured: Captured, folder: Path) -> None:
    """Write one file each for the graph as captured, the diff of each pass, and the final graph. `GraphError`: the
    folder cannot be written."""
    level = ("pieces" if captured.split_at else "full") if captured.recorded else "captured"
    target, stages = folder / f"{captured.name}-{level}-{digest(captured)}", captured.stages()
    texts = {"0-capture.txt": dump(stages[0][1]), "final.txt": dump(captured)}
    for i, ((_, before), (step, after)) in enumerate(pairwise(stages), 1):
        texts[f"{i}-{step}.diff"] = diff(before, after)
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (target / name).write_text(text + "\n", "utf-8")
    except OSError as error:
        raise GraphError(f"compile.dump {folder}: cannot be written ({error.strerror}); name another folder") from error


def digest(captured: Captured) -> str:
    """A hash of everything the graph computes and expects. The order of its nodes counts, their names do not."""
    numbers = {node: f"%{i}" for i, node in enumerate(captured.graph.nodes)}
    signature = (captured.title, captured.inputs, captured.outputs, sorted(captured.writes))
    text = "\n".join([repr(signature), *_lines(captured, numbers.__getitem__)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _lines(captured: Captured, name: Namer) -> list[str]:
    specs = dict(captured.placeholders())
    lines = []
    for node in captured.graph.nodes:
        tags = [tag for tag in (module_of(node), "backward" if is_backward(node) else "") if tag]
        suffix = f"  # {', '.join(tags)}" if tags else ""
        call = f"input {specs[node]}" if node in specs else call_text(node, name)
        lines.append(f"{name(node)}: {_value(captured.value(node))} = {call}{suffix}")
        lines += [f"    {line}" for line in getattr(node.target, "body", ())]  # of a compiled region
    return lines


def call_text(node: fx.Node, name: Namer) -> str:
    """A call or the output node as text, with arguments by name."""
    args = [_argument(a, name) for a in node.args]
    args += [f"{key}={_argument(value, name)}" for key, value in sorted(node.kwargs.items())]
    if node.op == "output":
        target: Any = "return"
    elif torch_trace.is_operator(node.target):
        target = node.target
    else:
        target = getattr(node.target, "__name__", node.target)
    return f"{target}({', '.join(args)})"


def _argument(value: object, name: Namer) -> str:
    if isinstance(value, fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(v, name) for v in value)}]"
    return repr(value)


def _value(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return "()" if value is None else str(value)
