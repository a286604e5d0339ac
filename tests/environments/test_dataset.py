"""Dataset and GSM8K tasks: order, held-out rows, rewards and their errors, on real GSM8K rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest

from lockstep.config import RunConfig, TaskConfig, validate
from lockstep.environments import PromptLimit, make_task
from lockstep.environments.data.dataset import permute
from lockstep.environments.rewards.reward_set import Completions
from lockstep.environments.tasks.gsm8k import final_number, gsm8k_reward
from lockstep.errors import InputError
from lockstep.models.init import init_folder
from lockstep.session.build import build

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
    assert [permute(i, 8, 42, 0) for i in range(8)] == [7, 5, 1, 4, 6, 3, 2, 0]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 1000])
def test_every_length_is_permuted(length: int) -> None:
    orders = [[permute(i, length, 7, epoch) for i in range(length)] for epoch in range(3)]
    assert all(sorted(order) == list(range(length)) for order in orders)
    assert length < 5 or orders[0] != orders[1] != orders[2]


def test_a_permutation_leaves_no_trend() -> None:
    """Rank correlation of the order with itself, and the mean distance of neighbours, as for a random order."""
    length = 2000
    order = [permute(i, length, 3, 0) for i in range(length)]
    middle = (length - 1) / 2
    correlation = sum((i - middle) * (x - middle) for i, x in enumerate(order)) / (length * (length**2 - 1) / 12)
    distance = sum(abs(a - b) for a, b in itertools.pairwise(order)) / (length - 1) / length
    assert abs(correlation) < 0.08 and abs(distance - 1 / 3) < 0.03


def test_a_place_in_data_of_any_size_costs_the_same() -> None:
    assert len({permute(i, 10**12, 0, 0) for i in range(100)}) == 100


def test_the_last_rows_are_held_out() -> None:
    validation = make_task(CONFIG, 7).validation_problems()
    assert [problem.columns["question"] for problem in validation] == [row["question"] for row in ROWS[30:]]
    assert validation[0].origin == f"{SAMPLE} line 31"


def test_validation_data_leaves_all_rows_to_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "validation.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS[:15]))
    config = dataclasses.replace(CONFIG, validation_data=str(path))
    assert set(questions(config, range(8), 5)) == {row["question"] for row in ROWS}
    validation = make_task(config, 5).validation_problems()
    assert [problem.origin for problem in validation] == [f"{path} line {n}" for n in range(1, 11)]
    said = f"task.validation_data {path} has 15 rows; the first 10 are validated on, as task.validation_prompts says"
    assert set(caplog.messages) == {said}


def test_data_that_is_also_validated_on_is_read_once(caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(CONFIG, name="dataset", validation_data=str(SAMPLE), reward=("gsm8k",))
    task = make_task(config, 5)
    assert [problem.origin for problem in task.validation_problems()] == [f"{SAMPLE} line {n}" for n in range(1, 11)]
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"task.data {SAMPLE} has question and answer")
    assert task.rows == len(ROWS)


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_the_first_process_alone_speaks_of_the_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: str, said: int
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    make_task(dataclasses.replace(CONFIG, name="dataset", reward=("gsm8k",)), 5)
    assert len(caplog.messages) == said


def test_a_split_is_validated_on(tmp_path: Path) -> None:
    tables = {"train": datasets.Dataset.from_list(ROWS[:20]), "test": datasets.Dataset.from_list(ROWS[30:33])}
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "splits")
    config = dataclasses.replace(CONFIG, data=str(tmp_path / "splits"), validation_split="test")
    held_out = [problem.columns["question"] for problem in make_task(config, 5).validation_problems()]
    assert held_out == [row["question"] for row in ROWS[30:33]]
    assert set(questions(config, range(4), 5)) == {row["question"] for row in ROWS[:20]}


def test_no_validation_prompts_turn_it_off() -> None:
    config = dataclasses.replace(CONFIG, validation_prompts=0)
    assert make_task(config, 5).validation_problems() == []
    assert len(set(questions(config, range(8), 5))) == 40


def test_holding_out_every_row_is_refused() -> None:
    with pytest.raises(InputError, match="has 40 rows and .* holds out 40; .*--task.validation-prompts 0"):
        make_task(dataclasses.replace(CONFIG, validation_prompts=40), 5)


def test_every_real_row_rewards_its_own_answer_and_no_other() -> None:
    answers = [row["answer"] for row in ROWS]
    assert gsm8k_reward(answers, answers) == [1.0] * 40
    assert gsm8k_reward(["It is 123456."] * 40, answers) == [0.0] * 40
    task = make_task(CONFIG, 5)
    problem = task.train_problem(0, 0)
    number = final_number(problem.columns["answer"])
    values, totals, *_ = task.rewards.score(
        Completions([problem.prompt], [f"So it is {number}."], [[1]], [problem.columns])
    )
    assert (values, totals) == ([{"correct": 1.0}], [1.0])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("He has 3 + 4 = 7 apples.", "7"),
        ("#### 1,234", "1234"),
        ("#### $5.50 for 2", "5.5"),
        ("12 #### 3 then #### -4. In 5 days", "-4"),
        ("10-3", "3"),
        ("Each costs $.50", "0.5"),
        ("so it is...42", "42"),
        ("of 7 half: -.5", "-0.5"),
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
        reward=(f"{path}:half", "lockstep.environments.tasks.gsm8k:gsm8k_reward"),
        reward_weights=(2.0, 10.0),
    )
    task = make_task(config, 5)
    rows = [problem.columns for problem in task.validation_problems()]
    assert len(rows) == 20
    values, totals, *_ = task.rewards.score(Completions(["p"] * 20, [row["answer"] for row in rows], [[1]] * 20, rows))
    assert values[0] == {"half": 0.5, "gsm8k_reward": 1.0} and totals == [11.0] * 20


def test_a_reward_without_its_column_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text("def judge(completions, solution): return [0.5] * len(completions)")
    config = TaskConfig(name="dataset", data=str(SAMPLE), reward=(f"{path}:judge",))
    with pytest.raises(InputError, match="reward judge requires the column 'solution'; the data has question, answer"):
        make_task(config, 5)


def test_a_dataset_without_a_reward_is_refused() -> None:
    with pytest.raises(InputError, match="task.reward is missing"):
        validate(RunConfig(recipe="dataset", task=TaskConfig(name="dataset", data=str(SAMPLE))))


def test_data_in_its_own_order() -> None:
    config = dataclasses.replace(CONFIG, shuffle=False)
    assert questions(config, range(6)) == [row["question"] for row in (ROWS[:30] * 2)[:42]]


def test_overlong_rows_leave_the_order_a_pure_function(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * n, "n": n}) + "\n" for n in range(1, 21)))
    config = TaskConfig(name="dataset", data=str(path), reward=("math",), validation_prompts=5)

    def visited(**fields: bool) -> list[int]:
        task = make_task(dataclasses.replace(config, **fields), 4)
        task.check_lengths(lambda prompt: list(prompt.encode()), PromptLimit(18, "a test"))
        order = [task.train_problem(step, group).columns["n"] for step in range(8) for group in range(4)]
        return order + [problem.columns["n"] for problem in task.validation_problems()]

    with pytest.raises(
        InputError, match="2 of 5 validation prompts of task.data .* have more than 18 tokens .a test.: .* line 19"
    ):
        visited()
    kept = visited(filter_overlong_prompts=True)
    assert kept == visited(filter_overlong_prompts=True)
    assert sorted(kept[:15]) == list(range(1, 16)) and kept[-3:] == [16, 17, 18]


def test_the_chat_template_gets_its_variables_and_the_system_prompt(tmp_path: Path) -> None:
    init_folder("tiny", tmp_path / "model", seed=0)
    template = (
        "{{ messages | map(attribute='content') | join('/') }}{% if not enable_thinking %}<no>{% endif %}{{ budget }}"
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    task = TaskConfig(
        name="gsm8k",
        data=str(SAMPLE),
        system_prompt="Be brief.",
        chat_template_kwargs=("enable_thinking=false", 'budget="7"'),
    )
    run = build(validate(RunConfig(recipe="gsm8k", model=str(tmp_path / "model"), task=task)))
    problem = run.task.train_problem(0, 0)
    text = bytes(run.policy.encode(problem.prompt)).decode()
    assert text.startswith(f"Be brief./{problem.columns['question']}") and text.endswith("<no>7")


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"prompt": "p"},
            {"validation_split": "test"},
            "task.validation_split has no effect on .*rows.jsonl, which has",
        ),
        ({"prompt": "p"}, {"split": "test"}, "task.split has no effect on .*rows.jsonl, which has no splits"),
        ({"prompt": "p"}, {"chat_template_kwargs": ("a=1",)}, "task.chat_template_kwargs has no effect on text prom"),
        ({"prompt": "p"}, {"validation_data": "none.jsonl"}, "task.validation_data none.jsonl cannot be read"),
        (
            {"prompt": "p", "reward_model": "7"},
            {},
            "rows.jsonl line 1: reward math needs the column reward_model to hold an object .*; a row's is '7'",
        ),
    ],
)
def test_what_cannot_work_is_found_when_the_data_is_read(
    tmp_path: Path, row: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n" * 3)
    config = TaskConfig(name="dataset", data=str(path), reward=("math",), validation_prompts=1)
    with pytest.raises(InputError, match=message):
        make_task(dataclasses.replace(config, **fields), 1)


def test_template_variables_act_on_text_prompts_under_a_system_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "1"}\n')
    config = TaskConfig(name="dataset", data=str(path), reward=("math",), validation_prompts=0)
    task = make_task(dataclasses.replace(config, chat_template_kwargs=("a=1",), system_prompt="s"), 1)
    assert isinstance(task.train_problem(0, 0).prompt, list)


def test_data_has_no_worked_examples() -> None:
    with pytest.raises(InputError, match="task gsm8k has no worked examples"):
        make_task(CONFIG, 5).warmup_problem(0, 0)
    played = make_task(dataclasses.replace(CONFIG, environment="calculator"), 5)  # of which its worked_turns may tell
    drawn = [played.warmup_problem(step, i) for step in range(2) for i in range(4)]
    again = [played.warmup_problem(step, i) for step in range(2) for i in range(4)]
    assert drawn == again and len({problem.origin for problem in drawn}) > 2
