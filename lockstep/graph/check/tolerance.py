"""How far a result may differ from eager's where it need not be bitwise equal, as with compiled regions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.captured import Captured

# The largest relative difference from eager in norm, by the dtype of the weights.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2**-5}


def bound(captured: Captured) -> float:
    kinds = {spec.dtype for spec in captured.inputs if spec.role == "param"}
    return max((BOUNDS[kind] for kind in kinds if kind in BOUNDS), default=BOUNDS[torch.float32])


def exceeds_bound(found: Sequence[Tensor], eager: Sequence[Tensor], start: Sequence[Tensor], limit: float) -> bool:
    """Whether any tensor differs from eager's by more than `limit` times the change that eager made, in norm. `start`:
    the values before the run, if the tensors are state. Integers, such as tokens, are never too far."""
    before: Sequence[Tensor | None] = start or [None] * len(found)
    return any(_exceeds_bound(*tensors, limit) for tensors in zip(found, eager, before, strict=True))


def _exceeds_bound(found: Tensor, eager: Tensor, start: Tensor | None, limit: float) -> bool:
    if not eager.is_floating_point():
        return False
    changed = _norm(eager if start is None else eager - start)
    rounding = 0.0 if start is None else torch.finfo(eager.dtype).eps * _norm(eager)
    return not _norm(found - eager) <= limit * changed + rounding  # NaN is too far


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference relative to the norm of the expected value."""
    size = _norm(expected)
    return _norm(found - expected) / size if size else _norm(found)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float(), dtype=torch.float64))
