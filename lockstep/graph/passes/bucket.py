"""Bucketing: one collective for all weights or gradients of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from ..ir.captured import Captured
from ..torch_private import collectives as torch_collectives
from ..torch_private import trace as torch_trace
from .collectives import Collective, by_layer, gradient_exchanges, sources, weight_gathers
from .rewrite import move_after, rewritten


def bucket(captured: Captured) -> tuple[Captured, str]:
    """Merge consecutive all-gathers of a layer's weights, and consecutive exchanges of its gradients. Weights need no
    copy, as one coalesced launch gathers them; gradients are concatenated first. The same bits arrive."""
    result = rewritten(captured)
    notes = [
        _merge_runs(result.graph, weight_gathers(result), _merge_gathers) + " gathers",
        _merge_runs(result.graph, gradient_exchanges(result), _merge_exchanges) + " exchanges",
    ]
    if between := gradient_exchanges(result, stage=1):
        notes.append(_merge_runs(result.graph, between, _merge_exchanges) + " exchanges between cells")
    return result, ", ".join(notes)


def _merge_runs(
    graph: fx.Graph, found: Sequence[Collective], together: Callable[[fx.Graph, Sequence[Collective]], None]
) -> str:
    runs = list(by_layer(found))
    for run in runs:
        if len(run) > 1:
            together(graph, run)
    return f"{len(found)} -> {len(runs)}"


def _merge_gathers(graph: fx.Graph, run: Sequence[Collective]) -> None:
    calls = [gather.collective for gather in run]
    first = min(calls)
    for gather in run:
        for node in gather.start[: gather.start.index(gather.collective)]:  # casts of its shards
            first.prepend(node)
    with graph.inserting_before(first):
        made = torch_collectives.coalesce_gathers(graph, calls)
    torch_trace.copy_tags(calls[0], [*made[0].all_input_nodes, *made])
    for call, one in zip(calls, made, strict=True):
        call.replace_all_uses_with(one)
        graph.erase_node(call)


def _merge_exchanges(graph: fx.Graph, run: Sequence[Collective]) -> None:
    """Merge a run of exchanges right after the last gradient of the run, and move calls that use the earlier ones'
    results behind the merged exchange."""
    last = max(node for exchange in run for node in sources(exchange))
    anchor = move_after(last, [node for exchange in run for node in exchange.start[:-1]])  # whatever lays them out
    calls = [exchange.collective for exchange in run]
    known = set(graph.nodes)
    with graph.inserting_before(anchor.next):
        made = torch_collectives.merge_exchanges(graph, calls)
    torch_trace.copy_tags(calls[0], [node for node in graph.nodes if node not in known])
    for call, rows in zip(calls, made, strict=True):
        (waited,) = call.users
        (laid_out,) = waited.users  # viewed as one row per rank
        laid_out.replace_all_uses_with(rows)
        for node in (laid_out, waited, call):
            graph.erase_node(node)
    anchor, left = max(made), {node for exchange in run for node in exchange.finish} & set(graph.nodes)
    move_after(anchor, [node for node in sorted(left) if node < anchor])
