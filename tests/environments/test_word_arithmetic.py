"""Stories: right answers, worked examples that earn everything, validation kept apart."""

from __future__ import annotations

import re

from lockstep.environments.rewards.reward_set import Completions
from lockstep.environments.tasks.word_arithmetic import WordArithmetic, split_of_steps

TASK = WordArithmetic(42, 99, 200)


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text.split("How many")[0])]


def test_worked_examples_are_right_and_earn_the_full_reward() -> None:
    problems = [TASK.train_problem(s, g) for s in range(20) for g in range(10)]
    texts = [p.worked_example or "" for p in problems]
    _, totals, *_ = TASK.rewards.score(
        Completions([p.prompt for p in problems], texts, [[] for _ in texts], [p.columns for p in problems])
    )
    assert totals == [1.3] * 200
    for problem, text in zip(problems, texts, strict=True):
        for line in text.splitlines()[:-1]:
            left, result = line.split(" = ")
            a, sign, b = left.split()
            assert int(a) + int(sign + b) == int(result) >= 0
        told = numbers(str(problem.prompt))
        used = [int(line.split()[0]) for line in text.splitlines()[:1]] + [
            int(line.split()[2]) for line in text.splitlines()[:-1]
        ]
        assert told == used
        assert text.endswith(f"<answer>{problem.columns['answer']}</answer>")


def test_problems_are_pure_functions_of_their_place_and_vary() -> None:
    again = WordArithmetic(42, 99, 200)
    assert [TASK.train_problem(3, g) for g in range(8)] == [again.train_problem(3, g) for g in range(8)]
    assert len({str(TASK.train_problem(s, g).prompt) for s in range(20) for g in range(10)}) > 195
    assert TASK.train_problem(0, 0) != WordArithmetic(43, 99, 0).train_problem(0, 0)


def test_no_validation_story_is_ever_trained_on() -> None:
    def changes(problem) -> list[int]:
        lines = (problem.worked_example or "").splitlines()[:-1]
        return [int(lines[0].split()[0])] + [int(line.split()[1] + line.split()[2]) for line in lines]

    assert all(split_of_steps(changes(p)) != "train" for p in TASK.validation_problems())
    selection = [changes(p) for p in TASK.selection_problems()]
    assert len(selection) == len(TASK.validation_problems()) and all(split_of_steps(s) != "train" for s in selection)
    validation = list(map(changes, TASK.validation_problems()))
    assert not [s for s in selection if s in validation]
    trained = [TASK.train_problem(s, g) for s in range(20) for g in range(10)]
    trained += [TASK.warmup_problem(s, g) for s in range(5) for g in range(10)]
    assert all(split_of_steps(changes(p)) == "train" for p in trained)
