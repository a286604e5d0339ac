"""Word arithmetic: a short story of additions and subtractions, generated from templates. It needs no data."""

from __future__ import annotations

import itertools

from ..base import Problem, draw
from ..rewards.reward_set import RewardSet
from .generated import GeneratedTask, Split, split_of
from .sum_digits import REWARDS

_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gwen", "Hugo")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells", "stamps", "tickets")
_OPENINGS = ("{name} has {n} {things}.", "There are {n} {things} in {name}'s bag.", "{name} starts with {n} {things}.")
_GAINS = ("{name} buys {n} more.", "A friend gives {name} {n} more.", "{name} finds {n} others.", "Then {n} are added.")
_LOSSES = ("{name} loses {n}.", "{name} gives {n} away.", "Then {n} of them are sold.", "{name} puts {n} aside.")
_QUESTION = "How many {things} are there now?"
_ANSWER_RULE = "End with <answer>N</answer>."

Steps = list[int]  # the first amount, then the changes


class WordArithmetic(GeneratedTask):
    """An amount up to 60 and two or three changes, never below 0. The numbers alone decide what is held out."""

    name = "word-arithmetic"

    def __init__(
        self, seed: int, validation_seed: int, validation_prompts: int, rewards: RewardSet | None = None
    ) -> None:
        super().__init__(seed, validation_seed, validation_prompts, rewards or RewardSet(list(REWARDS)))

    def draw_problem(self, split: Split, *key: int | str) -> Problem:
        candidates = (_steps(*key, attempt) for attempt in itertools.count())
        steps = next(steps for steps in candidates if split_of_steps(steps) == split)
        amounts = list(itertools.accumulate(steps))
        sums = [
            f"{before} {'+' if change > 0 else '-'} {abs(change)} = {after}"
            for before, change, after in zip(amounts, steps[1:], amounts[1:], strict=False)
        ]
        worked = "\n".join([*sums, f"<answer>{amounts[-1]}</answer>"])
        return Problem(_story(steps, *key), {"answer": str(amounts[-1])}, worked)


def split_of_steps(steps: Steps) -> Split:
    """The split of stories with these numbers."""
    return split_of(draw("word arithmetic", *steps))


def _steps(*key: int | str) -> Steps:
    steps = [10 + draw(*key, "first") % 51]
    for i in range(2 + draw(*key, "count") % 2):
        size, total = 2 + draw(*key, i, "size") % 29, sum(steps)
        taken = draw(*key, i, "sign") % 2 == 1 and size <= total
        steps.append(-size if taken else size)
    return steps


def _story(steps: Steps, *key: int | str) -> str:
    def pick(choices: tuple[str, ...], *part: int | str) -> str:
        return choices[draw(*key, *part) % len(choices)]

    words = {"name": pick(_NAMES, "name"), "things": pick(_THINGS, "things")}
    sentences = [pick(_OPENINGS, "opening").format(n=steps[0], **words)]
    for i, change in enumerate(steps[1:]):
        sentences.append(pick(_GAINS if change > 0 else _LOSSES, i, "told").format(n=abs(change), **words))
    return " ".join([*sentences, _QUESTION.format(**words), _ANSWER_RULE]) + "\n"
