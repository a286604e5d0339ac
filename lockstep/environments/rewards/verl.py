"""Adapts verl's reward signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`, to TRL's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any

from ...errors import InputError
from ...user_functions import one_line
from .calls import Failed, RewardFunction, await_result, call_function, completion_text

MAX_CONCURRENT_CALLS = 64


def has_verl_signature(function: RewardFunction) -> bool:
    """Whether the function takes one completion as verl's `solution_str`, with its `ground_truth`."""
    return {"solution_str", "ground_truth"} <= set(inspect.signature(function).parameters)


def verl_reward(compute_score: RewardFunction, concurrency: int = MAX_CONCURRENT_CALLS) -> RewardFunction:
    """`compute_score` as a reward function for batches.

    A row's ground truth is its `reward_model["ground_truth"]`. The score is what `compute_score` returns, or the entry
    "score" of a dict. If it is async, at most `concurrency` calls run at once. A call that raises fails only its own
    completion.
    """
    parameters = inspect.signature(compute_score).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def call(arguments: dict[str, Any]) -> Any:
        return call_function(compute_score, {k: v for k, v in arguments.items() if takes_all or k in names})

    def reward(
        completions: list[Any],
        reward_model: list[Any],
        data_source: list[Any] | None = None,
        extra_info: list[Any] | None = None,
        **_: Any,
    ) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        results = [
            call(
                {
                    "data_source": data_source[index] if data_source else None,
                    "solution_str": completion_text(completion),
                    "ground_truth": ground_truth(reward_model[index]),
                    "extra_info": {} if extra_info is None or extra_info[index] is None else extra_info[index],
                }
            )
            for index, completion in enumerate(completions)
        ]
        if any(inspect.iscoroutine(result) for result in results):
            return _gather_scores(results, compute_score, concurrency)
        return [_score(result) for result in results]

    reward.__name__ = getattr(compute_score, "__name__", "compute_score")
    reward.check_row = lambda columns: ground_truth(columns.get("reward_model"))  # type: ignore[attr-defined]
    return reward


def ground_truth(value: Any) -> Any:
    """The ground truth in a row's `reward_model`. `InputError`: that is not an object with `ground_truth`."""
    if not isinstance(value, dict) or "ground_truth" not in value:
        found = one_line(value, repr)
        raise InputError(f"needs the column reward_model to hold an object with ground_truth; a row's is {found}")
    return value["ground_truth"]


async def _gather_scores(results: list[Any], compute_score: RewardFunction, concurrency: int) -> list[Any]:
    semaphore = asyncio.Semaphore(concurrency)

    async def awaited_score(result: Any) -> Any:
        if not inspect.iscoroutine(result):
            return _score(result)
        async with semaphore:
            return _score(await await_result(result, compute_score))

    return await asyncio.gather(*map(awaited_score, results))


def _score(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return result.get("score", Failed(f"returned a dict without score: {sorted(map(str, result))}"))
