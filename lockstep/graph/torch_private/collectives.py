"""Collectives in graphs: private interfaces of torch, for torch 2.11 to 2.13."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed._functional_collectives  # noqa: F401 (registers the operators' shapes)
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_map

_operators = torch.ops._c10d_functional

GATHER = "_c10d_functional.all_gather_into_tensor"
GATHER_MANY = "_c10d_functional.all_gather_into_tensor_coalesced"
EXCHANGE = "_c10d_functional.all_to_all_single"
WAIT = "_c10d_functional.wait_tensor"


def gather_many(graph: fx.Graph, gathers: Sequence[fx.Node]) -> list[fx.Node]:
    """The start of one collective in place of several gathers; a result for each, not waited for."""
    _, ranks, group = gathers[0].args
    shards = [gather.args[0] for gather in gathers]
    started = _call(graph, _operators.all_gather_into_tensor_coalesced.default, shards, ranks, group)
    return [_call(graph, operator.getitem, started, i) for i in range(len(shards))]


def exchange_many(graph: fx.Graph, exchanges: Sequence[fx.Node]) -> list[fx.Node]:
    """One collective, and the wait for it, in place of several exchanges of flat tensors; for each what all ranks have
    for this one, [ranks, size]."""
    parts: Any = [exchange.args[1] for exchange in exchanges]
    ranks, sizes, group = len(parts[0]), [part[0] for part in parts], exchanges[0].args[3]
    view = torch.ops.aten.view.default
    rows = [_call(graph, view, e.args[0], [ranks, size]) for e, size in zip(exchanges, sizes, strict=True)]
    flat = _call(graph, view, _call(graph, torch.ops.aten.cat.default, rows, 1), [-1])
    together = [sum(sizes)] * ranks
    started = _call(graph, _operators.all_to_all_single.default, flat, together, together, group)
    found = _call(graph, view, _call(graph, _operators.wait_tensor.default, started), [ranks, sum(sizes)])
    ends = list(accumulate(sizes))
    slices = zip(ends, sizes, strict=True)
    return [_call(graph, torch.ops.aten.slice.Tensor, found, 1, end - size, end) for end, size in slices]


def _call(graph: fx.Graph, target: Callable[..., Any], *args: Any) -> fx.Node:
    """A call at the graph's point of insertion, with what it computes as a trace would have recorded it."""
    node = graph.call_function(target, args)
    values = tree_map(lambda item: item.meta["val"] if isinstance(item, fx.Node) else item, args)
    mode = next(v.fake_mode for v in tree_flatten(values)[0] if isinstance(v, FakeTensor))
    with mode, torch.no_grad():
        node.meta["val"] = target(*values)
    return node
