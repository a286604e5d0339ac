"""SumDigits: add up all digits of a few two-digit numbers. The default task; it needs no data."""

from __future__ import annotations

import itertools
import re
from typing import Any

from ..base import Problem, draw
from ..rewards.calls import completion_text
from ..rewards.reward_set import Reward, RewardSet
from .generated import GeneratedTask, Split, split_of

# 146 to 154 tokens with a Qwen tokenizer, including the numbers.
PROMPT = """\
Add up all the digits of the numbers in the list. Every digit counts on its own: the number 47 adds 4 and 7, so it \
is worth 11 in all. First write down the digits one by one, then add them together.

Give the result as a whole number between answer tags, like <answer>N</answer>. Only the last tagged number is \
graded.

Example
Numbers: 31, 58, 20
Digits: 3 + 1 + 5 + 8 + 2 + 0 = 19
<answer>19</answer>

Now it is your turn.
Numbers: {numbers}
Digits:"""

EASY_PROMPT = "{numbers}="

TAG_REWARD = 0.3  # on top of 1.0 for the right answer

_TAGGED_INTEGER = re.compile(r"<answer>\s*(-?[0-9]+)\s*</answer>")


class SumDigits(GeneratedTask):
    """Two to four numbers, or always two if `easy`. The numbers alone, in any order, decide what is held out."""

    name = "sum-digits"

    def __init__(
        self, seed: int, validation_seed: int, validation_prompts: int, easy: bool, rewards: RewardSet | None = None
    ) -> None:
        super().__init__(seed, validation_seed, validation_prompts, rewards or RewardSet(list(REWARDS)))
        self._easy = easy

    def draw_problem(self, split: Split, *key: int | str) -> Problem:
        draws = (self._numbers(*key, attempt) for attempt in itertools.count())
        numbers = next(numbers for numbers in draws if split_of_numbers(numbers) == split)
        digits = "".join(map(str, numbers))
        answer = str(sum(map(int, digits)))
        tag = f"<answer>{answer}</answer>"
        if self._easy:
            return Problem(EASY_PROMPT.format(numbers=" ".join(map(str, numbers))), {"answer": answer}, tag)
        prompt = PROMPT.format(numbers=", ".join(map(str, numbers)))
        return Problem(prompt, {"answer": answer}, f" {' + '.join(digits)} = {answer}\n{tag}")

    def _numbers(self, *key: int | str) -> list[int]:
        count = 2 if self._easy else 2 + draw(*key, "count") % 3
        return [10 + draw(*key, index) % 90 for index in range(count)]


def split_of_numbers(numbers: list[int]) -> Split:
    """The split of problems with these numbers, in any order."""
    return split_of(draw("held out", *sorted(numbers)))


def correct(completions: list[Any], answer: list[str | int], **_: Any) -> list[float]:
    """1.0 if the last tagged integer is the answer."""
    tags = [_tagged_integers(c) for c in completions]
    # Compared as text: int() refuses thousands of digits.
    return [float(bool(t) and (t[-1].lstrip("0") or "0") == str(a)) for t, a in zip(tags, answer, strict=True)]


def tagged(completions: list[Any], **_: Any) -> list[float]:
    """1.0 if there is a tagged integer at all (weight `TAG_REWARD`)."""
    return [float(bool(_tagged_integers(c))) for c in completions]


def _tagged_integers(completion: Any) -> list[str]:
    return _TAGGED_INTEGER.findall(completion_text(completion))


REWARDS = (
    Reward("correct", correct, spec=f"{__name__}:correct"),
    Reward("tagged", tagged, TAG_REWARD, spec=f"{__name__}:tagged"),
)
