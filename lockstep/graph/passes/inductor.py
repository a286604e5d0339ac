"""Compiles stretches of a graph with Inductor: runs of torch's operators between ours, where other bits are allowed.

Our operators, in-place writes, collectives and device syncs end a stretch and stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx

from ...config import CompileConfig
from ...timings import Timings
from ..ir.captured import Captured, GraphError, is_backward, module_of, mutates, op_name, origins, written_memory
from ..ir.values import tensors_in
from ..torch_private import inductor as torch_inductor
from ..torch_private import trace as torch_trace
from ..torch_private.inductor import Uncompilable
from . import Pass
from .backend import Backend
from .compiled_subgraph import CompiledSubgraph, Regions, digest_of
from .recompute import UnknownPattern
from .subgraph import Stretch, allocates_nothing, outline

BACKWARD_PASS, ALL = "backward", "all"
LEAST_CALLS = 2  # per region: a single call is one kernel already
_NAMESPACES = ("aten.", "prims.")
_ADDED_IN_ANY_ORDER = (  # Inductor implements these with atomics
    *("aten.index_add", "aten.index_put", "aten._unsafe_index_put", "aten.index_reduce", "aten.scatter"),
    "aten.embedding_dense_backward",
)
_BARRED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}


class Inductor(Backend):
    """Compiles regions of graphs, each once for all graphs. `choices`: `backward` (the backward pass), module paths
    such as `layers.*` (of their forward pass, the stretches in `regions.shared`), or `all`; shell-style wildcards."""

    compile_module = staticmethod(torch_inductor.compile_module)

    def __init__(self, config: CompileConfig, device: torch.device, timings: Timings) -> None:
        self.choices, self.regions = config.inductor, Regions(timings)
        self.shared = any(choice != BACKWARD_PASS for choice in self.choices)
        self.passes = [Pass("inductor", False, self.rewrite, {"choices": tuple(self.choices)})]

    @staticmethod
    def lacks(device: torch.device) -> str | None:
        return torch_inductor.missing_compiler(device)

    def rewrite(self, captured: Captured) -> tuple[Captured, str]:
        """Compile regions of the graph. `UnknownPattern`: a path matches none of the graph's modules."""
        _check_patterns(captured, self.choices)
        found: list[Stretch] = []
        made: dict[Stretch, CompiledSubgraph] = {}
        for backward in (False, True):  # forward first, as it moves recomputed calls into the backward pass
            some = [stretch for stretch in stretches(captured, self.choices) if stretch.backward == backward]
            wanted = [s for s in some if s.backward or digest_of(s.body) in self.regions.shared]
            regions = {s: self.regions.region(s.body, s.module, s.signature) for s in wanted}
            if of_these := {s: region for s, region in regions.items() if region is not None}:
                conditions = [c for stretch, region in of_these.items() for c in stretch.conditions(region.conditions)]
                sizes = captured.sizes.with_conditions(conditions)
                captured = replace(captured, module=outline(captured, of_these), sizes=sizes)
            found += some
            made |= of_these
        return captured, _note(found, made, self.regions)

    def settings(self) -> dict[str, Any]:
        return torch_inductor.settings()

    def check(self, captured: Captured) -> None:
        """Refuse a model's forward pass that lacks some of the regions shared by all others."""
        has = {node.target.digest for node in captured.graph.nodes if isinstance(node.target, CompiledSubgraph)}
        if (missing := self.regions.shared - has) and any(map(module_of, captured.graph.nodes)):
            raise GraphError(
                f"{captured.title}: at these sizes the graph lacks compiled regions of the others "
                f"({', '.join(missing)}), so its log-probabilities could differ from theirs; set compile.inductor to "
                "backward"
            )

    def share(self, traces: Sequence[Captured]) -> bool:
        """From now on compile the forward regions that every trace of both roles has. Returns whether there are any."""
        if self.shared:
            self.regions.shared = _common_digests(traces, self.choices)
        return bool(self.regions.shared)


