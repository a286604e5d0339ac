"""Compares mathematical answers by value, with the `math-verify` package: 1/2, 0.5 and \\frac{1}{2} are equal."""

from __future__ import annotations

import importlib.util
import math
import threading
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from ...errors import InputError
from .calls import completion_text
from .verl import ground_truth as verl_ground_truth

# Columns that may hold the answer, in the order they are looked for.
ANSWER_COLUMNS = ("solution", "answer", "ground_truth", "reward_model")

_TIMEOUT_SECONDS = 5  # for parsing one text, or comparing two


def math_reward(
    completions: list[Any],
    solution: list[Any] | None = None,
    answer: list[Any] | None = None,
    ground_truth: list[Any] | None = None,
    reward_model: list[Any] | None = None,
    **_: Any,
) -> list[float | None]:
    """1.0 if the completion's final answer equals the row's, else 0.0; None for a row whose answer cannot be parsed.
    The completion's answer is its boxed expression, else its last one; reasoning before `</think>` does not count. The
    row's is in the first that it has of `solution`, `answer`, `ground_truth` and verl's `reward_model`: alone, in
    LaTeX, or after GSM8K's `####`."""
    columns = [column for column in (solution, answer, ground_truth) if column is not None]
    if not columns and reward_model is None:
        raise InputError(f"needs a column with the answer: {', '.join(ANSWER_COLUMNS)}")
    _require_package()
    models = [None] * len(completions) if reward_model is None else reward_model
    rows = zip(completions, models, *columns, strict=True)
    return [_score(completion_text(completion), _answer(given, model)) for completion, model, *given in rows]


def _answer(given: Sequence[Any], reward_model: Any) -> str:
    """The text of a row's answer: the first that is given, or else the one in verl's `reward_model`; empty for none."""
    found = next((value for value in given if value is not None), None)
    if found is None and reward_model is not None:
        found = verl_ground_truth(reward_model)
    if isinstance(found, float) and math.isfinite(found):
        return f"{Decimal(repr(float(found))):f}"  # in 1e-05, the e would be read as a number of its own
    return "" if found is None else str(found)


def _check_row(columns: dict[str, Any]) -> None:
    others, model = [columns[name] for name in ANSWER_COLUMNS[:-1] if name in columns], columns.get("reward_model")
    if "reward_model" in columns and not others:
        verl_ground_truth(model)
    _answer(others, model)


def _require_package() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise InputError("needs the package math-verify: pip install 'lockstep-rl[math]'")


math_reward.check_row, math_reward.require = _check_row, _require_package  # type: ignore[attr-defined]


def _score(completion: str, answer: str) -> float | None:
    from math_verify import verify

    expected = _parse_answer(answer)
    if not expected:
        return None
    return float(verify(expected, _parse(completion.rpartition("</think>")[2]), timeout_seconds=_timeout()))


def _parse_answer(answer: str) -> list[Any]:
    answer = answer.rpartition("####")[2].strip()
    marked = "$" in answer or "\\boxed" in answer or "\\[" in answer or "\\(" in answer
    return _parse(answer if marked else f"\\boxed{{{answer}}}") if answer else []


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=_timeout())


def _timeout() -> int | None:
    """The time limit, if this is the main thread: the library uses an alarm signal, which no other thread receives."""
    return _TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
