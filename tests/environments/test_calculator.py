"""The calculator: what it answers, and worked examples that ask it."""

from __future__ import annotations

import pytest

from lockstep.config import TaskConfig
from lockstep.environments import End, Turn, make_environment
from lockstep.environments.tasks.calculator import Calculator
from lockstep.environments.tasks.sum_digits import SumDigits
from lockstep.environments.tasks.word_arithmetic import WordArithmetic


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 12 + 5 =", " 17\n"),
        ("3-10=", " -7\n"),
        ("2 + 3 * -4 - 1 = ", " -11\n"),
        ("1 + 1 = 2\nthen 2 * 2 * 5 =", " 20\n"),
        ("<answer>5</answer>", End()),
        ("5 =", End()),
        ("(1 + 2) =", End()),
        ("9" * 16 + " + 1" * 3, End()),
        ("1 + 2 = 3", End()),
    ],
)
def test_it_answers_a_sum_that_ends_a_turn(text: str, answer: str | End) -> None:
    assert Calculator().step(Turn(text, [0], "stop")) == answer


def test_worked_examples_ask_for_their_sums() -> None:
    for task in (WordArithmetic(1, 2, 3), SumDigits(1, 2, 3, easy=False)):
        for i in range(20):
            problem = task.warmup_problem(0, i)
            turns, said = Calculator.worked_turns({}, problem.worked_example or ""), ""
            environment = make_environment(TaskConfig(environment="calculator"))()
            for turn in turns:
                answer = environment.step(Turn(turn, [0], "stop"))
                said += turn + (answer if isinstance(answer, str) else "")
            assert said == problem.worked_example and isinstance(answer, End) and len(turns) > 1
