"""A calculator that a model may ask: a turn that ends in `a + b =` is answered, any other is the model's last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from ..environment import End, Environment, Turn

_ASKED = re.compile(r"(-?\d{1,15}) *([-+*]) *(-?\d{1,15}) *= *$")
_WORKED = re.compile(r"(-?\d+ *[-+*] *-?\d+ *=) *-?\d+\s*")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Calculator(Environment):
    """For tasks that are solved by sums (`word-arithmetic`, `gsm8k`), whose reward functions score all turns as one
    text. Worked examples ask for each of their sums."""

    instant: ClassVar[bool] = True

    def step(self, turn: Turn) -> str | End:
        asked = _ASKED.search(turn.text)
        if asked is None:
            return End()
        a, operation, b = asked.groups()
        return f" {_OPERATIONS[operation](int(a), int(b))}\n"

    def cut(self) -> End:
        return End()

    @classmethod
    def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Sequence[str]:
        return [part for part in _WORKED.sub(r"\1\0", worked_example).split("\0") if part]
