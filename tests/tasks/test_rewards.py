"""Reward functions: calling, combining, loading, verl's signature, and every error a user can meet."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finished

from lockstep.errors import InputError
from lockstep.tasks.gsm8k import gsm8k_reward
from lockstep.tasks.loading import load_reward, load_rewards
from lockstep.tasks.rewards import Reward, RewardSet, Scores
from lockstep.tasks.verl import verl_reward

PROMPTS = ["p", "p", "q"]
TEXTS = ["a", "bb", "ccc"]
IDS = [[1], [2, 2], [3, 3, 3]]
ROWS = [{"answer": 1, "extra": "x"}, {"answer": 1, "extra": "x"}, {"answer": 2}]


ORIGINS = ["rows line 1", "rows line 1", "rows line 7"]


def score(*functions: Any, weights: tuple[float, ...] = (), where: str = "step 3", on_error: Any = "raise") -> Scores:
    weights = weights or (1.0,) * len(functions)
    rewards = [Reward(f.__name__, f, w) for f, w in zip(functions, weights, strict=True)]
    return RewardSet(rewards, on_error).score(PROMPTS, TEXTS, IDS, ROWS, where, ORIGINS)


def length(completions, **kwargs):
    return [len(text) for text in completions]


async def slow_half(completions, **kwargs):
    await asyncio.sleep(0)
    return [0.5] * len(completions)


def only_last(completions, **kwargs):
    return [None, None, 4.0]


# What a function is given.


def test_a_function_gets_the_arguments_it_names() -> None:
    def named(completion_ids, answer, unknown=5):
        assert (completion_ids, answer, unknown) == (IDS, [1, 1, 2], 5)
        return [1.0, 2.0, 3.0]

    assert score(named) == ([{"named": 1.0}, {"named": 2.0}, {"named": 3.0}], [1.0, 2.0, 3.0], {})


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


# Combining.


def test_weighted_sum_over_the_functions_that_apply() -> None:
    values, totals, _ = score(length, slow_half, only_last, weights=(1.0, 2.0, 0.25))
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


def test_nothing_to_score_calls_nothing() -> None:
    assert RewardSet([Reward("raises", lambda **_: 1 / 0)]).score([], [], [], []) == ([], [], {})


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


@pytest.mark.parametrize("leave", ["return [1.0] * 3", "raise ValueError", "sys.exit(3)"])
def test_a_process_that_a_reward_forks_does_not_go_on_with_the_run(leave: str) -> None:
    code = f"""
import os, sys
from lockstep.tasks import Reward, RewardSet
def forks(completions):
    child = os.fork()
    if child == 0:
        {leave}
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return [0.5] * 3
scores = RewardSet([Reward("forks", forks)], "skip").score(["p"] * 3, ["a"] * 3, [[1]] * 3, [{{}}] * 3)
print(scores.totals)
"""
    done = finished([sys.executable, "-c", code])
    expected = {"return [1.0] * 3": 0, "raise ValueError": 1, "sys.exit(3)": 3}[leave]
    assert done.stdout == f"{expected}\n[0.5, 0.5, 0.5]\n", done.stderr


# What on_error makes of failures.


def one_bad(completions):
    return [1.0, math.nan, 3.0]


@pytest.mark.parametrize("function", [broken, broken_later])
def test_failures_count_as_zero_or_as_none(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    name = function.__name__
    values, totals, errors = score(function, length, on_error="zero")
    assert [row[name] for row in values] == [0.0] * 3 and totals == [1.0, 2.0, 3.0] and errors == {name: 3}
    values, totals, errors = score(function, on_error="skip")
    assert [row[name] for row in values] == totals == [None] * 3 and errors == {name: 3}
    assert f"reward {name} raised" in caplog.text and "; such values are left out" in caplog.text


def test_one_bad_value_fails_alone() -> None:
    assert score(one_bad, on_error="zero") == (
        [{"one_bad": v} for v in (1.0, 0.0, 3.0)],
        [1.0, 0.0, 3.0],
        {"one_bad": 1},
    )
    assert score(one_bad, on_error="skip").totals == [1.0, None, 3.0]


@pytest.mark.parametrize("on_error", ["zero", "skip"])
def test_a_mistake_in_the_function_always_ends_the_run(on_error: Any) -> None:
    with pytest.raises(InputError, match="returned 1 values for 3 completions; it must return one for each"):
        score(returning([1.0]), on_error=on_error)


def test_async_functions_run_at_the_same_time() -> None:
    met = asyncio.Event()

    async def waits(completions):
        await asyncio.wait_for(met.wait(), timeout=5)
        return [1.0] * len(completions)

    async def frees(completions):
        met.set()
        return [2.0] * len(completions)

    assert score(waits, frees).totals == [3.0] * 3


# TRL's own reward functions have these signatures and reach into completions this way.


def accuracy_reward(completions: list[list[dict[str, str]]], solution: list[str], log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [None if sol == "?" else float(c == sol) for c, sol in zip(contents, solution, strict=True)]


def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    contents = [completion[0]["content"] for completion in completions]
    return [float(re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", c, re.DOTALL) is not None) for c in contents]


class CosineScaled:
    """A callable object with a name, as TRL's get_cosine_scaled_reward returns."""

    __name__ = "cosine_scaled_reward"

    def __call__(self, completions, solution, completion_ids, **kwargs):
        return [math.cos(len(ids)) for ids in completion_ids]


