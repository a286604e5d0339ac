"""Three completions of two prompts, and what reward functions make of them."""

from __future__ import annotations

import asyncio
from typing import Any

from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet, Scores, Scoring

PROMPTS = ["p", "p", "q"]
TEXTS = ["a", "bb", "ccc"]
IDS = [[1], [2, 2], [3, 3, 3]]
ROWS = [{"answer": 1, "extra": "x"}, {"answer": 1, "extra": "x"}, {"answer": 2}]
ORIGINS = ["rows line 1", "rows line 1", "rows line 7"]


def score(*functions: Any, weights: tuple[float, ...] = (), where: str = "step 3", on_error: Any = "raise") -> Scores:
    weights = weights or (1.0,) * len(functions)
    rewards = [Reward(f.__name__, f, w) for f, w in zip(functions, weights, strict=True)]
    return RewardSet(rewards, on_error).score(Completions(PROMPTS, TEXTS, IDS, ROWS), Scoring(where, ORIGINS))


def length(completions, **kwargs):
    return [len(text) for text in completions]


async def slow_half(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def only_last(completions, **kwargs):
    return [None, None, 4.0]
