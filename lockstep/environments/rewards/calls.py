"""Calls of reward functions, here or in worker processes: their arguments, valid results, and failures as values."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from ...errors import InputError, refuse
from ...json_file import to_json, to_plain
from ...user_functions import copy_nested, one_line

RewardFunction = Callable[..., Any]
Arguments = dict[str, Any]  # by name: lists with one entry per completion, and those of `TRAINER_NAMES`

# Larger values do not fit float32, in which the loss is computed; weighted sums must fit float64.
MAX_VALUE, MAX_WEIGHT = 1e38, 1e6

_PACKAGE = Path(__file__).parents[1]  # whose frames are not the function's

# Arguments that every reward is offered in addition to the data's columns, which may not have these names.
RESERVED_NAMES = ("prompts", "completions", "completion_ids")

# TRL's additional arguments, for functions that name them.
TRAINER_NAMES = ("trainer_state", "log_metric", "log_extra", "environments")
LOCAL_NAMES = TRAINER_NAMES[1:]  # which worker processes cannot be given


@dataclass(frozen=True)
class TrainerState:
    """The argument `trainer_state`, with the number of steps before the one being scored; 0 in validation."""

    global_step: int = 0


class Logged:
    """What functions passed to `log_metric(name, value)` and `log_extra(column, values)` while a batch was scored."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._values: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of the values under each name."""
        return {name: sum(values) / len(values) for name, values in self._values.items()}

    def log_metric(self, name: str, value: float) -> None:
        """Raises `ValueError` for a value that is not a finite number, or a name that cannot be recorded."""
        number = check_value(value)
        if not isinstance(number, float):
            raise ValueError(f"log_metric({name!r}, ...) takes a finite number, not {one_line(value, repr)}")
        self._values.setdefault(_json_copy(str(name), "log_metric", name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Raises `ValueError` unless there is a value for each completion, and JSON can hold them."""
        if len(values) != self._count:
            raise ValueError(f"log_extra({column!r}, ...) has {len(values)} values for {self._count} completions")
        name = _json_copy(str(column), "log_extra", column)
        self.extra[name] = [_json_copy(value, "log_extra", column) for value in values]


def _json_copy(value: Any, method: str, name: Any) -> Any:
    """A copy of what a function logged, in a form that JSON can hold. `ValueError`: text that is not valid Unicode,
    numbers of thousands of digits, or a value that contains itself."""
    try:
        copy = to_plain(value)
        to_json(copy).encode()
        return copy
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else one_line(error)
        raise ValueError(f"{method}({name!a}, ...) cannot be recorded: {reason}") from None


@dataclass(frozen=True)
class Failed:
    """Why there is no value; `reason` follows "reward f ", as in "raised KeyError: 'x'".

    `fatal` marks a mistake in the function or its setup, which ends the run whatever `on_error` says. `of_form`: the
    function may have been written for completions of the other form (`describe_form`).
    """

    reason: str
    fatal: bool = False
    of_form: bool = False


# The outcome of a call: a value for each completion, or one failure for all of them.
Values = list[float | None | Failed]
Outcome = Values | Failed


def accepted_arguments(
    name: str, function: RewardFunction, columns: Iterable[str], in_worker: bool = False
) -> list[str]:
    """The arguments to pass: those of the reserved names, `columns` and `TRAINER_NAMES` that the function takes by
    name; `in_worker`, without `LOCAL_NAMES` that have a default. `InputError`: it requires another one, or takes none
    by name."""
    offered = [*RESERVED_NAMES, *columns]
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if by_position:
        raise InputError(
            f"reward {name} takes {by_position[0]} by position only; arguments come by name, as in "
            "def reward(completions, **columns)"
        )
    left_out = [p.name for p in named if in_worker and p.name in LOCAL_NAMES and p.default is not p.empty]
    offered += [p.name for p in named if p.name in TRAINER_NAMES and p.name not in (*offered, *left_out)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in offered]
    if missing:
        raise InputError(
            f"reward {name} requires the column {missing[0]!r}; the data has {', '.join(columns) or 'none'}"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return offered
    arguments = [p.name for p in named if p.name in offered]
    refuse(not arguments, f"reward {name} takes no argument by name; write it as def reward(completions, **columns)")
    return arguments


def call_all(
    calls: Sequence[tuple[RewardFunction, Arguments, int]], on_begin: Callable[[list[int]], None] = lambda calls: None
) -> list[Outcome]:
    """Call each (function, arguments, number of completions): plain functions one after the other, then all async ones
    concurrently. `on_begin` is called with the indices of the calls that begin."""
    results: list[Any] = []
    for index, (function, arguments, _) in enumerate(calls):
        on_begin([index])
        results.append(call_function(function, arguments))
    async_calls = [index for index, result in enumerate(results) if inspect.iscoroutine(result)]
    if async_calls:
        on_begin(async_calls)
        values = _run_concurrently([await_result(results[index], calls[index][0]) for index in async_calls])
        for index, result in zip(async_calls, values, strict=True):
            results[index] = result
    return [
        result if isinstance(result, Failed) else _check_values(result, count)
        for result, (_, _, count) in zip(results, calls, strict=True)
    ]


def call_function(function: RewardFunction, arguments: Arguments) -> Any:
    """The function's result, its coroutine, or its failure."""
    try:
        with ending_forks():
            return function(**{name: copy_nested(value, f"argument {name}") for name, value in arguments.items()})
    except BaseException as error:
        return failure_from(error, function)


async def await_result(coroutine: Any, function: RewardFunction) -> Any:
    """The result of the function's coroutine, or its failure."""
    try:
        with ending_forks():
            return await coroutine
    except BaseException as error:
        return failure_from(error, function)


@contextlib.contextmanager
def ending_forks() -> Iterator[None]:
    """A context for a function's call: if the function forks, the child ends where it would leave the function, with
    the exit code that it would have had. Otherwise the child would continue the run, in the same folder."""
    process, code = os.getpid(), 0
    try:
        yield
    except BaseException as error:
        if os.getpid() == process:
            raise
        code = _exit_code(error)
    finally:
        if os.getpid() != process:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)


def _exit_code(error: BaseException) -> int:
    """The exit code of a process that ends with `error`, after printing that as Python does."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return (error.code or 0) & 0xFF
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1


def _run_concurrently(coroutines: list[Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*coroutines)

    def run() -> list[Any]:
        _of_thread.loop = loop = getattr(_of_thread, "loop", None) or _ThreadLoop()
        try:
            return loop.runner.run(gather())
        except BaseException as error:  # not raised by a function, as those are results
            _of_thread.loop = None
            loop.close()  # which ends the other functions
            if not isinstance(error, RuntimeError):
                raise
            reason = f"did not finish, as an async reward stopped the event loop that they share ({error})"
            return [Failed(reason, fatal=True)] * len(coroutines)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    return _thread_without_loop().submit(run).result()  # the caller is inside a loop, as in a notebook


class _ThreadLoop:
    """A thread's event loop. It stays open between calls, as connections that a function keeps belong to it, and closes
    with the thread or the process."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.close = weakref.finalize(self, self.runner.close)


_of_thread = threading.local()


@cache
def _thread_without_loop() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def failure_from(error: BaseException, function: RewardFunction) -> Failed:
    """An exception as a failure, with the line in the function's own file where it arose. An `InputError` keeps its
    message. `KeyboardInterrupt` (Ctrl-C) is raised again."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, InputError):
        return Failed(str(error), fatal=True)
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    others = [f for f in frames if f.filename != contextlib.__file__ and _PACKAGE not in Path(f.filename).parents]
    own = [frame for frame in frames if frame.filename == source] or others
    place = f" in {Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""
    text = one_line(error)
    of_form = isinstance(error, (TypeError, AttributeError)) and ("str" in text or "list" in text)
    return Failed(f"raised {type(error).__name__}{': ' if text else ''}{text}{place}", of_form=of_form)


def _check_values(result: Any, count: int) -> Outcome:
    result = result.tolist() if hasattr(result, "tolist") else result  # an array or tensor
    if not isinstance(result, (list, tuple)):
        reason = f"returned {type(result).__name__}; it must return a list with a number or None for each completion"
        return Failed(reason, fatal=True)
    if len(result) != count:
        reason = f"returned {len(result)} values for {count} completions; it must return one for each"
        return Failed(reason, fatal=True)
    return [check_value(value) for value in result]


def check_value(value: Any) -> float | None | Failed:
    """A reward as a float: numbers, and scalars of numpy and torch; None if it does not apply."""
    if value is None or isinstance(value, Failed):
        return value
    number = value.tolist() if hasattr(value, "tolist") else value  # an array's or tensor's scalar
    try:
        real = float(number) if isinstance(number, (Real, Decimal)) else math.nan
    except (OverflowError, ValueError):  # an int beyond float's range; a signalling NaN
        real = math.inf
    if abs(real) <= MAX_VALUE:  # not for NaN
        return real
    return Failed(f"returned {one_line(value, repr)}; it must be a finite number (at most {MAX_VALUE:g}) or None")


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion, which is a text or, after a conversational prompt, messages. `InputError`: neither."""
    text: Any = completion
    if isinstance(completion, list) and completion and isinstance(completion[-1], dict):
        text = completion[-1].get("content")
    if not isinstance(text, str):
        reason = "needs completions that are texts, or messages of which the last has a text as its content"
        raise InputError(f"{reason}; one is {one_line(completion, repr)}")
    return text


def describe_form(completions: Sequence[Any], origins: Sequence[str]) -> str:
    """Words for the form of completions, texts or messages, and how a function reads the one or gets the other."""
    texts = [isinstance(completion, str) for completion in completions]
    if all(texts):
        return "its completions are texts, as their prompts are; --task.system-prompt turns both into messages"
    reading = "whose text is completion[-1]['content']"
    if not any(texts):
        return f"its completions are lists of messages, {reading}"
    text, chat = (origins[texts.index(kind)] or f"completion {texts.index(kind)}" for kind in (True, False))
    return f"its completions are texts, as of {text}, and lists of messages, as of {chat}, {reading}"
