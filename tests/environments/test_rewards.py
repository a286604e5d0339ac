"""Calling reward functions: what they are given and may return, what fails, and what `on_error` makes of it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import math
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch
from processes import finished
from scoring import IDS, ORIGINS, PROMPTS, ROWS, TEXTS, length, only_last, score, slow_half

from lockstep.environments.rewards.mathematics import math_reward
from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet, Scoring
from lockstep.environments.rewards.workers import RewardWorkers
from lockstep.environments.tasks.gsm8k import gsm8k_reward
from lockstep.errors import InputError

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

# What a function is given.


def test_a_function_gets_the_arguments_it_names() -> None:
    def named(completion_ids, answer, unknown=5):
        assert (completion_ids, answer, unknown) == (IDS, [1, 1, 2], 5)
        return [1.0, 2.0, 3.0]

    assert score(named) == ([{"named": 1.0}, {"named": 2.0}, {"named": 3.0}], [1.0, 2.0, 3.0], [False] * 3, {})


def test_kwargs_get_every_column_that_all_rows_have() -> None:
    def everything(**kwargs):
        assert kwargs == {"prompts": PROMPTS, "completions": TEXTS, "completion_ids": IDS, "answer": [1, 1, 2]}
        return [0.0] * 3

    assert score(everything)[1] == [0.0] * 3


def test_a_function_that_changes_its_lists_does_not_disturb_the_next() -> None:
    def destroyer(completions, answer):
        count = len(completions)
        completions.clear()
        answer.clear()
        return [0.0] * count

    assert score(destroyer, length)[1] == [1.0, 2.0, 3.0]


def test_what_a_function_does_to_its_arguments_stays_with_it() -> None:
    prompts = [[{"role": "user", "content": "p"}]] * 3
    ids, rows = [[1], [2, 2], [3, 3, 3]], [{"answer": {"parts": [1]}}] * 3
    seen = []

    def destroyer(prompts, completions, completion_ids, answer):
        for prompt, completion, own, parts in zip(prompts, completions, completion_ids, answer, strict=True):
            prompt.extend(completion)
            completion[0]["content"] = prompt[0]["content"] = "edited"
            own.pop()
            parts["parts"].append(2)
        return [0.0] * len(prompts)

    def sees(prompts, completions, completion_ids, answer):
        seen.append((prompts, completions, completion_ids, answer))
        return [0.0] * len(prompts)

    RewardSet([Reward("destroyer", destroyer), Reward("sees", sees)]).score(Completions(prompts, TEXTS, ids, rows))
    assert (
        prompts == [[{"role": "user", "content": "p"}]] * 3 and ids == IDS and rows == [{"answer": {"parts": [1]}}] * 3
    )
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    assert seen == [(prompts, completions, ids, [{"parts": [1]}] * 3)]


def test_what_a_function_sets_of_torch_ends_with_its_call() -> None:
    def state() -> list[Any]:
        return [
            *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.get_num_threads()),
            *(torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), torch.backends.mkldnn.enabled),
            *(torch.are_deterministic_algorithms_enabled(), torch.tensor(2.0**-130).mul(1).item() == 0),
            *(torch.is_inference_mode_enabled(), torch.tensor(1.0).div(3).item()),
            *(torch.backends.cuda.preferred_blas_library(), products.allow_bf16_reduced_precision_reduction),
        ]

    entered, products = torch.inference_mode(), torch.backends.cuda.matmul

    def sets(completions):
        assert torch.is_grad_enabled()
        entered.__enter__()
        assert not ctypes.CDLL(None).fesetround(0x800)  # up, on x86; elsewhere another or none
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_float32_matmul_precision("medium")
        torch.set_autocast_enabled("cpu", True)
        torch.backends.mkldnn.enabled = False
        torch.use_deterministic_algorithms(True)
        torch.set_flush_denormal(True)
        products.allow_bf16_reduced_precision_reduction = not products.allow_bf16_reduced_precision_reduction
        raise ValueError("half-way")

    before = state()
    with pytest.raises(InputError, match="raised ValueError: half-way"):
        score(sets)
    assert state() == before


# Combining.


def test_weighted_sum_over_the_functions_that_apply() -> None:
    values, totals, *_ = score(length, slow_half, only_last, weights=(1.0, 2.0, 0.25))
    assert values[0] == {"length": 1.0, "slow_half": 0.5, "only_last": None}
    assert totals == [2.0, 3.0, 5.0]


def test_a_weight_must_be_finite() -> None:
    with pytest.raises(
        InputError, match="task.reward_weights: the weight of reward length is inf; it must be between -1e.06 and 1e.06"
    ):
        score(length, weights=(math.inf,))


def test_a_completion_that_no_function_applies_to_has_no_reward() -> None:
    assert score(only_last).totals == [None, None, 4.0]


def test_async_rewards_run_inside_a_running_loop() -> None:
    async def notebook():
        return score(slow_half)[1]

    assert asyncio.run(notebook()) == [0.5] * 3


def test_the_event_loop_of_a_thread_closes_with_it() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def keeps(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    def score_twice() -> None:
        assert score(keeps).totals == score(keeps).totals == [1.0] * 3
        assert not loops[-1].is_closed()

    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(score_twice).result()
    assert loops[0] is loops[1] is not loops[2] and all(loop.is_closed() for loop in loops)


def test_the_functions_are_told_as_they_are_called() -> None:
    told: list[str] = []
    rewards = RewardSet([Reward(f.__name__, f) for f in (length, slow_half, only_last)])
    rewards.score(Completions(PROMPTS, TEXTS, IDS, ROWS), Scoring(tell=told.append))
    assert told == ["length", "slow_half", "only_last", "slow_half"]  # the last: what is waited for


def test_nothing_to_score_calls_nothing() -> None:
    assert RewardSet([Reward("raises", lambda **_: 1 / 0)]).score(Completions([], [], [], [])) == ([], [], [], {})


# What a function returns.


def returning(value: Any):
    def reward(completions):
        return value

    return reward


@pytest.mark.parametrize(
    "values",
    [[1, 0, True], (1.0, 0.0, 1.0), torch.tensor([1.0, 0.0, 1.0]), [torch.tensor(1.0), 0, 1], [Decimal("1.0"), 0, 1]],
)
def test_numbers_of_any_kind_become_floats(values: Any) -> None:
    totals = score(returning(values))[1]
    assert totals == [1.0, 0.0, 1.0] and all(type(total) is float for total in totals)


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, 1e39, "1", [1.0], 10**400, 1j, Decimal("sNaN"), torch.tensor([1.0, 2.0])]
)
def test_a_value_that_is_no_finite_number_is_named(bad: Any) -> None:
    where = r"completion 1 of the 3 completions of step 3 \(rows line 1\)"
    with pytest.raises(
        InputError,
        match=rf"reward reward returned .*; it must be a finite number .at most 1e.38. or None \(for {where}",
    ):
        score(returning([1.0, bad, 1.0]))


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0] * 4])
def test_the_wrong_number_of_values_is_named(values: list[float]) -> None:
    with pytest.raises(InputError, match=f"reward reward returned {len(values)} values for 3 completions; it must"):
        score(returning(values))


@pytest.mark.parametrize("result", [None, 1.0, "abc", {"a": 1.0}])
def test_a_result_that_is_no_list_is_named(result: Any) -> None:
    with pytest.raises(InputError, match=f"reward reward returned {type(result).__name__}; it must return a list"):
        score(returning(result))


def broken(completions):
    raise KeyError("oops")


async def broken_later(completions):
    await asyncio.sleep(0)
    raise SystemExit(3)


def test_an_exception_is_named_with_its_line_and_the_rows() -> None:
    line = broken.__code__.co_firstlineno + 1
    message = (
        f"reward broken raised KeyError: 'oops' in test_rewards.py line {line} "
        r"\(for the 3 completions of step 3, rows line 1 to rows line 7\)"
    )
    with pytest.raises(InputError, match=message):
        score(broken)
    with pytest.raises(InputError, match="reward broken_later raised SystemExit: 3"):
        score(broken_later)


class Unusual(BaseException):
    """As a framework's own, which `except Exception` lets through."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [asyncio.CancelledError("x"), GeneratorExit("x"), Unusual()])
