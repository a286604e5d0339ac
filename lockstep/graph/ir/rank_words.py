"""Which floats of a graph were added across ranks: by a collective that adds, or after they were gathered.

Words of several ranks that lie along a dimension may be laid out, chosen from, and summed over by our own operators,
which read them as the whole that one rank has. Added to one another by anything else they are a sum that was cut where
the number of ranks says. What is not known to keep them apart counts as a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..torch_private import trace as torch_trace
from ..torch_private.collectives import GATHER, GATHER_MANY, WAIT
from .captured import Captured, op_name, origins, written
from .values import TensorValue, tensors_in

_COLLECTIVES = "_c10d_functional."
REDUCES = frozenset(
    _COLLECTIVES + name
    for name in (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    )
)
_SAME = {"aten.detach", "aten.alias", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.constant_pad_nd", WAIT}
_VIEWS = {"aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.expand"}
_TURNS = {"aten.t", "aten.transpose", "aten.permute"}
_TAKES = {"aten.select", "aten.slice", "aten.index_select"}
_SPLITS = {"aten.unbind", "aten.split", "aten.split_with_sizes", "aten.chunk"}
_JOINS = {"aten.cat", "aten.stack"}
_LAID_OUT = _SAME | _VIEWS | _TURNS | _TAKES | _SPLITS | _JOINS | {GATHER, GATHER_MANY, "getitem"}
_FILLED = {f"aten.{name}_like" for name in ("zeros", "ones", "empty", "full")} | {"aten.new_zeros", "aten.new_empty"}
_ADDS = {"add", "sub", "rsub", "addcmul", "addcdiv", "lerp", "logaddexp", "logaddexp2", "hypot"}  # element by element
_SUMS = {"sum", "nansum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "_softmax", "_log_softmax"}
_CHOOSES = {"amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "sort", "topk"}
_COPIES = {"copy", "fill", "zero", "index_copy", "where", "masked_fill"}

Part = tuple[str, Hashable]


class _Words(NamedTuple):
    """Words of several ranks in a tensor.

    Attributes:
        dims: of each dimension, the groups whose ranks' words may lie along it.
        parts: a group and a part of it, where it has words of that part alone; or of all in another order.
    """

    dims: tuple[frozenset[str], ...]
    parts: frozenset[Part] = frozenset()

    @property
    def groups(self) -> frozenset[str]:
        return frozenset().union(*self.dims, {group for group, _ in self.parts})


class RankWords:
    """The words of several ranks in each result of a graph, node by node."""

    def __init__(self, captured: Captured) -> None:
        self._captured, self._lies_in = captured, origins(captured.graph)
        self._words: dict[fx.Node, _Words] = {}
        self._computed: set[fx.Node] = set()  # the others are inputs and constants, or are laid out from such
        self._memory: dict[fx.Node, frozenset[str]] = {}  # of what was written into an allocation

    def adds(self, node: fx.Node) -> bool:
        """Follow the next node; whether it adds floats of several ranks."""
        if node.op != "call_function":
            return False
        name = op_name(node)
        if name not in _FILLED and any(map(self._is_computed, node.all_input_nodes)):
            self._computed.add(node)
        elif name not in _LAID_OUT and node.all_input_nodes and name not in _FILLED:
            self._computed.add(node)
        found, adds = self._followed(node, name)
        if found is not None and found.groups:
            self._words[node] = found
        for origin in (o for argument in written(node) for o in self._lies_in[argument]):
            groups = frozenset().union(*(w.groups for n in node.all_input_nodes if (w := self._of(n))))
            self._memory[origin] = self._memory.get(origin, frozenset()) | groups
            self._computed.add(origin)
        return adds and self._is_float(node)

    def _followed(self, node: fx.Node, name: str) -> tuple[_Words | None, bool]:
        """What a call's result has, and whether it adds words of several ranks."""
        if name in REDUCES:
            return None, True
        if name.startswith(_COLLECTIVES) and name != WAIT:
            return self._communicated(node, name), False
        given = [n for n in node.all_input_nodes if self._of(n)]
        if node.target is operator.getitem:
            return self._item(node), False
        if not given or name in _SPLITS:  # of these each item is looked at
            return None, False
        first, old, new = self._of(given[0]), self._shape(given[0]), self._shape(node)
        assert first is not None
        if name in _SAME:
            return first, False
        if name in _VIEWS:
            return _Words(_reshaped(first.dims, old, new), first.parts), False
        if name in _TURNS:
            return _Words(tuple(first.dims[i] for i in _turned(node, len(old))), first.parts), False
        if name in _TAKES:
            return self._taken(node, name, first), False
        if name in _JOINS:
            return self._joined(node, name), False
        kind = name.removeprefix("aten.").rstrip("_")
        if kind in _SUMS | _CHOOSES:
            over = _reduced(node, len(old))
            dims = [d for i, d in enumerate(first.dims) if i not in over]
            kept = first.dims if len(old) == len(new) else tuple(dims)
            return _Words(kept, first.parts), kind in _SUMS and any(first.dims[i] for i in over)
        if not name.startswith("aten."):
            return self._own(node, given, new), self._mixes(node)
        if kind in _ADDS or kind in _COPIES or torch_trace.is_pointwise(node.target):
            return self._aligned(given, len(new)), kind in _ADDS and (self._mixes(node) or self._broadcasts(node))
        return self._spread(given, len(new), node), True

    def _communicated(self, node: fx.Node, name: str) -> _Words | None:
        """What comes from other ranks; weights and other inputs, which nothing computed, are no part of a sum."""
        group, sources = str(node.args[-1]), node.all_input_nodes
        if name == GATHER_MANY or not any(map(self._is_computed, sources)):
            return None
        own = self._of(sources[0]) or _Words((frozenset(),) * len(self._shape(sources[0])))
        dims = (own.dims[0] | {group}, *own.dims[1:]) if own.dims else ()
        return _Words(dims, own.parts if name == GATHER else own.parts | {(group, node.name)})

    def _item(self, node: fx.Node) -> _Words | None:
        source, number = node.args
        assert isinstance(source, fx.Node)
        name = op_name(source)
        if name == GATHER_MANY:
            (shards, _, group), new = source.args, self._shape(node)
            if not self._is_computed(shards[number]):
                return None
            own = self._of(shards[number]) or _Words((frozenset(),) * len(new))
            return _Words((own.dims[0] | {str(group)}, *own.dims[1:]), own.parts)
        given = [n for n in source.all_input_nodes if self._of(n)]
        if not given:
            return None
        if name in _SPLITS:
            whole = self._of(given[0])
            assert whole is not None
            return _part(whole, _dimension(source, 0 if name == "aten.unbind" else 1, whole), number, name == "aten.unbind")
        return self._own(source, given, self._shape(node))

    def _taken(self, node: fx.Node, name: str, whole: _Words) -> _Words:
        """A part of what lies along a dimension. A rank's own part, chosen by its place, is no other rank's."""
        dim = node.args[1] if len(node.args) > 1 else 0
        assert isinstance(dim, int)
        index = node.args[2:4]
        if name == "aten.index_select" and isinstance(index[0], fx.Node):
            groups = whole.dims[dim]
            if index[0].op == "placeholder":
                kept = tuple(d - groups for d in whole.dims)
                return _Words(kept, frozenset(p for p in whole.parts if p[0] not in groups))
            index = (index[0].name,)
        if name == "aten.slice" and self._shape(node) == self._shape(node.all_input_nodes[0]):
            return whole
        key = index[0] if name == "aten.select" else tuple(str(i) for i in index)
        return _part(whole, dim % len(whole.dims), key, name == "aten.select")

    def _joined(self, node: fx.Node, name: str) -> _Words:
        """Parts in their order are the whole again."""
        pieces, new = node.args[0], self._shape(node)
        dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(new)  # type: ignore[operator]
        found = [self._of(piece) or _Words((frozenset(),) * len(self._shape(piece))) for piece in pieces]  # type: ignore
        if name == "aten.stack":
            found = [_Words((*w.dims[:dim], frozenset(), *w.dims[dim:]), w.parts) for w in found]
        common = frozenset.intersection(*(w.parts for w in found))
        others = [sorted(w.parts - common, key=str) for w in found]
        dims = [frozenset().union(*(w.dims[i] for w in found)) for i in range(len(new))]
        dims[dim] |= {group for parts in others for group, _ in parts}
        in_order = others == sorted(others, key=str)
        again = () if in_order else ((group, str(others)) for parts in others for group, _ in parts)
        return _Words(tuple(dims), common | frozenset(again))

    def _own(self, node: fx.Node, given: Sequence[fx.Node], new: Sequence[Any]) -> _Words | None:
        """Of an operator of ours, or of a user's: it sums over whole rows, and keeps them apart."""
        rows = next((n for n in node.all_input_nodes if self._is_float(n)), given[0])
        parts = frozenset().union(*(w.parts for n in given if (w := self._of(n))))
        along, old = self._of(rows), self._shape(rows)
        kept = along.dims[0] if along and old and new and old[0] == new[0] else frozenset()
        return _Words((kept, *[frozenset[str]()] * (len(new) - 1)) if new else (), parts)

    def _aligned(self, given: Sequence[fx.Node], count: int) -> _Words:
        """Element by element, with dimensions counted from the last."""
        found = [w for n in given if (w := self._of(n))]
        padded = [((frozenset(),) * (count - len(w.dims)) + w.dims)[-count:] if count else () for w in found]
        dims = tuple(frozenset().union(*(d[i] for d in padded)) for i in range(count))
        return _Words(dims, frozenset().union(*(w.parts for w in found)))

    def _spread(self, given: Sequence[fx.Node], count: int, node: fx.Node) -> _Words:
        """Of a call that nothing is known of."""
        groups = frozenset().union(*(w.groups for n in given if (w := self._of(n))))
        return _Words((groups,) * count, frozenset((group, node.name) for group in groups))

    def _mixes(self, node: fx.Node) -> bool:
        """Whether computed operands are of different parts."""
        parts = [w.parts if (w := self._of(n)) else frozenset() for n in self._operands(node)]
        return any(found != parts[0] for found in parts)

    def _broadcasts(self, node: fx.Node) -> bool:
        """Whether an operand of one element meets words of several ranks along a dimension."""
        shapes = [self._shape(n) for n in self._operands(node)]
        for n in self._operands(node):
            dims = w.dims if (w := self._of(n)) else ()
            tagged = [len(dims) - i for i, groups in enumerate(dims) if groups and self._shape(n)[i] != 1]
            if any(len(s) < back or s[-back] == 1 for back in tagged for s in shapes if s):
                return True
        return False

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self._is_computed(n) and self._is_float(n)]

    def _of(self, node: Any) -> _Words | None:
        if not isinstance(node, fx.Node):
            return None
        found, shape = self._words.get(node), self._shape(node)
        stored = frozenset().union(*(self._memory.get(o, ()) for o in self._lies_in[node]))
        if not stored:
            return found
        dims = found.dims if found else (frozenset(),) * len(shape)
        return _Words(tuple(d | stored for d in dims), found.parts if found else frozenset())

    def _is_computed(self, node: fx.Node) -> bool:
        return node in self._computed or not self._computed.isdisjoint(self._lies_in[node])

    def _is_float(self, node: fx.Node) -> bool:
        return any(t.dtype.is_floating_point for t in tensors_in(self._captured.value(node)))

    def _shape(self, node: fx.Node) -> tuple[int | str, ...]:
        value = self._captured.value(node)
        return value.shape if isinstance(value, TensorValue) else ()
