"""A user's own algorithm: a subclass of `Algorithm`, found by name and tried on a few tokens."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
        raise InputError(f"{what} raised {type(error).__name__}: {one_line(error)}{_remedy(error)}") from error
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
    reference_C = then_C if algorithm.reads_reference else None
    of_critic = [then_C if algorithm.has_critic else None] * 3
    values = TokenValues(logprob_C, logprob_C, then_C, advantage_C, index, reference_C, *of_critic)
    with _Traced():
        loss_C, clipped_C = algorithm.corrected_loss(values)
    for name, found, dtype in (("loss", loss_C, torch.float32), ("clipped", clipped_C, torch.bool)):
        if not isinstance(found, torch.Tensor) or found.shape != (rows,) or found.dtype != dtype:
            return f"its {name} is {_described(found)}; it must be {dtype}, one a token ([{rows}] here)"
    if not loss_C.requires_grad:
        return "its loss has no gradient by the log-probs"
    (gradient_C,) = torch.autograd.grad(loss_C.sum(), logprob_C)
    return "" if gradient_C.isfinite().all() else "its gradient by a log-prob is not finite"


class _Traced(TorchFunctionMode):
    """Within it no number of a tensor becomes one of Python's, which a graph cannot hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON:
            raise TypeError(
                f"a loss is traced once for all values, so no tensor may become Python's ({func.__name__}): "
                "torch.where(condition, a, b) in place of `if`, tensors in place of numbers"
            )
        return func(*args, **(kwargs or {}))


_TO_PYTHON = {getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy")}
# Fields of `TokenValues` that are None unless the class asks for them.
_ASKED = {"ref_logprob_C": "has_teacher"} | dict.fromkeys(("value_C", "old_value_C", "return_C"), "has_critic")


def _remedy(error: Exception) -> str:
    """Where in the user's file it was raised, and what to do where that is known."""
    if isinstance(error, AttributeError) and isinstance(error.obj, TokenValues):
        said = f"; TokenValues has {', '.join(TokenValues._fields)}, sequence_sum and sequence_mean"
    else:
        said = ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not own:
        return said
    asked = next((field for field in _ASKED if f".{field}" in (own[-1].line or "")), None)
    if asked and isinstance(error, (TypeError, AttributeError)) and "None" in str(error):
        said = f"; {asked} is None unless the class says {_ASKED[asked]} = True"
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}){said}"


def _is_installed(file: str) -> bool:
    """Whether a file is of this package or of torch."""
    return any(Path(file).is_relative_to(folder) for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def _described(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
