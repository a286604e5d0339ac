"""Samples of lengths that no model chose: an environment whose turn ends after so many tokens as its row's distribution
says. With random weights nothing else ends a sample before its limit."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

from lockstep.environments import End, Environment, Turn
from lockstep.types import SamplingParams


class Lognormal(Environment):
    """The row's prompt, completed once: by `mean` tokens on average, `sigma` of their logarithm, and no more than the
    run's limit. A sample's length follows from the row's seed and its number."""

    instant = True
    begin_together = False  # each sample's length is its own
    begun: ClassVar[Counter[int]] = Counter()

    def start(self, row: dict[str, Any], seed: int) -> Any:
        self.begun[seed] += 1
        draw = random.Random(f"{seed} {self.begun[seed]}")
        self.length = round(draw.lognormvariate(math.log(row["mean"]) - row["sigma"] ** 2 / 2, row["sigma"]))
        return row["prompt"]

    def until(self, sampling: SamplingParams) -> SamplingParams:
        return replace(sampling, max_completion_length=min(max(1, self.length), sampling.max_completion_length))

    def step(self, turn: Turn) -> End:
        return End(functions=True)

    def cut(self) -> End:
        return End(functions=True)
