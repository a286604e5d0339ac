"""The calculator: what it answers, and worked examples that ask it."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.config import TaskConfig
from lockstep.environments import (
    ChatCodec,
    End,
    Environment,
    Limits,
    Problem,
    Turn,
    make_environment,
    worked_trajectories,
)
from lockstep.environments.tasks.calculator import Calculator
from lockstep.environments.tasks.sum_digits import SumDigits
from lockstep.environments.tasks.word_arithmetic import WordArithmetic
from lockstep.errors import InputError


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


@pytest.mark.parametrize(
    ("limits", "cut"),
    [
        (Limits(None, 200, 2), "turn 2 of at most 2"),
        (Limits(None, 12, 9), "12"),
        (Limits(None, 57, 9), "58 of at most 57"),
    ],
)
def test_a_worked_example_that_a_limit_cuts_is_refused(limits: Limits, cut: str) -> None:
    """What is left of it would be learned as the whole."""
    problem = WordArithmetic(1, 2, 3).warmup_problem(0, 0)
    tokens = ChatCodec(lambda prompt: list(str(prompt).encode()), lambda messages, given: list(str(given).encode()))
    closed: list[Environment] = []

    class Closing(Calculator):
        def close(self) -> None:
            closed.append(self)

    whole = (Closing, [problem], tokens, lambda text, in_chat: list(text.encode()))
    (made,) = worked_trajectories(*whole, Limits(None, 58, 9))
    assert made.text.endswith("</answer>") and len(made.turns) > 2 and len(closed) == 1
    with pytest.raises(InputError, match=rf"worked example 0 is cut in .*{cut}.* larger task.max_turns or task.max_re"):
        worked_trajectories(*whole, limits)
    assert len(closed) == 2

    class Untaught(Calculator):
        @classmethod
        def worked_turns(cls, row: dict[str, Any], worked_example: str) -> list[str]:
            return []

    with pytest.raises(InputError, match="worked example 0: its worked_turns are none"):
        worked_trajectories(Untaught, *whole[1:], limits)


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            lambda: ["1 + 1 =", "done", "never", "asked"],
            "ends it after turn 2 of 4 that its worked_turns are; they must",
        ),
        (lambda: {}["turns"], "task.environment: Taught.worked_turns raised KeyError: 'turns'"),
        (lambda: "1 + 1 =", "Taught.worked_turns returned '1 .*'; it must return a list of texts, one a turn"),
        (lambda: (turn for turn in ["1 + 1 =", "2"]), "worked_turns returned <generator .*>; it must return a list"),
        (lambda: [1, 2], r"worked_turns returned \[1, 2\]; it must return a list of texts"),
    ],
)
def test_worked_turns_that_cannot_be_learned_as_they_are_name_their_row(turns: Any, message: str) -> None:
    class Taught(Calculator):
        @classmethod
        def worked_turns(cls, row: dict[str, Any], worked_example: str) -> Any:
            return turns()

    tokens = ChatCodec(lambda prompt: list(str(prompt).encode()), lambda messages, given: list(str(given).encode()))
    problem = Problem("a", origin="rows.jsonl line 7")
    with pytest.raises(InputError, match=rf"^worked example 0 \(rows.jsonl line 7\): .*{message}"):
        worked_trajectories(Taught, [problem], tokens, lambda text, in_chat: list(text.encode()), Limits(None, 99, 9))