def _note(found: Sequence[Stretch], made: Mapping[Stretch, CompiledSubgraph], regions: Regions) -> str:
    if not found:
        return "nothing to compile: nowhere that was asked for do two calls of torch's operators lie together"
    calls = sum(len(stretch.calls) for stretch in made)
    note = f"{calls} calls in {len(made)} regions, {len({region.digest for region in made.values()})} different"
    left = [digest_of(stretch.body) for stretch in found if stretch not in made]
    reasons = {regions.refused.get(digest, "not in the forward passes of both roles") for digest in left}
    return note + (f"; {len(left)} left as they are: {', '.join(sorted(reasons))}" if left else "")


def _check_patterns(captured: Captured, choices: Sequence[str]) -> None:
    modules = sorted({module_of(node) for node in captured.graph.nodes} - {""})
    for pattern in choices:
        if modules and pattern not in (BACKWARD_PASS, ALL) and not any(fnmatchcase(m, pattern) for m in modules):
            raise UnknownPattern(
                f"compile.inductor: {captured.title}: {pattern!r} matches no module; use {BACKWARD_PASS}, {ALL} or a "
                f"pattern for some of {', '.join(modules)}"
            )


def stretches(captured: Captured, choices: Sequence[str]) -> Iterator[Stretch]:
    """The stretches of a graph that may be compiled, in order; `choices` as in `Inductor`. Forward calls whose inputs
    are overwritten later are left out, since the backward pass may recompute them."""
    origins_of = origins(captured.graph)
    last_write = {o: node for node in captured.graph.nodes for o in written_memory(node, origins_of)}

    def lasts(node: fx.Node) -> bool:
        read = () if is_backward(node) else (o for n in node.all_input_nodes for o in origins_of[n])
        return node not in last_write and all(last_write.get(origin, node) <= node for origin in read)

    run: list[fx.Node] = []
    for node in captured.graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and allocates_nothing(captured, node)):
            continue
        fits = _is_compilable(captured, node) and lasts(node) and _wanted(node, choices)
        if run and not (fits and is_backward(node) == is_backward(run[0])):
            yield from _stretch(captured, run)
            run = []
        if fits:
            run.append(node)


def _common_digests(traces: Sequence[Captured], choices: Sequence[str]) -> frozenset[str]:
    """Digests of the forward stretches that every graph of a model has; none if one of the roles has no graph.
    `traces`: the graphs of both roles, before or after the pass. The generator's are those that write the KV cache."""
    found: dict[bool, list[frozenset[str]]] = {True: [], False: []}
    for trace in traces:
        before = next(graph for name, graph in reversed(trace.stages()) if name != "inductor")
        if any(map(module_of, before.graph.nodes)):
            own = frozenset(digest_of(s.body) for s in stretches(before, choices) if not s.backward)
            found["kv" in trace.writes].append(own)
    return frozenset.intersection(*found[True], *found[False]) if all(found.values()) else frozenset()


def _stretch(captured: Captured, run: Sequence[fx.Node]) -> Iterator[Stretch]:
    if len(run) < LEAST_CALLS:
        return
    stretch = Stretch(captured, run)
    try:
        stretch.signature.describe()
    except Uncompilable:  # an input's strides are not a function of the sizes
        return
    yield stretch


def _is_compilable(captured: Captured, node: fx.Node) -> bool:
    """Whether Inductor may compile a call: an operator of torch, pure and deterministic, on the graph's device."""
    target = node.target
    if not torch_trace.is_operator(target) or not op_name(node).startswith(_NAMESPACES) or mutates(node):
        return False
    if op_name(node).startswith(_ADDED_IN_ANY_ORDER):
        return False
    values, home = tensors_in(captured.value(node)), captured.inputs[0].device
    return (
        bool(values) and all(v.device == home for v in values) and not _BARRED & set(target.tags)  # type: ignore[union-attr]
    )


def _wanted(node: fx.Node, choices: Sequence[str]) -> bool:
    if is_backward(node):
        return BACKWARD_PASS in choices or ALL in choices
    path = module_of(node)
    return bool(path) and any(choice == ALL or fnmatchcase(path, choice) for choice in choices)
