"""Serializes captured graphs, so that what one process captured, others run without tracing.

A graph is JSON, one line per node: operators by name, arguments, tags, and what each node computes. Loading this runs
no code; names are looked up in torch's registry and in a short list of Python functions. Compiled regions are stored
beside it as bytes, and loading one does run code. The `ir.text.digest` of a loaded graph is checked. A graph is not
tied to a device: `loads` takes one.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from ..ir.captured import STORED, Captured, GraphError, InputSpec
from ..ir.sizes import Sizes
from ..ir.text import digest
from ..ir.values import TensorValue, Value
from ..torch_private import trace as torch_trace
from .framed_file import Damaged, pack, unpack

_HOME = "home"  # stands for the graph's device
_DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
_CONSTANTS = {str(c): c for c in (torch.strided, torch.contiguous_format, torch.preserve_format)}
_FUNCTIONS: dict[str, Callable[..., Any]] = {  # what a trace calls besides operators, on numbers and tuples
    **{
        f"operator.{name}": getattr(operator, name)
        for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "lshift", "rshift")
        + ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_")
    },
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_int", "sym_float", "sym_not", "sym_ite", "sym_sum")
    },
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_ARGUMENTS: dict[str, Callable[[str], Any]] = {  # parsers of text, by kind
    "float": float,  # NaN and infinities, which JSON lacks
    "text": str,
    "dtype": _DTYPES.__getitem__,
    "constant": _CONSTANTS.__getitem__,
}


class Unstorable(GraphError):
    """The graph holds something that cannot be serialized."""


_REGIONS: dict[str, Callable[[bytes], Callable[..., Any]]] = {}


def register_region(kind: str, deserialize: Callable[[bytes], Callable[..., Any]]) -> None:
    """Let `dumps` serialize regions of a kind, and `loads` restore them, which may run code.

    A region is a compiled stretch of a graph, the target of `call_function` nodes. It has the attributes `kind` and
    `__name__` (by which `torch.fx` names its nodes), and `serialize() -> bytes`, which is equal for equal regions.
    `deserialize` is called once per region, however many nodes call it.
    """
    _REGIONS[kind] = deserialize


def dumps(captured: Captured) -> bytes:
    """Serialize the graph in its current form, without `before`. `Unstorable`: names the node, and what of it cannot be
    serialized."""
    return pack(_Writer(captured).sections())


def loads(data: bytes, device: torch.device | None = None) -> Captured:
    """The graph that `dumps` was given, to be run, recorded, verified and compared as if it had just been captured. If
    it has compiled regions, load only bytes that this user's own process wrote: see `register_region`.

    Args:
        device: the device of its tensors; None: the one that it was stored with.

    Raises:
        Damaged: the bytes are truncated, changed, of another format, or name something that this process lacks.
    """
    sections = unpack(data)
    try:
        reader = _Reader(sections)
        captured = reader.captured()
        return captured if device is None or str(device) == reader.stored_on else reader.moved(device)
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(f"a stored graph cannot be read ({type(error).__name__}: {error})") from error


class _Writer:
    """Turns one graph into sections: its JSON, and each region once."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._home = captured.inputs[0].device if captured.inputs else torch.device("cpu")
        self._regions: dict[int, tuple[str, bytes]] = {}  # by identity
        self._tables: dict[str, dict[str, int]] = {"values": {}, "tags": {}}

    def sections(self) -> dict[str, bytes]:
        c = self._captured
        nodes = [self._node(node) for node in c.graph.nodes]
        graph = {
            "name": c.name,
            "statics": {name: self._argument(value) for name, value in c.statics.items()},
            "device": str(self._home),
            "inputs": [self._input(spec) for spec in c.inputs],
            "outputs": list(c.outputs),
            "writes": sorted(c.writes),
            "recorded": c.recorded,
            "split_at": sorted(c.split_at),
            "sizes": list(c.sizes.names),
            "conditions": [list(condition) for condition in c.sizes.conditions],
            "log": list(c.log),
            "digest": digest(c),
            **{name: [json.loads(text) for text in table] for name, table in self._tables.items()},
            "nodes": nodes,
        }
        return {"graph": _lines(graph).encode(), **dict(self._regions.values())}

    def _node(self, node: fx.Node) -> list[Any]:
        try:
            args = [self._argument(a) for a in node.args]
            kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
            tags = self._number("tags", {k: v for k, v in torch_trace.tags(node).items() if isinstance(v, str)})
            value = self._number("values", self._value(self._captured.value(node)))
            return [node.name, self._target(node), args, kwargs, value, tags]
        except Unstorable as error:
            raise Unstorable(f"{self._captured.title}: node {node.name}: {error}") from error

    def _target(self, node: fx.Node) -> str:
        if node.op in ("placeholder", "output"):
            return node.op
        target: Any = node.target
        if node.op == "call_function":
            if torch_trace.is_operator(target):
                return str(target)
            if target in _NAMES:
                return _NAMES[target]
            if getattr(target, "kind", None) in _REGIONS:
                return self._region(target)
        raise Unstorable(f"{node.op} of {target} has no stored form")

    def _region(self, region: Any) -> str:
        if id(region) not in self._regions:
            name = f"region.{region.kind}.{len(self._regions)}"
            self._regions[id(region)] = name, region.serialize()
        return self._regions[id(region)][0]

    def _argument(self, value: Any) -> Any:
        """An argument as JSON: numbers, None and lists as themselves, a node as its name, all else as {kind: value}."""
        if isinstance(value, fx.Node):
            return value.name
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [self._argument(item) for item in value]}
        if isinstance(value, str):
            return {"text": value}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if isinstance(value, torch.device):
            return {"device": self._device(value)}
        if isinstance(value, (torch.layout, torch.memory_format)) and str(value) in _CONSTANTS:
            return {"constant": str(value)}
        raise Unstorable(f"an argument is {value!r}, a {type(value).__name__}, which has no stored form")

    def _value(self, value: Value) -> Any:
        if isinstance(value, TensorValue):
            return [str(value.dtype), list(value.shape), self._device(value.device)]
        if isinstance(value, tuple):
            return {"tuple": [self._value(item) for item in value]}
        return value

    def _input(self, spec: InputSpec) -> list[Any]:
        stride = None if spec.stride is None else list(spec.stride)
        return [spec.role, spec.name, list(spec.shape), stride, str(spec.dtype), self._device(spec.device)]

    def _device(self, device: torch.device) -> str:
        return _HOME if device == self._home else str(device)

    def _number(self, table: str, entry: Any) -> int:
        """The index of an entry in a table that holds each once."""
        known = self._tables[table]
        return known.setdefault(json.dumps(entry), len(known))