def test_trls_functions_work_unchanged() -> None:
    functions = [accuracy_reward, think_format_reward, CosineScaled()]
    messages = [[{"role": "user", "content": "q"}]] * 3
    texts = ["4", "<think>so</think>4", "5"]
    rewards = RewardSet([Reward(f.__name__, f) for f in functions])
    rows = [{"solution": solution} for solution in ("4", "4", "?")]
    values = rewards.score(messages, texts, IDS, rows).values
    assert [tuple(row.values())[:2] for row in values] == [(1.0, 0.0), (0.0, 1.0), (None, 0.0)]
    assert values[2]["cosine_scaled_reward"] == math.cos(3)


def test_trls_own_functions() -> None:
    trl = pytest.importorskip("trl.rewards")
    rewards = RewardSet([Reward(f.__name__, f) for f in (trl.accuracy_reward, trl.think_format_reward)])
    texts = ["<think>x</think>\\boxed{4}", "\\boxed{5}"]
    messages = [[{"role": "user", "content": "2+2?"}]] * 2
    values = rewards.score(messages, texts, IDS[:2], [{"solution": "$4$"}] * 2).values
    assert [tuple(row.values()) for row in values] == [(1.0, 1.0), (0.0, 0.0)]


def test_a_required_column_must_exist() -> None:
    def needs(completions, solution, **kwargs):
        return [0.0] * 3

    message = "reward needs requires the column 'solution'; the data has answer"
    with pytest.raises(InputError, match=message):
        score(needs)
    with pytest.raises(InputError, match=message):
        RewardSet([Reward("needs", needs)]).check_columns(["answer"])


# Finding functions by name.

