"""Compares mathematical answers by value, with the `math-verify` package: 1/2, 0.5 and \\frac{1}{2} are equal."""

from __future__ import annotations

import importlib.util
import threading
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
    row's is in the first column present of `solution`, `answer`, `ground_truth` and verl's `reward_model`: alone, in
    LaTeX, or after GSM8K's `####`."""
    verl = None if reward_model is None else [verl_ground_truth(model) for model in reward_model]
    given = next((column for column in (solution, answer, ground_truth, verl) if column is not None), None)
    if given is None:
        raise InputError(f"needs a column with the answer: {', '.join(ANSWER_COLUMNS)}")
    _require_package()
    return [_score(completion_text(c), str(a)) for c, a in zip(completions, given, strict=True)]


def _check_row(columns: dict[str, Any]) -> None:
    if "reward_model" in columns and not any(column in columns for column in ANSWER_COLUMNS[:-1]):
        verl_ground_truth(columns["reward_model"])


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
