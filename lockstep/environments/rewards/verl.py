"""Adapts verl's reward signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`, to TRL's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ...errors import InputError
from ...user_functions import one_line
from .calls import Failed, RewardFunction, await_result, call_function, check_value, completion_text

MAX_CONCURRENT_CALLS = 64


def has_verl_signature(function: RewardFunction) -> bool:
    """Whether the function takes one completion as verl's `solution_str`, with its `ground_truth`."""
    return {"solution_str", "ground_truth"} <= set(inspect.signature(function).parameters)


def verl_reward(compute_score: RewardFunction, concurrency: int = MAX_CONCURRENT_CALLS) -> RewardFunction:
    """`compute_score` as a reward function for batches.

    A row's ground truth is its `reward_model["ground_truth"]`. The score is what `compute_score` returns, or the entry
    "score" of a dict, whose other entries are logged, except in a worker process. If it is async, at most `concurrency`
    calls run at once. A call that raises fails only its own completion.
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
        log_metric: Callable[[str, float], None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **_: Any,
    ) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        def scores(results: list[Any]) -> list[Any]:
            if callable(log_metric) and callable(log_extra):  # not columns of these names
                _log_other_entries(results, log_metric, log_extra)
            return [_score(result) for result in results]

        async def later(results: list[Any]) -> list[Any]:
            return scores(await _gather(results, compute_score, concurrency))

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
            return later(results)
        return scores(results)

    reward.__name__ = getattr(compute_score, "__name__", "compute_score")
    reward.check_row = lambda columns: ground_truth(columns.get("reward_model"))  # type: ignore[attr-defined]
    return reward


def ground_truth(value: Any) -> Any:
    """The ground truth in a row's `reward_model`. `InputError`: that is not an object with `ground_truth`."""
    if not isinstance(value, dict) or "ground_truth" not in value:
        found = one_line(value, repr)
        raise InputError(f"needs the column reward_model to hold an object with ground_truth; a row's is {found}")
    return value["ground_truth"]


async def _gather(results: list[Any], compute_score: RewardFunction, concurrency: int) -> list[Any]:
    semaphore = asyncio.Semaphore(concurrency)

    async def awaited(result: Any) -> Any:
        if not inspect.iscoroutine(result):
            return result
        async with semaphore:
            return await await_result(result, compute_score)

    return await asyncio.gather(*map(awaited, results))


def _log_other_entries(
    results: list[Any], log_metric: Callable[[str, float], None], log_extra: Callable[[str, list[Any]], None]
) -> None:
    """Log the entries of results that are dicts, except for "score"; of numbers the mean, too. Entries that cannot be
    recorded are left out, as they are no rewards."""
    dicts = [result if isinstance(result, dict) else {} for result in results]
    for name in dict.fromkeys(name for result in dicts for name in result if name != "score"):
        values = [result.get(name) for result in dicts]
        with suppress(ValueError):
            log_extra(name, values)
            for number in (number for value in values if isinstance(number := check_value(value), float)):
                log_metric(name, number)


def _score(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    return result.get("score", Failed(f"returned a dict without score: {sorted(map(str, result))}"))
