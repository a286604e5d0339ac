"""Reward functions: finding them by name, calling them, checking what they return, and combining them.

A reward function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, plain or async: every
argument is a list with one entry a completion, and so is the result. A conversational prompt's completion is
`[{"role": "assistant", "content": text}]`. None means that the function does not apply to that completion.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InputError

RewardFunction = Callable[..., Any]

# What every reward is offered besides the data's columns, which may not take these names.
RESERVED_NAMES = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Reward:
    """A reward function with its name in metrics and messages and its weight in the sum."""

    name: str
    function: RewardFunction
    weight: float = 1.0

    def accepted(self, columns: Iterable[str]) -> list[str]:
        """The arguments to pass: of the reserved names and `columns`, those the function takes by name.

        Raises `InputError` when the function requires one that is not there.
        """
        offered = [*RESERVED_NAMES, *columns]
        parameters = inspect.signature(self.function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
        if missing:
            raise InputError(
                f"reward {self.name} requires the column {missing[0]!r}; the data has {', '.join(columns) or 'none'}"
            )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return offered
        return [p.name for p in named if p.name in offered]

    def __call__(self, arguments: dict[str, list[Any]], batch: str) -> list[float | None]:
        """The function's value for each completion; `batch` says in messages which completions these are."""
        names = self.accepted([name for name in arguments if name not in RESERVED_NAMES])
        try:
            result = _wait(self.function(**{name: list(arguments[name]) for name in names}))
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"reward {self.name} raised {type(error).__name__}: {error} on the {batch}") from error
        return self._checked(result, len(arguments["completions"]), batch)

    def _checked(self, result: Any, count: int, batch: str) -> list[float | None]:
        result = result.tolist() if hasattr(result, "tolist") else result  # an array or tensor
        if not isinstance(result, (list, tuple)):
            raise InputError(
                f"reward {self.name} returned {type(result).__name__} for the {batch}; "
                "it must return a list with a number or None for each"
            )
        if len(result) != count:
            raise InputError(
                f"reward {self.name} returned {len(result)} values for the {batch}; it must return one for each"
            )
        return [self._number(value, index, batch) for index, value in enumerate(result)]

    def _number(self, value: Any, index: int, batch: str) -> float | None:
        if value is None:
            return None
        number = value.tolist() if hasattr(value, "tolist") else value  # an array's or tensor's scalar
        try:
            if isinstance(number, Real) and math.isfinite(number):
                return float(number)
        except OverflowError:  # an int beyond float's range
            pass
        raise InputError(
            f"reward {self.name} returned {value!r} for completion {index} of the {batch}; "
            "it must be a finite number or None"
        )


class RewardSet:
    """One or several reward functions, combined by a weighted sum over those that apply."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """Raises `InputError` for a weight that is not finite."""
        assert rewards and len({reward.name for reward in rewards}) == len(rewards)
        for reward in rewards:
            if not math.isfinite(reward.weight):
                raise InputError(f"the weight of reward {reward.name} is {reward.weight}; it must be finite")
        self.rewards = tuple(rewards)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise `InputError` when a function requires a column that is not one of `columns`."""
        columns = list(columns)
        for reward in self.rewards:
            reward.accepted(columns)

    def score(
        self,
        prompts: Sequence[str | list[dict[str, Any]]],
        completions_text: Sequence[str],
        completion_ids: Sequence[list[int]],
        columns_rows: Sequence[dict[str, Any]],
        where: str = "",
    ) -> tuple[list[dict[str, float | None]], list[float]]:
        """Score completions; every argument but `where` has one entry a completion.

        Returns each function's value by name, and the weighted sum over the functions that apply. A column goes to
        the functions when every row has it. `where` says in messages what was scored, for example "step 3".

        Raises `InputError` when a function raises, returns the wrong number of values or one that is no finite
        number, or when none applies to a completion.
        """
        if not prompts:
            return [], []
        batch = f"{len(prompts)} completions" + (f" of {where}" if where else "")
        columns = [name for name in columns_rows[0] if all(name in row for row in columns_rows)]
        arguments: dict[str, list[Any]] = {name: [row[name] for row in columns_rows] for name in columns}
        arguments["prompts"] = list(prompts)
        arguments["completions"] = [_in_prompts_form(p, t) for p, t in zip(prompts, completions_text, strict=True)]
        arguments["completion_ids"] = list(completion_ids)
        values = {reward.name: reward(arguments, batch) for reward in self.rewards}
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return rows, [self._total(row, index, batch) for index, row in enumerate(rows)]

    def _total(self, row: dict[str, float | None], index: int, batch: str) -> float:
        terms = [r.weight * value for r in self.rewards if (value := row[r.name]) is not None]
        if not terms:
            raise InputError(
                f"no reward applies to completion {index} of the {batch}: {', '.join(row)} returned None; "
                "at least one must return a number"
            )
        return sum(terms)


