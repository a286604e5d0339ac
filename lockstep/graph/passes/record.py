"""Deciding that a graph runs as a CUDA graph."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Captured


def cudagraph(captured: Captured) -> tuple[Captured, str]:
    """Mark the graph to be recorded at its first launch; the verifier then holds it to what a CUDA graph can be."""
    static = sum(spec.role != "user" for spec in captured.inputs)
    return replace(captured, recorded=True), f"{static} static inputs, {len(captured.inputs) - static} copied in"
