"""User-defined algorithms: subclasses of `Algorithm`, loaded by name and tried on a few tokens."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..config import READ_BY, LossConfig
from ..errors import InputError, refuse
from ..user_functions import load_function, one_line
from .advantage import Rewards
from .algorithm import Algorithm
from .host_calls import has_shape
from .policy_terms import TokenValues

# The trial: completion tokens of each sequence, rows of padding, and the rewards of two groups.
_LENGTHS, _PADDING = (3, 1), 2
_REWARDS = [[0.0, 1.0], [1.0, 1.0]]
# Settings that are read only if the algorithm overrides the method. Other settings are read by all, or are fields.
_READ_BY_METHOD = {"gamma": "estimate", "lam": "estimate"}
_READ_BY_METHOD |= {"normalize_advantages": "advantages", "overlong_penalty": "penalty"}
_ALWAYS_ACCEPTED = {"scale_rewards", "dynamic_sampling", "beta", "teacher", "overlong_buffer"}  # recipes set the last
# Conversions of a tensor's value to Python's, which cannot be traced.
_TO_PYTHON = {getattr(torch.Tensor, name) for name in ("__bool__", "__float__", "__int__", "item", "tolist", "numpy")}
# Fields of `TokenValues` that are None unless the class sets the attribute.
_ATTRIBUTE_OF_FIELD = {"ref_logprob_C": "has_teacher", "value_C": "has_critic"}
_ATTRIBUTE_OF_FIELD |= {"old_value_C": "has_critic", "return_C": "has_critic"}


def user_algorithm(config: LossConfig) -> Algorithm:
    """The algorithm that `loss.loss_type` names as module:Class or path.py:Class. `InputError`: it cannot be loaded, is
    not an `Algorithm`, violates that interface, or does not read a setting that was given."""
    what = f"loss.loss_type {config.loss_type!r}"
    kind = load_function(config.loss_type, what, kind="Class")
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise InputError(f"{what} must be a class, a subclass of lockstep.algorithms.Algorithm")
    try:
        algorithm = kind.from_config(config)
        problem = _interface_problem(algorithm, config)
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {one_line(error)}{_remedy(error)}") from error
    if problem:
        raise InputError(f"{what}: {problem}")
    for name, why in _unread_settings(algorithm, config):
        given = getattr(config, name) != getattr(LossConfig(), name)
        refuse(given, f"loss.{name} has no effect: loss_type {config.loss_type} {why}")
    return algorithm


def learns_from(algorithm: Algorithm, config: LossConfig, rewards: Rewards) -> bool:
    """Whether a sample of these groups can have an advantage other than 0. One that raises for them has none."""
    try:
        return algorithm.has_token_advantages or any(chain(*algorithm.advantages(config, rewards)))
    except Exception:
        return False


def _unread_settings(algorithm: Algorithm, config: LossConfig) -> Iterator[tuple[str, str]]:
    """The settings that the algorithm does not read, each with the reason."""
    if not algorithm.has_teacher:
        yield "teacher", "learns from none; remove it"
    elif config.teacher is not None:
        yield "beta", "has a teacher where the reference would be; remove it"
    if not (algorithm.has_kl or config.use_kl_in_reward):
        yield "beta", "has no KL term in its loss; turn loss.use_kl_in_reward on, or remove it"
    readable = {item.name for item in fields(algorithm)} | _ALWAYS_ACCEPTED
    for name in READ_BY:
        if name in readable:
            continue
        method = _READ_BY_METHOD.get(name)
        if method is None:
            yield name, "has no field of that name; add one, or remove it"
        elif getattr(type(algorithm), method) is getattr(Algorithm, method):
            yield name, f"has no method {method} of its own; write one, or remove it"


def _interface_problem(algorithm: Algorithm, config: LossConfig) -> str:
    """What is wrong with the result of the first method that returns something invalid; "" if there is none."""
    for field in fields(algorithm):
        if not _is_constant(value := getattr(algorithm, field.name)):
            return f"its field {field.name} is {one_line(value)}; it must be a number, text, None, or several of these"
    advantages = algorithm.advantages(config, [list(group) for group in _REWARDS])
    if not has_shape(advantages, [2, 2]):
        return f"advantages of two groups of two samples are {one_line(advantages)}; they must be two lists of two"
    weights = algorithm.weights(_LENGTHS, 2, 3)
    if not has_shape(weights, 2):
        return f"weights of two sequences are {one_line(weights)}; they must be two"
    if (keep := algorithm.keep(list(_REWARDS[0]))) not in (True, False):
        return f"keep returns {one_line(keep)}; it must be True or False"
    penalty = algorithm.penalty(config, 3, 3)
    if not has_shape(penalty, None):
        return f"penalty of three tokens is {one_line(penalty)}; it must be a number"
    if algorithm.has_token_advantages and (problem := _estimate_problem(algorithm, config)):
        return problem
    return _loss_problem(algorithm)


def _is_constant(value: Any) -> bool:
    """Whether a field's value can be in the key of a graph."""
    if is_dataclass(value) and not isinstance(value, type):
        return all(_is_constant(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, (list, tuple, Mapping)):
        return all(map(_is_constant, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, (bool, int, float, str, type))


def _estimate_problem(algorithm: Algorithm, config: LossConfig) -> str:
    rewards = [[0.5] * length for length in _LENGTHS]
    values = [[0.25] * length for length in _LENGTHS]
    result = algorithm.estimate(config, rewards, values)
    if not isinstance(result, tuple) or len(result) != 2:
        return f"estimate returns {one_line(result)}; it must return two, the advantages and the returns"
    for name, of_samples in zip(("advantages", "returns"), result, strict=True):
        if not has_shape(of_samples, _LENGTHS):
            shape = " and ".join(map(str, _LENGTHS))
            return (
                f"estimate of two samples of {shape} tokens returns {name} {one_line(of_samples)}; they must be a list "
                "a sample, of a finite number a token"
            )
    return ""


def _loss_problem(algorithm: Algorithm) -> str:
    rows = sum(_LENGTHS) + _PADDING
    logprob_C = torch.linspace(-3, -1, rows).requires_grad_()
    value_C = torch.zeros(rows, requires_grad=True)
    values = _trial_values(algorithm, logprob_C, value_C)
    given = [None if x is None else x.detach().clone() for x in values]
    with _RefusePythonValues():
        result: Any = algorithm.loss(values)
        if not isinstance(result, tuple) or len(result) != 2:
            return f"loss returns {_described(result)}; it must return two, the losses and which were clipped"
        loss_C, clipped_C = algorithm.corrected_loss(values)
    for name, found, dtype in (("loss", loss_C, torch.float32), ("clipped", clipped_C, torch.bool)):
        if not isinstance(found, torch.Tensor) or found.shape != (rows,) or found.dtype != dtype:
            return f"its {name} is {_described(found)}; it must be {dtype}, one a token ([{rows}] here)"
    for name, before, after in zip(values._fields, given, values, strict=True):
        if not (before is None or after is None or torch.equal(before, after)):
            return f"its loss changes values.{name} in place; it must make new tensors"
    if problem := _dependence_problem(algorithm, values, loss_C):
        return problem
    logprob_grad_C, value_grad_C = None, None
    if loss_C.requires_grad:
        logprob_grad_C, value_grad_C = torch.autograd.grad(loss_C.sum(), (logprob_C, value_C), allow_unused=True)
    if logprob_grad_C is None:
        return "its loss has no gradient by the log-probs"
    if algorithm.has_critic and value_grad_C is None:
        return "it has a critic, and its loss has no gradient by the critic's values"
    return "" if logprob_grad_C.isfinite().all() else "its gradient by a log-prob is not finite"


def _dependence_problem(algorithm: Algorithm, values: TokenValues, loss_C: torch.Tensor) -> str:
    """What the losses of the first sequence depend on besides its own values: chance, or the other sequence's tokens
    and padding, of which there are others here, and more; "" if nothing."""
    again_C, _ = algorithm.corrected_loss(values)
    if not torch.allclose(loss_C, again_C, rtol=0, atol=0, equal_nan=True):
        return "its loss is another one when it is called again with the same values; it must depend on these alone"
    count, others = _LENGTHS[0], [-9.0, -7.0, -8.0, -8.0, -8.0]  # two tokens, and padding
    other_values = {
        name: torch.cat([value_C[:count].detach(), torch.tensor(others)])
        for name, value_C in values._asdict().items()
        if value_C is not None and name != "cu_completions"
    }
    other_values["old_logprob_C"][count:] = -2.0
    other_values["advantage_C"][count:] = torch.tensor([-2.0, -2.0, 0.0, 0.0, 0.0])
    if values.cu_completions is not None:
        other_values["cu_completions"] = torch.tensor([0, count, count + 2], dtype=torch.int32)
    other_loss_C, _ = algorithm.corrected_loss(values._replace(**other_values))
    if torch.allclose(loss_C[:count].detach(), other_loss_C[:count].detach(), equal_nan=True):
        return ""
    return (
        "its loss of a token depends on padding or on other sequences, which are those that happen to be packed with "
        "it; use values.sequence_mean or values.sequence_sum over its own tokens, or advantages over a step's"
    )


def _trial_values(algorithm: Algorithm, logprob_C: torch.Tensor, value_C: torch.Tensor) -> TokenValues:
    """Values of the trial's tokens, with all that the loss of `algorithm` may read."""
    constant_C = torch.full((len(value_C),), -2.0)
    advantage_C = torch.tensor([1.0] * _LENGTHS[0] + [-1.0] * _LENGTHS[1] + [0.0] * _PADDING)
    values = TokenValues(logprob_C, logprob_C, constant_C, advantage_C)
    if algorithm.indexes_sequences:
        values = values._replace(cu_completions=torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32))
    if algorithm.reads_reference:
        values = values._replace(ref_logprob_C=constant_C)
    if algorithm.has_critic:
        values = values._replace(value_C=value_C, old_value_C=constant_C, return_C=constant_C)
    return values


class _RefusePythonValues(TorchFunctionMode):
    """Raises `TypeError` where a tensor's value would become a Python number, as that cannot be traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_PYTHON:
            raise TypeError(
                f"a loss is traced once for all values, so no tensor may become Python's ({func.__name__}): "
                "torch.where(condition, a, b) in place of `if`, tensors in place of numbers"
            )
        return func(*args, **(kwargs or {}))


def _remedy(error: Exception) -> str:
    """The place in the user's file where `error` was raised, and a remedy if one is known."""
    remedy = ""
    if isinstance(error, AttributeError) and isinstance(error.obj, TokenValues):
        remedy = f"; TokenValues has {', '.join(TokenValues._fields)}, sequence_sum and sequence_mean"
    user_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_installed(frame.filename)]
    if not user_frames:
        return remedy
    frame = user_frames[-1]
    field = next((field for field in _ATTRIBUTE_OF_FIELD if f".{field}" in (frame.line or "")), None)
    if field and isinstance(error, (TypeError, AttributeError)) and "None" in str(error):
        remedy = f"; {field} is None unless the class says {_ATTRIBUTE_OF_FIELD[field]} = True"
    return f" ({Path(frame.filename).name}, line {frame.lineno}){remedy}"


def _is_installed(file: str) -> bool:
    """Whether a file belongs to this package or to torch."""
    return any(Path(file).is_relative_to(folder) for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def _described(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
