"""GSM8K (Cobbe et al. 2021): grade-school problems whose answer is one number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from ...errors import InputError
from ..base import Problem
from ..rewards.calls import completion_text

# An optional sign (not a subtraction), digits with or without thousands separators, optional decimals; or decimals
# alone, as in $.50, which no word or dot precedes.
_NUMBER = re.compile(r"(?<![0-9])-?(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)")

_MARKER = "####"


def gsm8k_reward(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1.0 if the completion's final number equals the answer's, else 0.0; None for an answer without a number."""
    expected = [final_number(str(a)) for a in answer]
    found = [final_number(completion_text(c)) for c in completions]
    return [None if e is None else float(f == e) for e, f in zip(expected, found, strict=True)]


def final_number(text: str) -> Decimal | None:
    """The first number after the last "####", or without that mark the last number; None if there is none."""
    _, marker, tail = text.rpartition(_MARKER)
    numbers = _NUMBER.findall(tail)
    if not numbers:
        return None
    return Decimal((numbers[0] if marker else numbers[-1]).replace(",", ""))


def check_answer(problem: Problem) -> None:
    """Raise `InputError` naming the row if its `answer` does not end in "#### number"."""
    answer = problem.columns.get("answer")
    if not isinstance(answer, str) or _MARKER not in answer or final_number(answer) is None:
        raise InputError(
            f"{problem.origin}: answer must be a text that ends with the final number after ####; rows of another "
            "form, verl's among them, train by the recipe dataset, with --reward math"
        )