def load_rewards(specs: Sequence[str], weights: Sequence[float] = ()) -> RewardSet:
    """The reward functions that `specs` name, with `weights` (all ones when empty).

    Each has its function's name, or the whole spec where two share that. Raises `InputError` for a spec given twice
    and whatever `load_reward` refuses.
    """
    for index, spec in enumerate(specs):
        if spec in specs[:index]:
            raise InputError(f"reward {spec!r} is given twice; give it once, with a weight")
    functions = [load_reward(spec) for spec in specs]
    names = [getattr(f, "__name__", spec) for f, spec in zip(functions, specs, strict=True)]
    names = [spec if names.count(name) > 1 else name for name, spec in zip(names, specs, strict=True)]
    return RewardSet([Reward(*row) for row in zip(names, functions, weights or [1.0] * len(specs), strict=True)])


def load_reward(spec: str) -> RewardFunction:
    """The reward function named `module:function` or `path.py:function`; verl's signature is adapted.

    Raises `InputError` when the spec has another form, the file or module cannot be imported, or it has no such
    function.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise InputError(f"reward {spec!r} must be module:function or path.py:function")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        raise InputError(f"reward {spec!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"reward {spec!r}: importing {source} raised {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"reward {spec!r}: {source} has no function {name!r}")
    return verl_reward(function) if has_verl_signature(function) else function


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own, once a path, so that two of its functions share its state."""
    if not path.is_file():
        raise FileNotFoundError(f"file {path} does not exist")
    name = f"_reward_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion, whichever form the prompt gave it."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _in_prompts_form(prompt: str | list[dict[str, Any]], text: str) -> str | list[dict[str, Any]]:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _wait(result: Any) -> Any:
    """The value of an async reward's coroutine; anything else as it is."""
    if not inspect.iscoroutine(result):
        return result
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result)
    with ThreadPoolExecutor(1) as pool:  # the caller is inside a loop, as in a notebook
        return pool.submit(asyncio.run, result).result()


def verl_reward(compute_score: RewardFunction) -> RewardFunction:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` with TRL's signature.

    Each row's ground truth is its `reward_model["ground_truth"]`. The score is what `compute_score` returns, or the
    entry "score" of a dict; it may be async, and then its calls run concurrently.
    """
    parameters = inspect.signature(compute_score).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}

    def reward(
        completions: list[Any],
        reward_model: list[Any],
        data_source: list[Any] | None = None,
        extra_info: list[Any] | None = None,
        **_: Any,
    ) -> list[Any] | Coroutine[Any, Any, list[Any]]:
        results = []
        for index, completion in enumerate(completions):
            arguments = {
                "data_source": data_source[index] if data_source else None,
                "solution_str": completion_text(completion),
                "ground_truth": reward_model[index]["ground_truth"],
                "extra_info": extra_info[index] if extra_info else {},
            }
            results.append(compute_score(**{k: v for k, v in arguments.items() if takes_all or k in names}))
        if any(inspect.iscoroutine(result) for result in results):
            return _gather_scores(results)
        return [_verl_score(result) for result in results]

    reward.__name__ = getattr(compute_score, "__name__", "compute_score")
    return reward


def has_verl_signature(function: RewardFunction) -> bool:
    """Whether the function takes one completion as verl's `solution_str`, with its `ground_truth`."""
    return {"solution_str", "ground_truth"} <= set(inspect.signature(function).parameters)


async def _gather_scores(results: list[Any]) -> list[Any]:
    return [_verl_score(result) for result in await asyncio.gather(*results)]


def _verl_score(result: Any) -> Any:
    return result["score"] if isinstance(result, dict) else result
