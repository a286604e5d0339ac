"""A user's own algorithm: a subclass of `Algorithm`, found by name and tried on a few tokens."""

from __future__ import annotations

from typing import Any

import torch

from ..config import LossConfig
from ..errors import InputError
from ..user_functions import load_function, one_line
from .algorithm import Algorithm
from .losses import TokenValues

_LENGTHS, _PADDING = (3, 1), 2  # completion tokens of each sequence it is tried on, and rows beyond


def user_algorithm(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names as module:Class or path.py:Class.

    Raises `InputError` when it cannot be loaded, is no `Algorithm`, or returns something else than that says.
    """
    what = f"loss.loss_type {config.loss_type!r}"
    kind = load_function(config.loss_type, what, kind="Class")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise InputError(f"{what} must be a class, a subclass of lockstep.algorithms.Algorithm")
    try:
        algorithm = kind.of(config)
        wrong = _wrong(algorithm, config)
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {one_line(error)}") from error
    if wrong:
        raise InputError(f"{what}: {wrong}")
    return algorithm


def _wrong(algorithm: Algorithm, config: LossConfig) -> str:
    """What it returns that it should not; nothing if all is well."""
    advantages = algorithm.advantages(config, [[0.0, 1.0], [1.0, 1.0]])
    if [len(group) for group in advantages] != [2, 2]:
        return f"advantages of two groups of two samples are {one_line(advantages)}; they must be two lists of two"
    weights = algorithm.weights(_LENGTHS, 2, 3)
    if len(weights) != 2:
        return f"weights of two sequences are {one_line(weights)}; they must be two"
    rows = sum(_LENGTHS) + _PADDING
    logprob_C, ends = torch.linspace(-3, -1, rows).requires_grad_(), [0, *_LENGTHS[:1], sum(_LENGTHS)]
    index = torch.tensor(ends, dtype=torch.int32) if algorithm.indexes_sequences else None
    advantage_C = torch.tensor([1.0] * _LENGTHS[0] + [-1.0] * _LENGTHS[1] + [0.0] * _PADDING)
    then_C = torch.full((rows,), -2.0)
    values = TokenValues(logprob_C, logprob_C, then_C, advantage_C, index, *[then_C] * 4)
    loss_C, clipped_C = algorithm.corrected_loss(values)
    for name, found, dtype in (("loss", loss_C, torch.float32), ("clipped", clipped_C, torch.bool)):
        if not isinstance(found, torch.Tensor) or found.shape != (rows,) or found.dtype != dtype:
            return f"its {name} is {_described(found)}; it must be {dtype}, one a token ([{rows}] here)"
    if not loss_C.requires_grad:
        return "its loss has no gradient by the log-probs"
    (gradient_C,) = torch.autograd.grad(loss_C.sum(), logprob_C)
    return "" if gradient_C.isfinite().all() else "its gradient by a log-prob is not finite"


def _described(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
