"""Finds floats that a graph sums across ranks: in a reducing collective, or after they were gathered.

Elements of several ranks that lie side by side along a dimension may be rearranged, indexed, and reduced by our own
operators, which see the same tensor that a single rank would have. If anything else adds them up, or might, the result
counts as a sum across ranks: its order depends on the number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ..torch_private.collectives import GATHER, GATHER_MANY, WAIT
from .captured import Captured, Origins, op_name, written_memory
from .values import TensorValue, tensors_in

COLLECTIVES = "_c10d_functional."
PUSH = "lockstep.push_columns"  # all-gathers columns, or sends each row, with all its columns, to its owner
# Operators whose second result is a push of the first, and where in their arguments the number of ranks is.
PUSHED = {"lockstep.push_linear_add": 3, "lockstep.push_gate_up": 2, "lockstep.push_attention_decode": 13}
PUSHED_NORM = "lockstep.push_linear_add_norm"  # whose second result is a norm of what is pushed
_REDUCES = frozenset(
    COLLECTIVES + name
    for name in (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    )
)
_SAME = {"aten.detach", "aten.alias", "aten.clone", "aten._to_copy", "aten.contiguous", "aten.constant_pad_nd", WAIT}
_VIEWS = {"aten.view", "aten._unsafe_view", "aten.reshape", "aten.unsqueeze", "aten.squeeze", "aten.expand"}
_TRANSPOSES = {"aten.t", "aten.transpose", "aten.permute"}
_INDEXES = {"aten.select", "aten.slice", "aten.index_select"}
_SPLITS = {"aten.unbind", "aten.split", "aten.split_with_sizes", "aten.chunk"}
_CONCATENATES = {"aten.cat", "aten.stack"}
_REARRANGES = _SAME | _VIEWS | _TRANSPOSES | _INDEXES | _SPLITS | _CONCATENATES | {GATHER, GATHER_MANY, "getitem"}
_FILLED = {f"aten.{name}_like" for name in ("zeros", "ones", "empty", "full")} | {"aten.new_zeros", "aten.new_empty"}
_ADDS = {"add", "sub", "rsub", "addcmul", "addcdiv", "lerp", "logaddexp", "logaddexp2", "hypot"}  # elementwise
_SUMS = {"sum", "nansum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "logcumsumexp", "_softmax", "_log_softmax"}
_SELECTS = {"amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "sort", "topk"}
_MOVES = {"index", "gather", "flip", "roll", "repeat", "repeat_interleave", "diagonal", "embedding"}  # any place
_COPIES = {"copy", "fill", "zero", "index_copy", "where", "masked_fill"}

Part = tuple[str, Hashable]


class _Along(NamedTuple):
    """Elements of a group's ranks lie along a dimension; if `by_rank`, as one block per rank, in order of the ranks."""

    group: str
    by_rank: bool = False


Dims = tuple[frozenset[_Along], ...]


class _Layout(NamedTuple):
    """Where a tensor holds elements of several ranks.

    Attributes:
        dims: for each dimension, the groups whose elements lie along it.
        parts: (group, key) where the tensor holds only one part of the group's elements, or all of them reordered.
    """

    dims: Dims
    parts: frozenset[Part] = frozenset()

    @property
    def groups(self) -> frozenset[str]:
        along = {along.group for dim in self.dims for along in dim}
        return frozenset(along | {group for group, _ in self.parts})


def communicates(node: fx.Node) -> bool:
    """Whether a call brings elements from other ranks."""
    return op_name(node).startswith(COLLECTIVES) or op_name(node) in {PUSH, PUSHED_NORM, *PUSHED}


