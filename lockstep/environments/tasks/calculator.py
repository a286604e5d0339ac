"""A calculator for the model: a turn that ends in `1 + 2 * 3 =` is answered, and any other is the last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from ..environment import End, Environment, Turn

_NUMBER, _MOST = r"-?\d{1,15}", 63
_SUM = rf"{_NUMBER}(?: *[-+*] *{_NUMBER}){{1,{_MOST}}} *="
_ASKED = re.compile(rf"({_SUM}) *$")
_WORKED = re.compile(rf"({_SUM}) *-?\d+[^\S\n]*\n?")
_PARTS = re.compile(rf" *([-+*]?) *({_NUMBER})")


class Calculator(Environment):
    """For tasks that are solved by arithmetic (`word-arithmetic`, `gsm8k`), whose reward functions score all turns as
    one text. In worked examples, the model asks for each result."""

    instant: ClassVar[bool] = True

    def step(self, turn: Turn) -> str | End:
        asked = _ASKED.search(turn.text)
        if asked is None:
            return End()
        return f" {total(asked[1])}\n"

    def cut(self) -> End:
        return End()

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Sequence[str]:
        return [part for part in _WORKED.sub(r"\1\0", worked_example).split("\0") if part]


def total(asked: str) -> int:
    """The value of `1 + 2 * 3 =`: products first, no brackets."""
    terms: list[int] = []
    for operation, number in _PARTS.findall(asked):
        if operation == "*":
            terms[-1] *= int(number)
        else:
            terms.append(-int(number) if operation == "-" else int(number))
    return sum(terms)
