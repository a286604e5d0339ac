"""Dataset and GSM8K tasks: order, held-out rows, rewards and their errors, on real GSM8K rows."""

from __future__ import annotations

import dataclasses
import json
from decimal import Decimal
from pathlib import Path

import pytest

from lockstep.config import TaskConfig
from lockstep.errors import InputError
from lockstep.tasks import make_task
from lockstep.tasks.dataset import permutation
from lockstep.tasks.gsm8k import final_number, gsm8k_reward

SAMPLE = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
ROWS = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
CONFIG = TaskConfig(name="gsm8k", data=str(SAMPLE), validation_prompts=10)


def questions(config: TaskConfig, steps: range, prompts_per_step: int = 7) -> list[str]:
    task = make_task(config, prompts_per_step)
    problems = [task.train_problem(step, group) for step in steps for group in range(prompts_per_step)]
    return [problem.columns["question"] for problem in problems]


def test_an_epoch_visits_every_training_row_once_in_a_new_order() -> None:
    order = questions(CONFIG, range(0, 60))
    epochs = [order[start : start + 30] for start in range(0, 420, 30)]
    training = {row["question"] for row in ROWS[:30]}
    assert all(len(set(epoch)) == 30 and set(epoch) == training for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_the_order_needs_no_state_and_follows_the_seed() -> None:
    order = questions(CONFIG, range(0, 10))
    assert questions(CONFIG, range(6, 10)) == order[42:]
    assert questions(dataclasses.replace(CONFIG, seed=1), range(0, 10)) != order


def test_the_permutations_bits_do_not_change() -> None:
    assert permutation(8, 42, 0) == (7, 6, 0, 1, 3, 2, 5, 4)


def test_the_last_rows_are_held_out() -> None:
    validation = make_task(CONFIG, 7).validation_problems()
    assert [problem.columns["question"] for problem in validation] == [row["question"] for row in ROWS[30:]]
    assert validation[0].origin == f"{SAMPLE} line 31"


def test_validation_data_leaves_all_rows_to_training(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS[:15]))
    config = dataclasses.replace(CONFIG, validation_data=str(path))
    assert set(questions(config, range(8), 5)) == {row["question"] for row in ROWS}
    validation = make_task(config, 5).validation_problems()
    assert [problem.origin for problem in validation] == [f"{path} line {n}" for n in range(1, 11)]


def test_no_validation_prompts_turn_it_off() -> None:
    config = dataclasses.replace(CONFIG, validation_prompts=0)
    assert make_task(config, 5).validation_problems() == []
    assert len(set(questions(config, range(8), 5))) == 40


def test_holding_out_every_row_is_refused() -> None:
    with pytest.raises(InputError, match="has 40 rows and task.validation_prompts holds out 40"):
        make_task(dataclasses.replace(CONFIG, validation_prompts=40), 5)


def test_every_real_row_rewards_its_own_answer_and_no_other() -> None:
    answers = [row["answer"] for row in ROWS]
    assert gsm8k_reward(answers, answers) == [1.0] * 40
    assert gsm8k_reward(["It is 123456."] * 40, answers) == [0.0] * 40
    task = make_task(CONFIG, 5)
    problem = task.train_problem(0, 0)
    number = final_number(problem.columns["answer"])
    values, totals = task.rewards.score([problem.prompt], [f"So it is {number}."], [[1]], [problem.columns])
    assert (values, totals) == ([{"correct": 1.0}], [1.0])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = 7 apples.", "7"),
        ("#### 1,234", "1234"),
        ("#### $5.50 for 2", "5.5"),
        ("12 #### 3 then #### -4. In 5 days", "-4"),
        ("10-3", "3"),
        ("it is -3", "-3"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("42.0", "42"),
        ("The answer is 18.", "18"),
    ],
)
def test_final_number(text: str, number: str) -> None:
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "3 apples ####", "####"])
def test_no_final_number(text: str) -> None:
    assert final_number(text) is None
    assert gsm8k_reward([text], ["#### 3"]) == [0.0]
    assert gsm8k_reward(["3"], [text]) == [None]


@pytest.mark.parametrize("answer", ["18", "#### none", 18, None])
def test_a_gsm8k_row_without_a_final_number_is_named(tmp_path: Path, answer: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [ROWS[0], {"question": "q", "answer": answer}]))
    config = dataclasses.replace(CONFIG, data=str(path), validation_prompts=1)
    with pytest.raises(InputError, match=f"{path} line 2: answer must be a text that ends with the final number"):
        make_task(config, 5)


def test_a_dataset_takes_the_users_rewards_with_weights(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def half(completions, question, **kwargs): return [0.5] * len(completions)")
    config = TaskConfig(
        name="dataset",
        data=str(SAMPLE),
        reward=(f"{path}:half", "lockstep.tasks.gsm8k:gsm8k_reward"),
        reward_weights=(2.0, 10.0),
    )
    task = make_task(config, 5)
    rows = [problem.columns for problem in task.validation_problems()]
    assert len(rows) == 20
    values, totals = task.rewards.score(["p"] * 20, [row["answer"] for row in rows], [[1]] * 20, rows)
    assert values[0] == {"half": 0.5, "gsm8k_reward": 1.0} and totals == [11.0] * 20


def test_a_reward_without_its_column_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def judge(completions, solution): return [0.5] * len(completions)")
    config = TaskConfig(name="dataset", data=str(SAMPLE), reward=(f"{path}:judge",))
    with pytest.raises(InputError, match="reward judge requires the column 'solution'; the data has question, answer"):
        make_task(config, 5)


def test_a_dataset_without_a_reward_is_refused() -> None:
    with pytest.raises(InputError, match="task.reward is missing"):
        make_task(TaskConfig(name="dataset", data=str(SAMPLE)), 5)


def test_data_has_no_worked_examples() -> None:
    with pytest.raises(InputError, match="task gsm8k has no worked examples"):
        make_task(CONFIG, 5).warmup_problem(0, 0)
