"""User-defined algorithms: subclasses of `Algorithm`, loaded by name and tried on a few tokens."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import READ_BY, LossConfig
from ..errors import InputError, refuse
from ..user_functions import load_function, one_line
from .algorithm import Algorithm
from .policy_terms import TokenValues

_LENGTHS, _PADDING = (3, 1), 2  # completion tokens of each sequence in the trial, and rows of padding
_REWARDS = [[0.0, 1.0], [1.0, 1.0]]
# Settings that are read only if the algorithm overrides the method. Other settings are read by all, or are fields.
_BY_METHOD = {
    **dict.fromkeys(("gamma", "lam"), "estimate"),
    **{"normalize_advantages": "advantages", "overlong_penalty": "penalty"},
}
_BY_ALL = {"scale_rewards", "dynamic_sampling", "beta", "teacher", "overlong_buffer"}  # a recipe may have set the last


def user_algorithm(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names as module:Class or path.py:Class. `InputError`: it cannot be loaded, is
    not an `Algorithm`, violates that interface, or does not read a setting that was given."""
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
    for name, why in _unread(algorithm, config):
        given = getattr(config, name) != getattr(LossConfig(), name)
        refuse(given, f"loss.{name} has no effect: loss_type {config.loss_type} {why}")
    return algorithm


def _unread(algorithm: Algorithm, config: LossConfig) -> Iterator[tuple[str, str]]:
    """The settings that the algorithm does not read, each with the reason."""
    if not algorithm.has_teacher:
        yield "teacher", "learns from none; remove it"
    elif config.teacher is not None:
        yield "beta", "has a teacher where the reference would be; remove it"
    if not (algorithm.has_kl or config.use_kl_in_reward):
        yield "beta", "has no KL term in its loss; turn loss.use_kl_in_reward on, or remove it"
    own = {item.name for item in fields(algorithm)} | _BY_ALL
    for name in (name for name in READ_BY if name not in own):
        method = _BY_METHOD.get(name)
        if method is None:
            yield name, "has no field of that name; add one, or remove it"
        elif getattr(type(algorithm), method) is getattr(Algorithm, method):
            yield name, f"has no method {method} of its own; write one, or remove it"


def _wrong(algorithm: Algorithm, config: LossConfig) -> str:
    """A message about the first method that returns something wrong; "" if there is none."""
    advantages = algorithm.advantages(config, _REWARDS)
    if not _numbers(advantages, [2, 2]):
        return f"advantages of two groups of two samples are {one_line(advantages)}; they must be two lists of two"
    weights = algorithm.weights(_LENGTHS, 2, 3)
    if not _numbers([weights], [2]):
        return f"weights of two sequences are {one_line(weights)}; they must be two"
    if (keep := algorithm.keep(_REWARDS[0])) not in (True, False):
        return f"keep returns {one_line(keep)}; it must be True or False"
    penalty = algorithm.penalty(config, 3, 3)
    if not _numbers([[penalty]], [1]):
        return f"penalty of three tokens is {one_line(penalty)}; it must be a number"
    return (_wrong_estimate(algorithm, config) if algorithm.of_tokens else "") or _wrong_loss(algorithm)


def _wrong_estimate(algorithm: Algorithm, config: LossConfig) -> str:
    rewards, values = ([[x] * n for n in _LENGTHS] for x in (0.5, 0.25))
    found = algorithm.estimate(config, rewards, values)
    if not isinstance(found, tuple) or len(found) != 2:
        return f"estimate returns {one_line(found)}; it must return two, the advantages and the returns"
    for name, of_samples in zip(("advantages", "returns"), found, strict=True):
        if not _numbers(of_samples, _LENGTHS):
            shape = " and ".join(map(str, _LENGTHS))
            return (
                f"estimate of two samples of {shape} tokens returns {name} {one_line(of_samples)}; they must be a list "
                "a sample, of a finite number a token"
            )
    return ""


def _numbers(found: Any, lengths: Sequence[int]) -> bool:
    """Whether `found` is a list of lists of these lengths, of finite numbers."""
    try:
        return [len(inner) for inner in found] == list(lengths) and all(math.isfinite(x) for x in chain(*found))
    except TypeError:  # not lists, or not of numbers
        return False


def _wrong_loss(algorithm: Algorithm) -> str:
    rows = sum(_LENGTHS) + _PADDING
    logprob_C, ends = torch.linspace(-3, -1, rows).requires_grad_(), [0, *_LENGTHS[:1], sum(_LENGTHS)]
    index = torch.tensor(ends, dtype=torch.int32) if algorithm.indexes_sequences else None
    advantage_C = torch.tensor([1.0] * _LENGTHS[0] + [-1.0] * _LENGTHS[1] + [0.0] * _PADDING)
    then_C = torch.full((rows,), -2.0)
    value_C = torch.zeros(rows, requires_grad=True)
    reference_C = then_C if algorithm.reads_reference else None
    of_critic = (value_C, then_C, then_C) if algorithm.has_critic else (None,) * 3
    values = TokenValues(logprob_C, logprob_C, then_C, advantage_C, index, reference_C, *of_critic)
    with _Traced():
        both: Any = algorithm.loss(values)
        if not isinstance(both, tuple) or len(both) != 2:
            return f"loss returns {_described(both)}; it must return two, the losses and which were clipped"
        loss_C, clipped_C = algorithm.corrected_loss(values)
    for name, found, dtype in (("loss", loss_C, torch.float32), ("clipped", clipped_C, torch.bool)):
        if not isinstance(found, torch.Tensor) or found.shape != (rows,) or found.dtype != dtype:
            return f"its {name} is {_described(found)}; it must be {dtype}, one a token ([{rows}] here)"
    if not loss_C.requires_grad:
        return "its loss has no gradient by the log-probs"
    gradient_C, of_value_C = torch.autograd.grad(loss_C.sum(), (logprob_C, value_C), allow_unused=True)
    if gradient_C is None:
        return "its loss has no gradient by the log-probs"
    if algorithm.has_critic and of_value_C is None:
        return "it has a critic, and its loss has no gradient by the critic's values"
    return "" if gradient_C.isfinite().all() else "its gradient by a log-prob is not finite"


class _Traced(TorchFunctionMode):
    """Raises `TypeError` where a tensor's value would become a Python number, as that cannot be traced."""

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
    """The place in the user's file where `error` was raised, and a remedy if one is known."""
    of_values = isinstance(error, AttributeError) and isinstance(error.obj, TokenValues)
    said = f"; TokenValues has {', '.join(TokenValues._fields)}, sequence_sum and sequence_mean" if of_values else ""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not own:
        return said
    asked = next((field for field in _ASKED if f".{field}" in (own[-1].line or "")), None)
    if asked and isinstance(error, (TypeError, AttributeError)) and "None" in str(error):
        said = f"; {asked} is None unless the class says {_ASKED[asked]} = True"
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}){said}"


def _is_installed(file: str) -> bool:
    """Whether a file belongs to this package or to torch."""
    return any(Path(file).is_relative_to(folder) for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def _described(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
