"""What environments may answer, and what is wrong with what they do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..user_functions import one_line
from .calls import Failure
from .environment import End


def is_chat(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(message, dict) for message in given)


def is_tokens(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def is_given(given: Any) -> bool:
    return isinstance(given, str) or is_chat(given) or is_tokens(given)


def unlike(given: list[Any], alike: bool) -> Failure | None:
    """What is wrong with the prompts of a group's samples; None if all is well."""
    for one in given:
        if not is_given(one):
            kind = f"{type(one).__name__} {one_line(one, repr)}"
            return Failure(f"start returned {kind}; it must be text, messages or token ids")
    if alike and any(other != given[0] for other in given):
        return Failure("start returned other prompts for samples of one group; it may depend on row and seed alone")
    return None


def wrong_end(end: Any) -> str:
    """What is wrong with an end; nothing if all is well."""
    if not isinstance(end, End):
        return f"cut returned {type(end).__name__} {one_line(end, repr)}; it must be an End"
    values = end.reward.values() if isinstance(end.reward, Mapping) else [end.reward]
    for value in values:
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if not number and not (value is None and end.reward is None):
            return f"its reward is {one_line(end.reward, repr)}; it must be a finite number, or several by name"
    return ""
