"""A packed batch as graphs take it: its tensors by name, the values that a graph is made for, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from .. import graph
from ..types import PackedBatch

# The packed batch's tensors by what their names end in; one trace serves every size.
OPEN_SIZES: graph.Dynamic = {
    **{f.name: (f.name[-1],) for f in fields(PackedBatch) if f.name[-2:] in ("_T", "_C", "_S")},
    **{"cu_seqlens": ("S1",), "cu_completions": ("S1",), "support_C": ("C", None)},
}


def statics_of(batch: PackedBatch) -> dict[str, Any]:
    """What a graph of a batch holds as constants."""
    return {"max_len": batch.max_len, "check_parity": batch.check_parity, "truncated": batch.truncated}


def batch_of(inputs: graph.Inputs, **statics: Any) -> PackedBatch:
    """The batch of traced tensors."""
    values: dict[str, Any] = {**inputs.user, **statics}
    return PackedBatch(**values, sequence_C=torch.empty(0))
