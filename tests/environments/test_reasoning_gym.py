"""Tasks of the reasoning-gym package as data, and their scores."""

from __future__ import annotations

import pytest

from lockstep.config import TaskConfig
from lockstep.environments import make_task
from lockstep.environments.rewards.reward_set import Completions
from lockstep.errors import InputError


def test_settings_that_are_none_are_refused() -> None:
    pytest.importorskip("reasoning_gym")
    for data, message in (
        ("nothing", "reasoning_gym:nothing cannot be made: ValueError: Dataset 'nothing' not registered"),
        ("gcd,size=0", "size is 0; it must be a whole number of at least 1"),
        ("gcd,size", "has the setting 'size'; each must be NAME=VALUE"),
        ("gcd,colour=1", "cannot be made: TypeError"),
    ):
        with pytest.raises(InputError, match=message):
            make_task(TaskConfig("dataset", f"reasoning_gym:{data}", reward=("reasoning_gym",)), 2)


def test_rows_are_made_when_asked_for_and_scored_by_their_task() -> None:
    pytest.importorskip("reasoning_gym")
    config = TaskConfig("dataset", "reasoning_gym:gcd,size=30,seed=5", reward=("reasoning_gym",), validation_prompts=4)
    task, again = make_task(config, 2), make_task(config, 2)
    problems = [task.train_problem(step, group) for step in range(13) for group in range(2)]
    assert len({str(p.prompt) for p in problems}) == 26 and len(task.validation_problems()) == 4
    assert [again.train_problem(3, 1), *again.validation_problems()] == [problems[7], *task.validation_problems()]
    one = problems[0]
    texts = [one.columns["answer"], f"It is <answer>{one.columns['answer']}</answer>.", "7 <answer>no</answer>"]
    scores = task.rewards.score(Completions([one.prompt] * 3, texts, [[1]] * 3, [one.columns] * 3))
    assert scores.totals[:2] == [1.0, 1.0] and scores.totals[2] < 0.5
