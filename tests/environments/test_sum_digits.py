"""SumDigits: its problems, what is held out, and its reward."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lockstep.config import TaskConfig
from lockstep.environments import make_task
from lockstep.environments.base import Problem
from lockstep.environments.rewards.reward_set import Completions
from lockstep.environments.tasks.sum_digits import REWARDS, SumDigits, split_of_numbers


def task(easy: bool, seed: int = 42, validation_seed: int = 99) -> SumDigits:
    return SumDigits(seed, validation_seed, validation_prompts=20, easy=easy)


def numbers(problem: Problem) -> list[int]:
    """The numbers asked about, read back from the prompt."""
    assert isinstance(problem.prompt, str)
    return [int(text) for text in re.findall(r"[0-9]+", problem.prompt.split("Numbers:")[-1])]


def train_problems(easy: bool, seed: int = 42) -> list[Problem]:
    return [task(easy, seed).train_problem(step, group) for step in range(100) for group in range(8)]


def score(completion: Any, answer: int) -> float:
    return sum(r.weight * r.function(completions=[completion], answer=[answer])[0] for r in REWARDS)


@pytest.mark.parametrize("easy", [True, False])
def test_the_answer_is_the_sum_of_all_digits(easy: bool) -> None:
    problems = train_problems(easy)
    for problem in problems:
        assert all(10 <= number <= 99 for number in numbers(problem))
        assert problem.columns == {"answer": str(sum(int(digit) for n in numbers(problem) for digit in str(n)))}
    assert {len(numbers(problem)) for problem in problems} == ({2} if easy else {2, 3, 4})


@pytest.mark.parametrize("easy", [True, False])
def test_worked_examples_earn_the_full_reward(easy: bool) -> None:
    for index in range(50):
        problem = task(easy).warmup_problem(2, index)
        assert problem.worked_example is not None
        assert score(problem.worked_example, problem.columns["answer"]) == 1.3


@pytest.mark.parametrize("easy", [True, False])
def test_problems_are_a_pure_function_of_seed_step_and_group(easy: bool) -> None:
    first, second = task(easy), task(easy)
    backwards = [second.train_problem(step, 3) for step in reversed(range(20))]
    assert [first.train_problem(step, 3) for step in range(20)] == backwards[::-1]
    assert first.validation_problems() == second.validation_problems()
    different = [task(easy, seed=43).train_problem(step, 3) for step in range(20)]
    assert different != backwards[::-1]
    assert task(easy, validation_seed=98).validation_problems() != first.validation_problems()
    assert task(easy, seed=43).validation_problems() == first.validation_problems()


def test_the_bits_of_the_draws_do_not_change() -> None:
    """A run's problems are part of what it reproduces, so these may change only on purpose."""
    assert [task(True).train_problem(0, group).prompt for group in range(3)] == ["56 24=", "41 58=", "90 22="]
    assert numbers(task(False).train_problem(0, 0)) == [56, 24, 81, 83]


@pytest.mark.parametrize("easy", [True, False])
def test_no_validation_problem_is_trained_on_in_any_order_of_its_numbers(easy: bool) -> None:
    validation = {tuple(sorted(numbers(p))) for seed in range(20) for p in task(easy, 0, seed).validation_problems()}
    training = {tuple(sorted(numbers(p))) for seed in range(4) for p in train_problems(easy, seed)}
    warmup = {tuple(sorted(numbers(task(easy).warmup_problem(s, i)))) for s in range(10) for i in range(64)}
    assert len(validation) > 100 and len(training) > 1000
    assert not validation & (training | warmup)
    selection = {tuple(sorted(numbers(p))) for seed in range(20) for p in task(easy, 0, seed).selection_problems()}
    assert len(selection) > 100 and not selection & (training | warmup | validation)
    assert all(split_of_numbers(list(reversed(combination))) != "train" for combination in validation)


def test_prompts_hold_the_rule_and_one_worked_example() -> None:
    prompt = task(False).train_problem(0, 0).prompt
    assert isinstance(prompt, str)
    assert "<answer>N</answer>" in prompt and prompt.endswith("Numbers: 56, 24, 81, 83\nDigits:")
    example = re.search(r"Numbers: ([^\n]+)\nDigits: [0-9 +]+ = ([0-9]+)\n<answer>([0-9]+)</answer>", prompt)
    assert example is not None
    total = sum(int(digit) for digit in re.findall(r"[0-9]", example[1]))
    assert total == int(example[2]) == int(example[3])
    assert split_of_numbers([int(text) for text in example[1].split(", ")]) == "train"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>19</answer>", 1.3),
        ("<answer> 019\n</answer>", 1.3),
        ("<answer>3</answer> no, <answer>19</answer>", 1.3),
        ("<answer>19</answer> no, <answer>3</answer>", 0.3),
        ("<answer>19</answer> <answer>x</answer>", 1.3),
        ("<answer>-19</answer>", 0.3),
        ("<answer>" + "9" * 5000 + "</answer>", 0.3),
        ("<answer>19.5</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("19", 0.0),
        ("<answer>19", 0.0),
    ],
)
def test_reward(text: str, reward: float) -> None:
    assert score(text, 19) == reward
    assert score([{"role": "assistant", "content": text}], 19) == reward


def test_make_task_takes_every_field() -> None:
    config = TaskConfig(easy=True, seed=1, validation_seed=2, validation_prompts=3)
    made, expected = make_task(config, prompts_per_step=5), SumDigits(1, 2, 3, True)
    assert made.train_problem(4, 1) == expected.train_problem(4, 1)
    assert made.validation_problems() == expected.validation_problems()
    assert len(made.validation_problems()) == 3
    _, totals, *_ = made.rewards.score(Completions(["12 34="], ["<answer>10</answer>"], [[1]], [{"answer": 10}]))
    assert totals == [1.3]