class CrossRankSums:
    """Tracks, node by node, where each result of a graph holds elements of several ranks."""

    def __init__(self, captured: Captured, origins_of: Origins) -> None:
        """`origins_of`: the graph's `origins`."""
        self._captured, self._origins_of = captured, origins_of
        self._layouts: dict[fx.Node, _Layout] = {}
        self._computed: set[fx.Node] = set()  # all others are inputs and constants, or rearrangements of these
        self._memory: dict[fx.Node, frozenset[str]] = {}  # by allocation: groups whose elements were written into it
        self._ranks: dict[str, int] = {}  # number of ranks, by group

    def sums_across_ranks(self, node: fx.Node) -> bool:
        """Process the next node of the graph. Returns whether it sums floats across ranks."""
        if node.op != "call_function" or not tensors_in(self._captured.value(node)):
            return False  # sizes do not count
        name = op_name(node)
        read = node.all_input_nodes[: 1 if name in _INDEXES else None]
        if name not in _FILLED and (any(map(self._is_computed, read)) or (read and name not in _REARRANGES)):
            self._computed.add(node)
        found, adds = self._propagate(node, name)
        if found is not None and found.groups:
            self._layouts[node] = found
        for origin in written_memory(node, self._origins_of):
            groups = frozenset().union(*(layout.groups for layout in self._layouts_of(node.all_input_nodes)))
            self._memory[origin] = self._memory.get(origin, frozenset()) | groups
            self._computed.add(origin)
        return adds and self._is_float(node)

    def _propagate(self, node: fx.Node, name: str) -> tuple[_Layout | None, bool]:
        """The elements in a call's result, and whether the call sums elements across ranks."""
        if name in _REDUCES:
            return None, True
        if name in PUSHED or name == PUSHED_NORM:  # its results are handled item by item
            return None, self._mixes(node)
        if communicates(node) and name != WAIT:
            return self._received(node, name), False
        given = [n for n in node.all_input_nodes if self._layout_of(n)]
        if node.target is operator.getitem:
            return self._item(node), False
        if not given or name in _FILLED | _SPLITS:  # the outputs of a split are handled item by item
            return None, False
        first, old, new = self._layout_of(given[0]), self._shape(given[0]), self._shape(node)
        assert first is not None
        if name in _SAME:
            return first, False
        if name in _VIEWS:
            return _Layout(_reshaped(first.dims, old, new, self._ranks), first.parts), False
        if name in _TRANSPOSES:
            return _Layout(tuple(first.dims[i] for i in _transposed_dims(node, len(old))), first.parts), False
        if name in _INDEXES:
            return self._indexed(node, name, first), False
        if name in _CONCATENATES:
            return self._concatenated(node, name), False
        kind = name.removeprefix("aten.").rstrip("_")
        if kind in _SUMS | _SELECTS:
            over = _reduced_dims(node, len(old))
            dims = [d for i, d in enumerate(first.dims) if i not in over]
            kept = first.dims if len(old) == len(new) else tuple(dims)
            return _Layout(kept, first.parts), kind in _SUMS and any(first.dims[i] for i in over)
        if not name.startswith("aten."):
            return self._custom_operator(node, given, new), self._mixes(node)
        adds = kind in _ADDS
        if adds or kind in _COPIES or torch.Tag.pointwise in node.target.tags:  # type: ignore[union-attr]
            return self._elementwise(given, len(new)), adds and (self._mixes(node) or self._broadcasts(node))
        return self._scattered(given, len(new), node), kind not in _MOVES

    def _received(self, node: fx.Node, name: str) -> _Layout | None:
        """The elements that a collective brings. Weights and other inputs, which no node computed, do not count."""
        source, count = node.all_input_nodes[0], node.args[1] if len(node.args) > 1 else None
        group = str(node.args[2] if name == PUSH else node.args[-1])
        self._ranks[group] = len(count) if isinstance(count, (list, tuple)) else count  # type: ignore[assignment]
        if name == GATHER_MANY or not self._is_computed(source):
            return None
        if name == PUSH:
            return self._pushed(count, group)
        own = self._gathered(source, group)
        return own if name == GATHER else _Layout(own.dims, own.parts | {(group, node.name)})

    def _pushed(self, ranks: Any, group: Any) -> _Layout:
        """The elements of all ranks' columns."""
        self._ranks[group] = ranks
        return _Layout((frozenset(), frozenset({_Along(group, True)})))

    def _gathered(self, source: fx.Node, group: str) -> _Layout:
        """The elements of this tensor all-gathered along its first dimension."""
        own = self._layout_of(source) or _no_ranks(self._shape(source))
        first = frozenset(_Along(along.group) for along in own.dims[0]) | {_Along(group, True)}
        return _Layout((first, *own.dims[1:]), own.parts)

    def _item(self, node: fx.Node) -> _Layout | None:
        source, number = node.args
        assert isinstance(source, fx.Node) and isinstance(number, int)
        name = op_name(source)
        if (place := PUSHED.get(name)) and number == 1:
            return self._pushed(*source.args[place : place + 2])
        if name == GATHER_MANY:
            shards: Any = source.args[0]
            return self._gathered(shards[number], str(source.args[2])) if self._is_computed(shards[number]) else None
        if name == PUSHED_NORM and number == 1:  # of whole rows, whatever the product and its sum are parts of
            return None
        given = [n for n in source.all_input_nodes if self._layout_of(n)]
        if not given:
            return None
        if name in _SPLITS:
            whole = self._layout_of(given[0])
            assert whole is not None
            dim = _argument(source, "dim", 1 if name == "aten.unbind" else 2, 0)
            return _take_part(whole, dim % len(whole.dims), number, name == "aten.unbind")
        return self._custom_operator(source, given, self._shape(node))

    def _indexed(self, node: fx.Node, name: str, whole: _Layout) -> _Layout:
        """The elements left by an indexing call. A rank's own part, indexed by its place, has no others'."""
        dim = _argument(node, "dim", 1, 0) % len(whole.dims)
        place: Any = node.args[2:]
        if name == "aten.index_select" and isinstance(index := place[0], fx.Node):
            if index.op == "placeholder":
                groups = {along.group for along in whole.dims[dim]}
                kept = tuple(frozenset(along for along in dim if along.group not in groups) for dim in whole.dims)
                return _Layout(kept, frozenset(part for part in whole.parts if part[0] not in groups))
            return _take_part(whole, dim, index.name, False)
        if self._shape(node) == self._shape(node.all_input_nodes[0]):
            return whole
        return _take_part(whole, dim, place[0] if name == "aten.select" else str(place), name == "aten.select")

    def _concatenated(self, node: fx.Node, name: str) -> _Layout:
        """The elements of a concatenation: parts in rank order make up the whole again."""
        pieces, new, none = node.args[0], self._shape(node), frozenset[_Along]()
        assert isinstance(pieces, (list, tuple))
        dim = _argument(node, "dim", 1, 0) % len(new)
        found = [self._layout_of(piece) or _no_ranks(self._shape(piece)) for piece in pieces]  # type: ignore[arg-type]
        if name == "aten.stack":
            found = [_Layout((*layout.dims[:dim], none, *layout.dims[dim:]), layout.parts) for layout in found]
        common = frozenset[Part].intersection(*(layout.parts for layout in found))
        apart = [sorted(layout.parts - common, key=_place) for layout in found]
        dims = [none.union(*(layout.dims[i] for layout in found)) for i in range(len(new))]
        groups = {group for parts in apart for group, _ in parts}
        places = [[_place(part) for part in parts] for parts in apart]
        in_order = places == sorted(places)
        dims[dim] |= {_Along(group, in_order and not dims[dim]) for group in groups}
        again = () if in_order else ((group, str(places)) for group in groups)
        return _Layout(tuple(dims), common | frozenset(again))

    def _custom_operator(self, node: fx.Node, given: Sequence[fx.Node], new: Sequence[Any]) -> _Layout | None:
        """The elements in a custom operator's result. Ours and users' are trusted to sum as on one rank, row by row."""
        rows = next((n for n in node.all_input_nodes if self._is_float(n)), given[0])
        parts = frozenset().union(*(layout.parts for layout in self._layouts_of(given)))
        along, old = self._layout_of(rows), self._shape(rows)
        kept = along.dims[0] if along and old and new and old[0] == new[0] else frozenset()
        return _Layout((kept, *_no_ranks(new[1:]).dims) if new else (), parts)

    def _elementwise(self, given: Sequence[fx.Node], count: int) -> _Layout:
        """The elements in the result of an elementwise call, with dimensions aligned as in broadcasting."""
        found = self._layouts_of(given)
        padded = [((frozenset(),) * (count - len(w.dims)) + w.dims)[-count:] if count else () for w in found]
        dims = tuple(frozenset().union(*(d[i] for d in padded)) for i in range(count))
        return _Layout(dims, frozenset().union(*(w.parts for w in found)))

    def _scattered(self, given: Sequence[fx.Node], count: int, node: fx.Node) -> _Layout:
        """The elements in the result of a call that may put any element anywhere."""
        groups = frozenset[str]().union(*(layout.groups for layout in self._layouts_of(given)))
        return _Layout((_anywhere(groups),) * count, frozenset((group, node.name) for group in groups))

    def _mixes(self, node: fx.Node) -> bool:
        """Whether operands hold different parts of the ranks' elements."""
        parts = [w.parts if (w := self._layout_of(n)) else frozenset() for n in self._operands(node)]
        return any(found != parts[0] for found in parts)

    def _broadcasts(self, node: fx.Node) -> bool:
        """Whether an operand is broadcast along a dimension that holds elements of several ranks in another operand."""
        shapes = [self._shape(n) for n in self._operands(node)]
        for n in self._operands(node):
            dims = w.dims if (w := self._layout_of(n)) else ()
            tagged = [len(dims) - i for i, groups in enumerate(dims) if groups and self._shape(n)[i] != 1]
            if any(len(s) < back or s[-back] == 1 for back in tagged for s in shapes if s):
                return True
        return False

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if self._is_computed(n) and self._is_float(n)]

    def _layouts_of(self, nodes: Iterable[fx.Node]) -> list[_Layout]:
        return [layout for node in nodes if (layout := self._layout_of(node))]

    def _layout_of(self, node: Any) -> _Layout | None:
        if not isinstance(node, fx.Node):
            return None
        found, shape = self._layouts.get(node), self._shape(node)
        stored = frozenset().union(*(self._memory.get(o, ()) for o in self._origins_of[node]))
        if not stored:
            return found
        dims = found.dims if found else _no_ranks(shape).dims
        return _Layout(tuple(d | _anywhere(stored) for d in dims), found.parts if found else frozenset())

    def _is_computed(self, node: fx.Node) -> bool:
        return node in self._computed or not self._computed.isdisjoint(self._origins_of[node])

    def _is_float(self, node: fx.Node) -> bool:
        return any(t.dtype.is_floating_point for t in tensors_in(self._captured.value(node)))

    def _shape(self, node: fx.Node) -> tuple[int | str, ...]:
        value = self._captured.value(node)
        return value.shape if isinstance(value, TensorValue) else ()