def test_an_exception_of_any_kind_is_a_failure(error: BaseException) -> None:
    def now(completions):
        raise error

    async def later(completions):
        await asyncio.sleep(0)
        raise error

    for function in (now, later):
        assert score(function, on_error="skip").errors == {function.__name__: 3}
        with pytest.raises(InputError, match=f"raised {type(error).__name__}.* in test_rewards.py line"):
            score(function)


def test_a_call_that_fails_before_the_functions_first_line_names_none() -> None:
    def strict(completions):
        return [0.0] * 3

    strict.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # as a decorator may pretend
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("completions", "answer")]
    )
    with pytest.raises(InputError, match=r"raised TypeError: .*unexpected keyword argument 'answer' \(for the 3"):
        score(strict)


def test_a_function_for_the_other_form_of_completions_is_told_the_form() -> None:
    def for_chats(completions):
        return [float(len(messages[-1]["content"])) for messages in completions]

    def for_texts(completions):
        return [float(len(text.strip())) for text in completions]

    chat = [{"role": "user", "content": "p"}]
    rows = r"\(for the 3 completions of step 3, rows line 1 to rows line 7; its completions are "
    with pytest.raises(InputError, match=f"for_chats raised TypeError.*{rows}texts, .*--task.system-prompt"):
        score(for_chats)
    for prompts, form in (
        ([chat] * 3, "lists of messages"),
        (["p", "p", chat], "texts, as of rows line 1, and lists of messages, as of rows line 7"),
    ):
        batch = Completions(prompts, TEXTS, IDS, ROWS)
        with pytest.raises(InputError, match=f"for_texts raised AttributeError.*{rows}{form}, whose text is "):
            RewardSet([Reward("for_texts", for_texts)]).score(batch, Scoring("step 3", ORIGINS))