def _lines(graph: Mapping[str, Any]) -> str:
    """JSON with one list entry per line, so that files can be compared line by line."""
    text = partial(json.dumps, allow_nan=False)
    lists = {key: ",\n  ".join(map(text, value)) for key, value in graph.items() if isinstance(value, list) and value}
    values = {key: f"[\n  {lists[key]}\n ]" if key in lists else text(value) for key, value in graph.items()}
    return "{\n " + ",\n ".join(f"{text(key)}: {value}" for key, value in values.items()) + "\n}\n"


class _Reader:
    def __init__(self, sections: Mapping[str, bytes]) -> None:
        self._sections = sections
        self._raw = json.loads(sections["graph"])
        self.stored_on: str = self._raw["device"]
        self._home = torch.device(self.stored_on)
        self._targets: dict[str, Any] = dict(_FUNCTIONS)
        self._nodes: dict[str, fx.Node] = {}

    def captured(self) -> Captured:
        """The graph on the device that it was stored with, checked against its digest, which includes the device."""
        captured = self._captured()
        if digest(captured) != self._raw["digest"]:
            raise Damaged(f"{captured.title}: the graph that was loaded is not the one that was stored")
        return captured

    def moved(self, device: torch.device) -> Captured:
        self._home = device
        return self._captured()

    def _captured(self) -> Captured:
        raw = self._raw
        conditions = tuple((condition, where) for condition, where in raw["conditions"])
        return Captured(
            raw["name"],
            fx.GraphModule({}, self._graph()),
            tuple(self._input(*spec) for spec in raw["inputs"]),
            tuple(raw["outputs"]),
            {name: self._argument(value) for name, value in raw["statics"].items()},
            frozenset(raw["writes"]),
            raw["recorded"],
            frozenset(raw["split_at"]),
            Sizes(tuple(raw["sizes"]), conditions),
            tuple(raw["log"]),
        )

    def _graph(self) -> fx.Graph:
        graph = fx.Graph()
        values = [self._value(value) for value in self._raw["values"]]
        for name, target, args, kwargs, value, tags in self._raw["nodes"]:
            if not all(map(str.isidentifier, (name, *kwargs))):  # they become part of Python source
                raise Damaged(f"a stored graph has a node of the name {name!r} with {list(kwargs)}")
            arguments = tuple(self._argument(a) for a in args)
            named = {key: self._argument(a) for key, a in kwargs.items()}
            op = target if target in ("placeholder", "output") else "call_function"
            call = self._target(target) if op == "call_function" else name
            node = graph.create_node(op, call, arguments, named, name)
            node.meta[STORED] = values[value]
            for key, tag in self._raw["tags"][tags].items():
                torch_trace.set_tag(node, key, tag)
            self._nodes[name] = node
        graph.lint()
        return graph

    def _target(self, name: str) -> Any:
        if name not in self._targets:
            self._targets[name] = self._region(name) if name.startswith("region.") else torch_trace.operator_named(name)
        return self._targets[name]

    def _region(self, name: str) -> Callable[..., Any]:
        kind = name.split(".")[1]
        if kind not in _REGIONS:
            raise Damaged(f"a stored graph has a region of kind {kind!r}, which this process cannot load")
        return _REGIONS[kind](self._sections[name])

    def _argument(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._nodes[value]
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "device":
            return self._device(content)
        if kind == "tuple":
            return tuple(self._argument(item) for item in content)
        return _ARGUMENTS[kind](content)

    def _value(self, value: Any) -> Value:
        if isinstance(value, list):
            dtype, shape, device = value
            return TensorValue(_DTYPES[dtype], tuple(shape), self._device(device))
        if isinstance(value, dict):
            return tuple(self._value(item) for item in value["tuple"])
        return value if isinstance(value, str) else None

    def _input(self, role: Any, name: str, shape: list, stride: list | None, dtype: str, device: str) -> InputSpec:
        laid_out = None if stride is None else tuple(stride)
        return InputSpec(role, name, tuple(shape), laid_out, _DTYPES[dtype], self._device(device))

    def _device(self, name: str) -> torch.device:
        return self._home if name == _HOME else torch.device(name)
