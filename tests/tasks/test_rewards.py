"""Reward functions: calling, combining, loading, verl's signature, and every error a user can meet."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import InputError
from lockstep.tasks.gsm8k import gsm8k_reward
from lockstep.tasks.rewards import Reward, RewardSet, load_reward, load_rewards

PROMPTS = ["p", "p", "q"]
TEXTS = ["a", "bb", "ccc"]
IDS = [[1], [2, 2], [3, 3, 3]]
ROWS = [{"answer": 1, "extra": "x"}, {"answer": 1, "extra": "x"}, {"answer": 2}]


def score(*functions: Any, weights: tuple[float, ...] = (), where: str = "step 3"):
    weights = weights or (1.0,) * len(functions)
    rewards = [Reward(f.__name__, f, w) for f, w in zip(functions, weights, strict=True)]
    return RewardSet(rewards).score(PROMPTS, TEXTS, IDS, ROWS, where)


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

    assert score(named) == ([{"named": 1.0}, {"named": 2.0}, {"named": 3.0}], [1.0, 2.0, 3.0])


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
    values, totals = score(length, slow_half, only_last, weights=(1.0, 2.0, 0.25))
    assert values[0] == {"length": 1.0, "slow_half": 0.5, "only_last": None}
    assert totals == [2.0, 3.0, 5.0]


def test_a_weight_must_be_finite() -> None:
    with pytest.raises(InputError, match="the weight of reward length is inf"):
        score(length, weights=(math.inf,))


def test_a_completion_that_no_function_applies_to_is_refused() -> None:
    with pytest.raises(InputError, match="no reward applies to completion 0 of the 3 completions of step 3: only_last"):
        score(only_last)


def test_async_rewards_run_inside_a_running_loop() -> None:
    async def notebook():
        return score(slow_half)[1]

    assert asyncio.run(notebook()) == [0.5] * 3


def test_nothing_to_score_calls_nothing() -> None:
    assert RewardSet([Reward("raises", lambda **_: 1 / 0)]).score([], [], [], []) == ([], [])


# What a function returns.


def returning(value: Any):
    def reward(completions):
        return value

    return reward


@pytest.mark.parametrize(
    "values", [[1, 0, True], (1.0, 0.0, 1.0), torch.tensor([1.0, 0.0, 1.0]), [torch.tensor(1.0), 0, 1]]
)
def test_numbers_of_any_kind_become_floats(values: Any) -> None:
    totals = score(returning(values))[1]
    assert totals == [1.0, 0.0, 1.0] and all(type(total) is float for total in totals)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "1", [1.0], 10**400, 1j, torch.tensor([1.0, 2.0])])
def test_a_value_that_is_no_finite_number_is_named(bad: Any) -> None:
    with pytest.raises(InputError, match="reward reward returned .* for completion 1 of the 3 completions of step 3"):
        score(returning([1.0, bad, 1.0]))


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0] * 4])
def test_the_wrong_number_of_values_is_named(values: list[float]) -> None:
    with pytest.raises(InputError, match=f"reward reward returned {len(values)} values for the 3 completions"):
        score(returning(values))


@pytest.mark.parametrize("result", [None, 1.0, "abc", {"a": 1.0}])
def test_a_result_that_is_no_list_is_named(result: Any) -> None:
    with pytest.raises(InputError, match=f"reward reward returned {type(result).__name__} for the 3 completions"):
        score(returning(result))


def test_an_exception_is_named_and_chained() -> None:
    def broken(completions):
        raise KeyError("oops")

    async def broken_later(completions):
        raise KeyError("later")

    with pytest.raises(
        InputError, match="reward broken raised KeyError: 'oops' on the 3 completions of step 3"
    ) as info:
        score(broken)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(InputError, match="reward broken_later raised KeyError: 'later'"):
        score(broken_later)


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
        ("length", "must be module:function or path.py:function"),
        ("module:", "must be module:function or path.py:function"),
        ("no_such_module:f", "importing no_such_module raised ModuleNotFoundError: No module named 'no_such_module'"),
        ("{folder}/none.py:f", "file .*none.py does not exist"),
        ("{folder}/my_rewards.py:f", "my_rewards.py has no function 'f'"),
        ("{folder}/my_rewards.py:limit", "my_rewards.py has no function 'limit'"),
        ("{folder}/broken.py:f", "importing .*broken.py raised SyntaxError"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(source: Path, spec: str, message: str) -> None:
    (source.parent / "broken.py").write_text("def f(:")
    spec = spec.format(folder=source.parent)
    with pytest.raises(InputError, match=f"reward '{spec}'.*{message}"):
        load_reward(spec)


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
        values, totals = rewards.score(prompts, TEXTS, IDS, VERL_ROWS)
        assert totals == expected and list(values[0]) == [function]


def test_verls_signature_requires_verls_columns(source: Path) -> None:
    rewards = load_rewards([f"{source}:compute_score"])
    with pytest.raises(
        InputError, match="reward compute_score requires the column 'reward_model'; the data has answer"
    ):
        rewards.score(PROMPTS, TEXTS, IDS, ROWS)