@pytest.mark.parametrize("bad", [3, [], [3], [{"role": "assistant"}], [{"role": "assistant", "content": None}]])
def test_a_completion_without_text_is_shown(bad: Any) -> None:
    for function, columns in ((gsm8k_reward, {"answer": "#### 1"}), (math_reward, {"answer": "1"})):
        batch = Completions([[]], [bad], [[1]], [columns])
        shown = re.escape(repr(bad))
        with pytest.raises(InputError, match=f"reward own needs completions that are texts, or messages .* is {shown}"):
            RewardSet([Reward("own", function)]).score(batch)


def test_an_interrupt_is_not_a_failure() -> None:
    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted, on_error="skip")


def test_an_exceptions_text_stays_on_one_line() -> None:
    def loud(completions):
        raise ValueError("\x1b[31mred\n" + "x" * 1000)

    with pytest.raises(InputError, match="reward loud raised ValueError: ") as info:
        score(loud)
    assert str(info.value).isprintable() and r"\x1b[31mred\nxx" in str(info.value) and len(str(info.value)) < 600


def test_a_process_that_a_reward_forks_does_not_go_on_with_the_run() -> None:
    """Whether it returns, raises or leaves."""
    code = """
import os, sys
from lockstep.environments.rewards.mathematics import math_reward
from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet
def raises():
    raise ValueError
for leave in (lambda: [1.0] * 3, raises, lambda: sys.exit(3)):
    def forks(completions):
        child = os.fork()
        if child == 0:
            return leave()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return [0.5] * 3
    scores = RewardSet([Reward("forks", forks)], "skip").score(Completions(["p"] * 3, ["a"] * 3, [[1]] * 3, [{}] * 3))
    print(scores.totals, flush=True)
"""
    done = finished([sys.executable, "-c", code])
    assert done.stdout == "".join(f"{expected}\n[0.5, 0.5, 0.5]\n" for expected in (0, 1, 3)), done.stderr


# What on_error makes of failures.


def one_bad(completions):
    return [1.0, math.nan, 3.0]