SOURCE = """
calls = 0
limit = 3

def length(completions, **kwargs):
    global calls
    calls += 1
    return [float(len(text)) for text in completions]

def calls_so_far(completions, **kwargs):
    return [float(calls)] * len(completions)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": 1}

async def compute_score_later(solution_str, ground_truth, **kwargs):
    return kwargs["extra_info"]["index"] if kwargs["data_source"] == "mine" else -1
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_functions_of_one_file_share_its_module(source: Path) -> None:
    rewards = load_rewards([f"{source}:length", f"{source}:calls_so_far"], [1.0, 10.0])
    assert [reward.name for reward in rewards.rewards] == ["length", "calls_so_far"]
    assert rewards.score(PROMPTS, TEXTS, IDS, ROWS)[1] == [11.0, 12.0, 13.0]


def test_a_function_of_a_module() -> None:
    assert load_reward("lockstep.tasks.gsm8k:gsm8k_reward") is gsm8k_reward


def test_functions_of_one_name_are_told_apart_by_where_they_are(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("def length(completions): return [0.0] * len(completions)")
    specs = [f"{source}:length", f"{other}:length"]
    assert [reward.name for reward in load_rewards(specs).rewards] == specs
    with pytest.raises(InputError, match="is given twice"):
        load_rewards([specs[0], specs[0]])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("length", "must be module:function, path.py:function or a ready one .math, gsm8k."),
        ("module:", "must be module:function, path.py:function or a ready one"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("{folder}/none.py:f", "file .*none.py does not exist"),
        ("{folder}/my_rewards.py:f", "my_rewards.py has no function 'f'"),
        ("{folder}/my_rewards.py:limit", "my_rewards.py has no function 'limit'"),
        ("{folder}/broken.py:f", "importing .*broken.py raised SyntaxError"),
        ("builtins:max", "max does not say what it takes .*; wrap it in a def"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(source: Path, spec: str, message: str) -> None:
    (source.parent / "broken.py").write_text("def f(:")
    spec = spec.format(folder=source.parent)
    with pytest.raises(InputError, match=f"reward '{spec}'.*{message}"):
        load_reward(spec)


def by_position(completions, /):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (by_position, "reward by_position takes completions by position only; arguments come by name"),
        (len, "reward len takes obj by position only"),
        (lambda *lists: [0.0], "takes no argument by name"),
    ],
)
def test_a_signature_that_cannot_be_called_is_found_before_the_run(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        RewardSet([Reward(function.__name__, function)]).check_columns(["answer"])


# verl's signature.

VERL_ROWS = [
    {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": truth}, "extra_info": {"index": index}}
    for index, truth in enumerate(["a", "no", "ccc"])
]


@pytest.mark.parametrize(("function", "expected"), [("compute_score", [1, 0, 1]), ("compute_score_later", [0, 1, 2])])
def test_verls_signature_is_adapted(source: Path, function: str, expected: list[float]) -> None:
    rewards = load_rewards([f"{source}:{function}"])
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for prompts in (PROMPTS, messages):
        values, totals, _ = rewards.score(prompts, TEXTS, IDS, VERL_ROWS)
        assert totals == expected and list(values[0]) == [function]


def test_verls_signature_requires_verls_columns(source: Path) -> None:
    rewards = load_rewards([f"{source}:compute_score"])
    with pytest.raises(
        InputError, match="reward compute_score requires the column 'reward_model'; the data has answer"
    ):
        rewards.score(PROMPTS, TEXTS, IDS, ROWS)


def test_verls_function_fails_for_its_own_completion_only() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"acc": 1} if extra_info["index"] == 1 else 1 / extra_info["index"]

    reward = Reward("compute_score", verl_reward(compute_score))
    with pytest.raises(InputError, match=r"raised ZeroDivisionError: .* line \d+ .for completion 0 of the 3"):
        RewardSet([reward]).score(PROMPTS, TEXTS, IDS, VERL_ROWS)
    scores = RewardSet([reward], "skip").score(PROMPTS, TEXTS, IDS, VERL_ROWS)
    assert scores.totals == [None, None, 0.5] and scores.errors == {"compute_score": 2}


def test_verls_async_calls_keep_to_their_limit() -> None:
    running, most = 0, 0

    async def compute_score(solution_str, ground_truth):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return 1.0

    reward = verl_reward(compute_score, concurrency=2)
    RewardSet([Reward("r", reward)]).score(PROMPTS * 2, TEXTS * 2, IDS * 2, VERL_ROWS * 2)
    assert most == 2


@pytest.mark.parametrize("model", [None, "7", {"style": "rule"}])
def test_a_row_without_verls_ground_truth_is_named(model: Any) -> None:
    reward = Reward("compute_score", verl_reward(lambda solution_str, ground_truth: 1.0))
    with pytest.raises(InputError, match="reward compute_score needs the column reward_model to hold an object"):
        RewardSet([reward]).score(["p"], ["a"], [[1]], [{"reward_model": model}])
