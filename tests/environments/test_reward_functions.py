"""Reward functions of others: TRL's and verl's signatures, and finding a function by its name."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import IDS, PROMPTS, ROWS, TEXTS, score

from lockstep.environments.rewards.loading import load_reward, load_rewards
from lockstep.environments.rewards.reward_set import Completions, Reward, RewardSet
from lockstep.environments.rewards.verl import verl_reward
from lockstep.environments.tasks.gsm8k import gsm8k_reward
from lockstep.errors import InputError

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
    values = rewards.score(Completions(messages, texts, IDS, rows)).values
    assert [tuple(row.values())[:2] for row in values] == [(1.0, 0.0), (0.0, 1.0), (None, 0.0)]
    assert values[2]["cosine_scaled_reward"] == math.cos(3)


def test_trls_own_functions() -> None:
    trl = pytest.importorskip("trl.rewards")
    rewards = RewardSet([Reward(f.__name__, f) for f in (trl.accuracy_reward, trl.think_format_reward)])
    texts = ["<think>x</think>\\boxed{4}", "\\boxed{5}"]
    messages = [[{"role": "user", "content": "2+2?"}]] * 2
    values = rewards.score(Completions(messages, texts, IDS[:2], [{"solution": "$4$"}] * 2)).values
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
    assert rewards.score(Completions(PROMPTS, TEXTS, IDS, ROWS))[1] == [11.0, 12.0, 13.0]


def test_a_function_of_a_module() -> None:
    assert load_reward("lockstep.environments.tasks.gsm8k:gsm8k_reward") is gsm8k_reward


def test_a_file_finds_the_modules_beside_it_behind_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helper_of_rewards", raising=False)
    (tmp_path / "helper_of_rewards.py").write_text("import json\nSCORE = 0.5\n")
    (tmp_path / "json.py").write_text("1 / 0\n")
    (tmp_path / "own.py").write_text(
        "from helper_of_rewards import SCORE\ndef f(completions):\n    return [SCORE for _ in completions]\n"
    )
    assert load_reward(f"{tmp_path}/own.py:f")(completions=["a"]) == [0.5]


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
        ("{folder}/my_rewards.py:f", "my_rewards.py has no function 'f'$"),
        ("{folder}/my_rewards.py:lenght", r"my_rewards.py has no function 'lenght'; did you mean length\?"),
        ("{folder}/my_rewards.py:limit", "my_rewards.py has no function 'limit'"),
        ("{folder}/broken.py:f", "importing .*broken.py raised SyntaxError"),
        ("{folder}/sets.py:f", "importing .*sets.py sets torch's default dtype to torch.float64 and default device to"),
        (
            "{folder}/breaks.py:f",
            r"importing .*breaks.py raised ZeroDivisionError: division by zero \(.*breaks.py, line 4\)",
        ),
        ("{folder}/within.py:f", r"within.py raised JSONDecodeError: .* \(.*within.py, line 3\)"),
        ("builtins:max", "max does not say what it takes .*; wrap it in a def"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(source: Path, spec: str, message: str) -> None:
    (source.parent / "broken.py").write_text("def f(:")
    sets = "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_default_device('meta')\n"
    (source.parent / "sets.py").write_text(f"{sets}def f(completions):\n    return [0.0] * len(completions)\n")
    (source.parent / "breaks.py").write_text(f"{sets}1 / 0\n")
    (source.parent / "within.py").write_text("import json\n\njson.loads('[1')\n")
    spec = spec.format(folder=source.parent)
    with pytest.raises(InputError, match=f"reward '{spec}'.*{message}"):
        load_reward(spec)
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")


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
        values, totals, *_ = rewards.score(Completions(prompts, TEXTS, IDS, VERL_ROWS))
        assert totals == expected and list(values[0]) == [function]


def test_verls_signature_requires_verls_columns(source: Path) -> None:
    rewards = load_rewards([f"{source}:compute_score"])
    with pytest.raises(
        InputError, match="reward compute_score requires the column 'reward_model'; the data has answer"
    ):
        rewards.score(Completions(PROMPTS, TEXTS, IDS, ROWS))


def test_verls_function_fails_for_its_own_completion_only() -> None:
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"acc": 1} if extra_info["index"] == 1 else 1 / extra_info["index"]

    reward = Reward("compute_score", verl_reward(compute_score))
    with pytest.raises(InputError, match=r"raised ZeroDivisionError: .* line \d+ .for completion 0 of the 3"):
        RewardSet([reward]).score(Completions(PROMPTS, TEXTS, IDS, VERL_ROWS))
    scores = RewardSet([reward], "skip").score(Completions(PROMPTS, TEXTS, IDS, VERL_ROWS))
    assert scores.totals == [None, None, 0.5] and scores.errors == {"compute_score": 2}


@pytest.mark.parametrize("later", [False, True])
def test_what_verls_function_returns_beside_the_score_is_recorded(later: bool) -> None:
    def compute_score(solution_str, ground_truth):
        acc = {} if solution_str == "a" else {"acc": solution_str == "bb", "circle": circle}
        return {"score": 1.0, "pred": solution_str, **acc}

    async def compute_score_later(solution_str, ground_truth):
        return compute_score(solution_str, ground_truth)

    circle: list[Any] = []
    circle.append(circle)
    rewards = RewardSet([Reward("r", verl_reward(compute_score_later if later else compute_score))])
    assert rewards.score(Completions(PROMPTS, TEXTS, IDS, VERL_ROWS)).totals == [1.0] * 3
    assert rewards.logged.extra == {"pred": TEXTS, "acc": [None, True, False]}
    assert rewards.logged.metrics == {"acc": 0.5}


def test_a_row_without_extra_info_has_an_empty_one() -> None:
    """Also among rows that have one, where the column is None for it."""
    reward = verl_reward(lambda solution_str, ground_truth, extra_info: extra_info.get("index", -1.0))
    without, none = ({"reward_model": VERL_ROWS[0]["reward_model"]} | more for more in ({}, {"extra_info": None}))
    for rows, expected in (([without], [-1.0]), ([none, VERL_ROWS[1]], [-1.0, 1.0])):
        n = len(rows)
        assert RewardSet([Reward("r", reward)]).score(Completions(["p"] * n, ["a"] * n, [[1]] * n, rows))[1] == expected


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
    RewardSet([Reward("r", reward)]).score(Completions(PROMPTS * 2, TEXTS * 2, IDS * 2, VERL_ROWS * 2))
    assert most == 2


@pytest.mark.parametrize("model", [None, "7", {"style": "rule"}])
def test_a_row_without_verls_ground_truth_is_named(model: Any) -> None:
    reward = Reward("compute_score", verl_reward(lambda solution_str, ground_truth: 1.0))
    with pytest.raises(InputError, match="reward compute_score needs the column reward_model to hold an object"):
        RewardSet([reward]).score(Completions(["p"], ["a"], [[1]], [{"reward_model": model}]))