def _no_ranks(shape: Sequence[Any]) -> _Layout:
    return _Layout((frozenset(),) * len(shape))


def _take_part(whole: _Layout, dim: int, key: Hashable, drops: bool) -> _Layout:
    """The elements of part `key` along a dimension, which is removed if `drops`."""
    dims = (*whole.dims[:dim], *whole.dims[dim + 1 :]) if drops else whole.dims
    return _Layout(dims, whole.parts | {(along.group, key) for along in whole.dims[dim]})


def _place(part: Part) -> tuple[str, int, str]:
    group, key = part
    return group, key if isinstance(key, int) else -1, str(key)


def _anywhere(groups: Iterable[str]) -> frozenset[_Along]:
    return frozenset(map(_Along, groups))


def _reshaped(dims: Dims, old: Sequence[int | str], new: Sequence[int | str], ranks: Mapping[str, int]) -> Dims:
    """Elements after a reshape: leading and trailing dimensions of unchanged size keep theirs; each one between may
    have those of any dimension that was between."""
    most = min(len(old), len(new))
    first = next((i for i in range(most) if old[i] != new[i]), most)
    last = next((i for i in range(most - first) if old[-1 - i] != new[-1 - i]), most - first)
    before, sizes = dims[first : len(old) - last], new[first : len(new) - last]
    groups = {along.group for dim in before for along in dim}
    between = [_anywhere(groups)] * len(sizes)
    if before and sizes and not any(before[1:]) and all(along.by_rank for along in before[0]):
        if len(sizes) == 1:
            between = [before[0]]
        elif all(ranks.get(group) == sizes[0] for group in groups):  # [ranks, each rank's block]
            between = [before[0], *[frozenset[_Along]()] * (len(sizes) - 1)]
    return (*dims[:first], *between, *dims[len(old) - last :])


def _transposed_dims(node: fx.Node, count: int) -> list[int]:
    """For each dimension of a transposed result, the dimension that it was."""
    order = list(range(count))
    if op_name(node) == "aten.permute":
        return [dim % count for dim in _argument(node, "dims", 1, order)]
    a, b = (_argument(node, name, i, i - 1) % count for i, name in enumerate(("dim0", "dim1"), 1))
    order[a], order[b] = b, a
    return order


def _reduced_dims(node: fx.Node, count: int) -> set[int]:
    """The dimensions that a call reduces over."""
    given = _argument(node, "dim", 1, None)
    given = [given] if isinstance(given, int) and not isinstance(given, bool) else given
    dims = given if isinstance(given, (list, tuple)) and given else range(count)
    return {dim % count for dim in dims}


def _argument(node: fx.Node, name: str, place: int, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
