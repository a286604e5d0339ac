"""Calls of an algorithm's methods that run on the host, whose results may come from a user's code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..config import LossConfig
from ..errors import InputError, refuse
from ..user_functions import failing_line, one_line


def call_method(config: LossConfig, method: Callable[..., Any], *args: Any, shape: Any = None) -> Any:
    """What a method of the algorithm that `config` names returns: finite numbers of a shape (`has_shape`).
    `InputError`, naming algorithm and method: a user's raised, or returned something else."""
    if ":" not in config.loss_type:  # a shipped one
        return method(*args)
    what = f"loss.loss_type {config.loss_type!r}: {method.__name__}"
    try:
        found = method(*args)
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error)}{failing_line(error)}"
        raise InputError(f"{what} raised {said}") from error
    form = "a finite number" if shape is None else f"finite numbers, so many in each list: {one_line(shape)}"
    refuse(not has_shape(found, shape), f"{what} returned {one_line(found)}; it must be {form}")
    return found


def has_shape(value: Any, shape: Any) -> bool:
    """Whether `value` is of finite numbers. `shape`: None for a number; an integer for a list of so many numbers; a
    list for a list of which each entry has its own shape."""
    try:
        if shape is None:
            return math.isfinite(value)
        if isinstance(shape, int):
            return len(value) == shape and all(map(math.isfinite, value))
        return len(value) == len(shape) and all(map(has_shape, value, shape))
    except (TypeError, ValueError, OverflowError):  # not lists, or not of numbers
        return False
