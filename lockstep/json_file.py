"""Writes any Python values as JSON, and reads JSON files of any origin."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError

_PLAIN = {int, bool, str, type(None)}


def to_json(value: Any, indent: int | None = None) -> str:
    """`value` as standard JSON text, converted by `to_plain`."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def to_plain(value: Any) -> Any:
    """`value` in types that JSON has: arrays and tensors become lists, other objects their `str`. NaN and infinities,
    which JSON lacks, become "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if _is_plain(value) else [to_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return to_plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _is_plain(values: Sequence[Any]) -> bool:
    """Whether a list needs no conversion: a fast path for the millions of numbers in a step's rollouts."""
    kinds = set(map(type, values))
    return kinds <= _PLAIN or (kinds == {float} and all(map(math.isfinite, values)))


def read_json(path: Path) -> Any:
    """The JSON value in a file; a byte order mark is ignored.

    Raises:
        OSError: it is missing, not a regular file, or cannot be read.
        ValueError: it is not UTF-8, not JSON, or nested deeper than can be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def read_json_object(path: Path) -> dict:
    """The JSON object in a file of a model folder. `InputError`: it does not hold one."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise InputError(f"{path}: missing (is this a Hugging Face model folder?)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value
