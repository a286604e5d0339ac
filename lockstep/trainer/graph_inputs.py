"""A packed batch as graphs take it: its tensors by name, the values that a graph is made for, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from .. import graph
from ..algorithms import Algorithm
from ..types import PackedBatch

# The packed batch's tensors by what their names end in; one trace serves every size.
OPEN_SIZES: graph.Dynamic = {
    **{f.name: (f.name[-1],) for f in fields(PackedBatch) if f.name[-2:] in ("_T", "_C", "_S")},
    **{"cu_seqlens": ("S1",), "cu_completions": ("S1",), "support_C": ("C", None)},
}


def complete(batch: PackedBatch, algorithm: Algorithm) -> None:
    """Add the tensors that the algorithm's loss needs besides those of every batch."""
    if algorithm.indexes_sequences and batch.cu_completions is None:
        batch.index_sequences()
    if algorithm.has_critic and batch.return_C is None:
        batch.add_values()


def statics_of(batch: PackedBatch) -> dict[str, Any]:
    """What a graph of a batch holds as constants."""
    return {"max_len": batch.max_len, "check_parity": batch.check_parity, "truncated": batch.truncated}


def batch_of(inputs: graph.Inputs, **statics: Any) -> PackedBatch:
    values: dict[str, Any] = {**inputs.user, **statics}
    return PackedBatch(**values, sequence_C=torch.empty(0))
