"""Deciding that a graph runs as a CUDA graph, whole or in pieces."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..ir.captured import Captured, op_name


def cudagraph(captured: Captured, split_at: Collection[str] = ()) -> tuple[Captured, str]:
    """Mark the graph to be recorded at its first launch, in pieces around the operators `split_at` if it has any; the
    verifier then holds it to what a CUDA graph can be."""
    static = sum(spec.role != "user" for spec in captured.inputs)
    copied = f"{static} static inputs, {len(captured.inputs) - static} copied in"
    between = [op_name(node) for node in captured.graph.nodes if op_name(node) in split_at]
    way = f"in pieces around {len(between)} calls of {', '.join(sorted(set(between)))}" if between else "whole"
    return replace(captured, recorded=True, split_at=frozenset(between)), f"{way}; {copied}"