@pytest.mark.parametrize("function", [broken, broken_later])
def test_failures_count_as_zero_or_as_none(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = function.__name__
    values, totals, unknown, errors = score(function, length, on_error="zero")
    assert [row[name] for row in values] == [0.0] * 3 and totals == [1.0, 2.0, 3.0] and errors == {name: 3}
    assert not any(unknown)
    values, totals, unknown, errors = score(function, on_error="skip")
    assert [row[name] for row in values] == totals == [None] * 3 and errors == {name: 3}
    assert all(unknown) and not any(score(function, length, on_error="skip").unknown)
    assert f"reward {name} raised" in caplog.text and "; such values are left out" in caplog.text


def test_one_bad_value_fails_alone() -> None:
    assert score(one_bad, on_error="zero") == (
        [{"one_bad": v} for v in (1.0, 0.0, 3.0)],
        [1.0, 0.0, 3.0],
        [False] * 3,
        {"one_bad": 1},
    )
    assert score(one_bad, on_error="skip")[1:3] == ([1.0, None, 3.0], [False, True, False])


@pytest.mark.parametrize("on_error", ["zero", "skip"])
def test_a_mistake_in_the_function_always_ends_the_run(on_error: Any) -> None:
    with pytest.raises(InputError, match="returned 1 values for 3 completions; it must return one for each"):
        score(returning([1.0]), on_error=on_error)


@pytest.mark.parametrize("inside", [False, True])
def test_a_connection_that_an_async_function_keeps_is_open_in_the_next_call(inside: bool) -> None:
    kept = []

    async def reads(completions):
        if not kept:
            kept.extend(await asyncio.open_connection(sock=ours))
        return [float(await kept[0].readline()) for _ in completions]

    async def called() -> Any:
        return score(reads)

    ours, theirs = socket.socketpair()
    with theirs:
        for expected in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
            theirs.sendall("".join(f"{value}\n" for value in expected).encode())
            assert (asyncio.run(called()) if inside else score(reads)).totals == expected


def test_an_interrupt_ends_the_other_async_functions() -> None:
    ended = []

    async def waits(completions):
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("waits")

    async def interrupts(completions):
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(waits, interrupts)
    gc.collect()  # what asyncio says of its task is said here, not within another test
    assert ended == ["waits"] and score(slow_half).totals == [0.5] * 3


def test_async_functions_run_at_the_same_time() -> None:
    met = asyncio.Event()

    async def waits(completions):
        await asyncio.wait_for(met.wait(), timeout=60)
        return [1.0] * len(completions)

    async def frees(completions):
        met.set()
        return [2.0] * len(completions)

    assert score(waits, frees).totals == [3.0] * 3


@pytest.mark.parametrize("inside", [False, True])
def test_an_async_function_that_stops_the_loop_is_named(inside: bool) -> None:
    async def stops(completions):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(5)

    async def called() -> None:
        score(stops)

    with pytest.raises(InputError, match="reward stops did not finish, as an async reward stopped the event loop"):
        asyncio.run(called()) if inside else score(stops)


# TRL's further arguments.


def test_trainer_state_and_what_functions_log() -> None:
    def logs(completions, trainer_state, log_metric, log_extra=None):
        log_metric("length", 2)
        log_metric("length", 4.0)
        log_extra("seen", [text.upper() for text in completions])
        return [float(trainer_state.global_step)] * len(completions)

    rewards = RewardSet([Reward("logs", logs)])
    rewards.check_columns(["answer"])
    assert rewards.score(Completions(PROMPTS, TEXTS, IDS, [{}] * 3), Scoring(step=7)).totals == [7.0] * 3
    assert rewards.logged.metrics == {"length": 3.0} and rewards.logged.extra == {"seen": ["A", "BB", "CCC"]}
    rewards.score(Completions(PROMPTS[:1], TEXTS[:1], IDS[:1], [{}]))
    assert rewards.logged.extra == {"seen": ["A"]}  # of the last batch alone


def test_logged_arrays_are_recorded_as_lists() -> None:
    mine = [[1]]

    def logs(completions, log_extra):
        log_extra("array", [numpy.zeros(2), torch.ones(2), {"deep": numpy.float32(0.5)}])
        log_extra("list", mine * 3)
        mine[0].append(2)
        return [0.0] * len(completions)

    rewards = RewardSet([Reward("logs", logs)])
    rewards.score(Completions(PROMPTS, TEXTS, IDS, [{}] * 3))
    assert rewards.logged.extra == {"array": [[0.0, 0.0], [1.0, 1.0], {"deep": 0.5}], "list": [[1]] * 3}


def test_a_column_of_that_name_is_the_datas() -> None:
    def takes(trainer_state, **columns):
        assert "log_metric" not in columns
        return [float(len(value)) for value in trainer_state]

    rewards = RewardSet([Reward("takes", takes)])
    assert rewards.score(Completions(PROMPTS, TEXTS, IDS, [{"trainer_state": "abc"}] * 3)).totals == [3.0] * 3


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            (("a", math.nan), ("b", [1] * 3)),
            r"raised ValueError: log_metric\('a', ...\) takes a finite number, not nan",
        ),
        ((("a", 1.0), ("b", [1])), r"raised ValueError: log_extra\('b', ...\) has 1 values for 3 completions"),
        ((("a", 1.0), ("b", ["\ud83d"] * 3)), r"log_extra\('b', ...\) cannot be recorded: .*surrogates not allowed"),
        ((("a", 1.0), ("b", [{"\ud83d": 1}] * 3)), r"log_extra\('b', ...\) cannot be recorded: .*surrogates"),
        ((("a", 1.0), ("\ud83d", [1] * 3)), r"log_extra\('\\\\?ud83d', ...\) cannot be recorded: .*surrogates"),
        ((("a", 1.0), ("b", [CIRCLE] * 3)), r"log_extra\('b', ...\) cannot be recorded: it is nested too deep"),
        ((("a", 1.0), ("b", [10**5000] * 3)), r"log_extra\('b', ...\) cannot be recorded: Exceeds the limit"),
        ((("\ud83d", 1.0), ("b", [1] * 3)), r"log_metric\('\\\\?ud83d', ...\) cannot be recorded: .*surrogates"),
    ],
)
def test_what_cannot_be_logged(value: Any, message: str) -> None:
    def logs(completions, log_metric, log_extra):
        log_metric(*value[0])
        log_extra(*value[1])

    with pytest.raises(InputError, match=message):
        score(logs)


def test_workers_cannot_log() -> None:
    def logs(completions, log_metric):
        return [0.0] * len(completions)

    rewards = RewardSet([Reward("logs", logs, 1.0, "m:logs")], workers=RewardWorkers(1))
    with pytest.raises(InputError, match="reward logs takes log_metric, which needs task.reward_workers 0"):
        rewards.check_columns([])
