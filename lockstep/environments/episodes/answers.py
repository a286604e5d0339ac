"""Validation of what environments return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InputError
from ...types import Trajectory
from ...user_functions import copy_nested, is_unicode, one_line
from ..calls import Failure
from ..environment import UNNAMED_REWARD, Branch, End, Reward, named_rewards
from ..rewards.calls import MAX_VALUE, RESERVED_NAMES, check_value


def is_chat(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_message, given))


def _is_message(message: Any) -> bool:
    return _has_role(message) and isinstance(message.get("content", ""), (str, list))


def _has_role(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def is_tokens(given: Any) -> bool:
    return isinstance(given, list) and set(map(type, given)) == {int}


def _is_given(given: Any) -> bool:
    return isinstance(given, str) or is_chat(given) or is_tokens(given)


def _described(value: Any) -> str:
    return f"{type(value).__name__} {one_line(value, repr)}"


def step_error(given: Any) -> str:
    """What is wrong with a result of `step` other than an end; "" if it is valid."""
    given = given.given if isinstance(given, Branch) else given
    if not _is_given(given):
        forms = "text, messages with role and content, token ids, a Branch of these, Next(given, reward) or an End"
        return f"step returned {_described(given)}; it must be {forms}"
    texts = [given] if isinstance(given, str) else [str(m.get("content")) for m in given if isinstance(m, dict)]
    return "" if all(map(is_unicode, texts)) else "step returned text that is no valid Unicode (half a surrogate pair)"


def prompt_failure(prompts: list[Any], alike: bool) -> Failure | None:
    """What is wrong with the prompts of a group's samples, which must be equal if `alike`; None if they are valid."""
    for prompt in prompts:
        if not _is_given(prompt):
            forms = "text, messages with role and content, or token ids"
            return Failure(f"start returned {_described(prompt)}; it must be {forms}")
    if alike and any(other != prompts[0] for other in prompts):
        return Failure("start returned other prompts for samples of one group; it may depend on row and seed alone")
    return None


def end_error(end: Any) -> str:
    """What is wrong with an end; "" if it is valid."""
    if not isinstance(end, End):
        return f"cut returned {_described(end)}; it must be an End"
    if not isinstance(end.columns, Mapping) or not all(isinstance(name, str) for name in end.columns):
        return f"its End has columns={one_line(end.columns, repr)}; they must be values by name"
    reserved = next((name for name in RESERVED_NAMES if name in end.columns), None)
    if reserved:
        return f"its End has the column {reserved!r}, which is the name of a reward argument; rename it"
    completion = end.completion
    is_messages = isinstance(completion, list) and all(map(_has_role, completion))
    if not (completion is None or isinstance(completion, str) or is_messages):
        return f"its End has completion={one_line(completion, repr)}; it must be messages with role and content"
    try:
        copy_nested(end.completion, "its End's completion")
        copy_nested(dict(end.columns), "one of its End's columns")
    except InputError as error:
        return str(error)
    return "" if end.reward is None else reward_error(end.reward)


def reward_error(reward: Any) -> str:
    """What is wrong with a reward; "" if it is valid."""
    named = reward if isinstance(reward, Mapping) else {UNNAMED_REWARD: reward}
    if all(isinstance(name, str) and is_unicode(name) for name in named) and all(map(_is_value, named.values())):
        return ""
    what = f"a finite number, or several by name (at most {MAX_VALUE:g})"
    return f"its reward is {one_line(reward, repr)}; it must be {what}"


def _is_value(value: Any) -> bool:
    """Whether `value` is a number that fits the loss, also when summed over any number of turns and names."""
    try:
        return isinstance(check_value(value), float)
    except Exception:  # of a user-defined number
        return False


def set_rewards(trajectory: Trajectory, last: Reward | None) -> None:
    """Add `last` to the rewards of the last turn, and set the trajectory's, which are the sums over turns."""
    turns, totals = trajectory.turns, dict[str, float]()
    if last is not None:
        turns[-1].rewards = _sum_by_name(turns[-1].rewards or {}, named_rewards(last))
    for turn in turns:
        totals = _sum_by_name(totals, turn.rewards or {})
    trajectory.rewards, trajectory.reward = dict(totals), sum(totals.values())


def _sum_by_name(rewards: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    sums = dict(rewards)
    for name, value in others.items():
        sums[name] = sums[name] + value if name in sums else value
    return sums
