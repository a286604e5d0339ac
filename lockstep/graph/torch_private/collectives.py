"""Merges collectives in graphs. Uses private interfaces of torch 2.11 to 2.13."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the operators' shapes
from torch import fx

from .trace import call, fake_value

_operators = torch.ops._c10d_functional

GATHER = "_c10d_functional.all_gather_into_tensor"
GATHER_MANY = "_c10d_functional.all_gather_into_tensor_coalesced"
EXCHANGE = "_c10d_functional.all_to_all_single"
WAIT = "_c10d_functional.wait_tensor"


def coalesce_gathers(graph: fx.Graph, gathers: Sequence[fx.Node]) -> list[fx.Node]:
    """Insert one coalesced all-gather in place of several. Returns its results, one per gather, not waited for."""
    _, ranks, group = gathers[0].args
    shards = [gather.args[0] for gather in gathers]
    started = call(graph, _operators.all_gather_into_tensor_coalesced.default, shards, ranks, group)
    return [call(graph, operator.getitem, started, i) for i in range(len(shards))]


def merge_exchanges(graph: fx.Graph, exchanges: Sequence[fx.Node]) -> list[fx.Node]:
    """Insert one all-to-all, with its wait, in place of several of flat tensors of one dtype. Returns for each the
    parts that all ranks sent to this one, [ranks, size]."""
    assert len({fake_value(exchange).dtype for exchange in exchanges}) == 1, "several dtypes would be promoted"
    parts: Any = [exchange.args[1] for exchange in exchanges]
    ranks, sizes, group = len(parts[0]), [part[0] for part in parts], exchanges[0].args[3]
    view = torch.ops.aten.view.default
    rows = [call(graph, view, e.args[0], [ranks, size]) for e, size in zip(exchanges, sizes, strict=True)]
    flat = call(graph, view, call(graph, torch.ops.aten.cat.default, rows, 1), [-1])
    together = [sum(sizes)] * ranks
    started = call(graph, _operators.all_to_all_single.default, flat, together, together, group)
    found = call(graph, view, call(graph, _operators.wait_tensor.default, started), [ranks, sum(sizes)])
    ends = list(accumulate(sizes))
    slices = zip(ends, sizes, strict=True)
    return [call(graph, torch.ops.aten.slice.Tensor, found, 1, end - size, end) for end, size in slices]
