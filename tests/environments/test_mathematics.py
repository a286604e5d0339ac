"""The ready `math` reward, with the real math-verify."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from lockstep.environments.rewards.loading import load_rewards
from lockstep.environments.rewards.mathematics import math_reward
from lockstep.environments.rewards.reward_set import Completions
from lockstep.errors import InputError


@pytest.fixture
def library() -> None:
    pytest.importorskip("math_verify", reason="pip install 'lockstep-rl[math]'")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"It is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"The answer is $\frac{1}{2}$.", r"\frac12", 1.0),
        ("so 42", "6 * 7 = 42\n#### 42", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
        (r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        (r"<think>\boxed{3}</think> It is 4.", "3", 0.0),
        (r"\boxed{5}", "", None),
    ],
)
def test_answers_are_compared_by_value(completion: str, answer: str, reward: float | None) -> None:
    assert math_reward([completion], answer=[answer]) == [reward]


@pytest.mark.usefixtures("library")
def test_the_answer_is_found_in_any_of_the_usual_columns() -> None:
    for column in ("solution", "answer", "ground_truth"):
        assert math_reward([[{"role": "assistant", "content": "$4$"}]], **{column: ["4"]}) == [1.0]
    assert math_reward(["4"], reward_model=[{"style": "rule", "ground_truth": "4"}], data_source=["d"]) == [1.0]
    rewards = load_rewards(["math"])
    assert rewards.score(Completions(["p"], ["4"], [[1]], [{"solution": "4"}]))[:2] == ([{"math": 1.0}], [1.0])


@pytest.mark.usefixtures("library")
def test_each_row_has_its_answer_in_a_column_of_its_own() -> None:
    """Rows of several sources: a column that a row lacks is None in it. What other columns hold is not looked at."""
    answers, solutions = [None, None, "6"], [None, "5", None]
    assert math_reward([r"\boxed{None}", "5", "6"], answer=answers, solution=solutions) == [None, 1.0, 1.0]
    verl = [{"ground_truth": "5"}, None, "a model's name"]
    assert math_reward(["5"] * 3, answer=[None, None, "5"], reward_model=verl) == [1.0, None, 1.0]
    rewards = load_rewards(["math"])
    rewards.check_row({"answer": "5", "reward_model": "a model's name"}, "row 1")
    with pytest.raises(InputError, match="row 1: reward math needs the column reward_model to hold an object with"):
        rewards.check_row({"answer": None, "reward_model": "a model's name"}, "row 1")


@pytest.mark.usefixtures("library")
def test_a_number_is_an_answer_however_python_writes_it() -> None:
    completions = ["0.000025", "It is 10000000000000000000000.", "0.5", "5"]
    assert math_reward(completions, answer=[2.5e-05, 1e22, np.float64(0.5), 5.0]) == [1.0] * 4


@pytest.mark.usefixtures("library")
def test_it_works_outside_the_main_thread() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(math_reward(["4"], answer=["4"])))
    thread.start()
    thread.join()
    assert found == [[1.0]]


@pytest.mark.parametrize("on_error", ["raise", "zero"])
def test_without_an_answer_column_or_the_package_it_says_so(on_error, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = load_rewards(["math"], on_error=on_error)
    with pytest.raises(InputError, match="reward math needs a column with the answer: solution, answer, ground_truth"):
        rewards.score(Completions(["p"], ["4"], [[1]], [{"other": "4"}]))
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match="reward math needs the package math-verify: pip install 'lockstep-rl"):
        rewards.score(Completions(["p"], ["4"], [[1]], [{"answer": "4"}]))
    with pytest.raises(InputError, match="reward math needs the package math-verify: pip install 'lockstep-rl"):
        load_rewards(["math"], on_error=on_error)  # before a model is read
