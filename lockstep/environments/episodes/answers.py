"""Validation of what environments return."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ...errors import InputError
from ...types import Trajectory
from ...user_functions import copy_nested, is_unicode, one_line
from ..calls import Failure
from ..environment import PLAIN, Branch, End, Reward, by_name
from ..rewards.calls import MAX_VALUE, RESERVED_NAMES


def is_chat(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_message, given))


def _is_message(message: Any) -> bool:
    return _has_role(message) and isinstance(message.get("content", ""), (str, list))


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def is_tokens(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}


def is_given(given: Any) -> bool:
    return isinstance(given, str) or is_chat(given) or is_tokens(given)


def wrong_step(given: Any) -> str:
    """What is wrong with a result of `step` other than an end; "" if it is valid."""
    given = given.given if isinstance(given, Branch) else given
    if not is_given(given):
        kind = f"{type(given).__name__} {one_line(given, repr)}"
        forms = "text, messages with role and content, token ids, a Branch of these, Next(given, reward) or an End"
        return f"step returned {kind}; it must be {forms}"
    texts = [given] if isinstance(given, str) else [str(m.get("content")) for m in given if isinstance(m, dict)]
    return "" if all(map(is_unicode, texts)) else "step returned text that is no valid Unicode (half a surrogate pair)"


def unlike(given: list[Any], alike: bool) -> Failure | None:
    """What is wrong with the prompts of a group's samples, which must be equal if `alike`; None if they are valid."""
    for one in given:
        if not is_given(one):
            kind = f"{type(one).__name__} {one_line(one, repr)}"
            return Failure(f"start returned {kind}; it must be text, messages with role and content, or token ids")
    if alike and any(other != given[0] for other in given):
        return Failure("start returned other prompts for samples of one group; it may depend on row and seed alone")
    return None


def wrong_end(end: Any) -> str:
    """What is wrong with an end; "" if it is valid."""
    if not isinstance(end, End):
        return f"cut returned {type(end).__name__} {one_line(end, repr)}; it must be an End"
    if not isinstance(end.columns, Mapping) or not all(isinstance(name, str) for name in end.columns):
        return f"its End has columns={one_line(end.columns, repr)}; they must be values by name"
    if taken := [name for name in RESERVED_NAMES if name in end.columns]:
        return f"its End has the column {taken[0]!r}, which is the name of a reward argument; rename it"
    said = end.completion
    if not (said is None or isinstance(said, str) or (isinstance(said, list) and all(map(_has_role, said)))):
        return f"its End has completion={one_line(said, repr)}; it must be messages with role and content"
    try:
        copy_nested(end.completion, "its End's completion")
        copy_nested(dict(end.columns), "one of its End's columns")
    except InputError as error:
        return str(error)
    return "" if end.reward is None else wrong_reward(end.reward)


def wrong_reward(reward: Any) -> str:
    """What is wrong with a reward; "" if it is valid."""
    named = reward if isinstance(reward, Mapping) else {PLAIN: reward}
    if all(isinstance(name, str) and is_unicode(name) for name in named) and all(map(_is_value, named.values())):
        return ""
    what = f"a finite number, or several by name (at most {MAX_VALUE:g})"
    return f"its reward is {one_line(reward, repr)}; it must be {what}"


def _is_value(value: Any) -> bool:
    """Whether `value` is a number that fits the loss, also when summed over any number of turns and names."""
    try:
        return isinstance(value, Real) and abs(float(value)) <= MAX_VALUE  # not for NaN
    except Exception:  # an integer too large for a float, or a user-defined number
        return False


def count(last: Reward | None, trajectory: Trajectory) -> None:
    """Set the reward of the last turn, and the trajectory's, which is the sum over turns."""
    turn, total = trajectory.turns[-1], dict[str, float]()
    if last is not None:
        turn.rewards = _added(turn.rewards or {}, by_name(last))
    for turn in trajectory.turns:
        total = _added(total, turn.rewards or {})
    trajectory.rewards, trajectory.reward = dict(total), sum(total.values())


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {**one, **{name: one[name] + value if name in one else value for name, value in other.items()}}
