"""Which environments begin with the prompts of rows, and what training does with rows that are too long."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import scripted_folder

from lockstep.config import RunConfig, SamplingConfig, TaskConfig, TrainerConfig, validate
from lockstep.environments import End, Environment, Turn, make_environment
from lockstep.environments.adapters.verifiers import VerifiersEnvironment
from lockstep.environments.tools import ToolEnvironment
from lockstep.errors import InputError
from lockstep.models.tokenizer import CHAT_TEMPLATE
from lockstep.rl.loop import Loop
from lockstep.session.build import TrainingSession, build, planned_workload, resolve, task_reader


def look(word: str) -> str:
    """Look up a word.

    Args:
        word: Which.
    """
    return word


class Ends(Environment):
    def step(self, turn: Turn) -> End:
        return End(float(len(turn.token_ids) % 2))


class Own(Ends):
    def start(self, row: dict[str, Any], seed: int) -> str:
        return "say 1"


class OwnTools(ToolEnvironment):
    def start(self, row: dict[str, Any], seed: int) -> str:
        return "say 1"


class Declared(Own):
    @classmethod
    def begins_with_rows(cls) -> bool:
        return True


class Misdeclared(Own):
    def begins_with_rows(self) -> bool:  # type: ignore[override]
        return True


class Short:
    def reset(self, **row: Any) -> str | None:
        return None


class Bare(Ends):
    """Has no set of tools, not even an empty one."""

    @classmethod
    def toolsets(cls) -> tuple[()]:
        return ()


class Wordy(Short):
    def say(self, word: str) -> str:
        """Say a word, at length.

        Args:
            word: Which, which may be any of those that one says where one says a word, in any language of people.
        """
        return word


class Untold(Ends):
    """Has a tool that texts do not show."""

    tools = ({"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}},)


class Told(Untold):
    def start(self, row: dict[str, Any], seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["prompt"]}]


BOTH = {"short": Short, "wordy": Wordy}


def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return {}


def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) % 2) for ids in completion_ids]


@pytest.mark.parametrize(
    ("name", "tools", "expected"),
    [
        (None, (), True),
        (None, (f"{__file__}:look",), True),
        ("calculator", (), True),
        (f"{__file__}:Wordy", (), True),
        (f"{__file__}:Own", (), False),
        (f"{__file__}:OwnTools", (), False),
        (f"{__file__}:Declared", (), True),
        (f"{__file__}:rollouts", (), False),
        ("http://127.0.0.1:9", (), False),
    ],
)
def test_which_environments_begin_with_rows(name: str | None, tools: tuple[str, ...], expected: bool) -> None:
    assert make_environment(TaskConfig(environment=name, tools=tools)).begins_with_rows() is expected
    assert not VerifiersEnvironment.begins_with_rows()


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template has a form of tool calls."""
    return scripted_folder(tmp_path_factory.mktemp("calls") / "model")


def a_run(model: Path, rows: list[dict[str, Any]], folder: Path, **task: Any) -> RunConfig:
    """A run on these rows, one of which is validated on, all in the first step."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {"reward": (f"{__file__}:parity",), "validation_prompts": 1, "max_turns": 2} | task
    return validate(
        RunConfig(
            recipe="dataset",
            model=str(model),
            device="cpu",
            task=TaskConfig("dataset", str(folder / "rows.jsonl"), **settings),
            sampling=SamplingConfig(max_completion_length=8),
            trainer=TrainerConfig(prompts_per_step=len(rows) - 1),
        )
    )


def test_rows_that_an_environment_does_not_begin_with_may_be_too_long(model: Path, tmp_path: Path) -> None:
    """Even longer than is encoded, and with what the plan of a run's processes expects."""
    rows = [{"prompt": "x" * size} for size in (3000, 100_000, 5, 4000)]
    config = a_run(model, rows, tmp_path, environment=f"{__file__}:Own", reward=())
    run = build(config)
    assert run.task.rows == 3 and run.shapes[0].max_len <= run.context == 2048
    limits = {"longest_prompt": run.prompt_limit.tokens, "prompt_limit": run.prompt_limit.tokens}
    w = planned_workload(resolve(config), 1, torch.device("cpu"), task_reader(config))
    assert {name: getattr(w, name) for name in limits} == limits
    left_out = replace(config.task, filter_overlong_prompts=True, validation_prompts=0)
    assert build(replace(config, task=left_out)).task.rows == 1, "as asked for"
    for other in ("Ends", "Declared"):
        named = replace(config.task, environment=f"{__file__}:{other}")
        with pytest.raises(InputError, match=r"2 of 3 training prompts .* line 1 \(3000 tok.*, .* line 2 \(100,000 by"):
            build(replace(config, task=named))
    named = replace(config.task, environment=f"{__file__}:Misdeclared")
    with pytest.raises(InputError, match=r"Misdeclared.begins_with_rows\(\) raised TypeError: .* missing 1 required"):
        build(replace(config, task=named))


def test_prompts_are_as_long_as_their_tools_make_them(
    calling: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = 1500  # the limit without tools
    rows = [{"prompt": "x" * size} for size in (5, room - 40, 6, 7)]
    config = a_run(calling, rows, tmp_path, tools=(f"{__file__}:look",), max_prompt_length=room)
    with pytest.raises(InputError, match=r"1 of 3 training prompts .* more than 1500 .*rows.jsonl line 2 \(1[5-9]"):
        build(config)
    assert build(replace(config, task=replace(config.task, filter_overlong_prompts=True))).task.rows == 2
    assert "left out: 1 of 3 training prompts" in caplog.text
    assert build(replace(config, task=replace(config.task, tools=(), max_turns=TaskConfig.max_turns))).task.rows == 3


def test_a_template_that_shows_the_date_is_told_and_can_be_given_a_day(
    shallow: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a run that is resumed on another day would silently have other prompts."""
    model = shutil.copytree(shallow, tmp_path / "model")
    date = "{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}{{ date }}"
    (model / "chat_template.jinja").write_text(date + CHAT_TEMPLATE)

    def prompt(row: Any, *variables: str) -> str:
        caplog.clear()
        task = {"chat_template_kwargs": variables, "max_turns": TaskConfig.max_turns}
        run = build(a_run(model, [{"prompt": row}] * 2, tmp_path, **task))
        return run.policy.tokenizer.decode(run.policy.encode(run.task.train_problem(0, 0).prompt))

    chat = [{"role": "user", "content": "hi"}]
    prompt(chat)
    assert "today's date" in caplog.text and 'task.chat_template_kwargs strftime_now="20' in caplog.text
    assert prompt(chat, 'strftime_now="2026-01-31"').startswith("31 Jan 2026<|im_start|>")
    assert prompt(chat, 'date="a day"').startswith("a day<|im_start|>") and prompt("hi") == "hi" and not caplog.text
    with pytest.raises(InputError, match="strftime_now is 'today'; it must be a day, as in \"2026-01-31\""):
        prompt(chat, 'strftime_now="today"')


def test_generated_prompts_with_tools_are_refused_before_the_first_step(calling: Path) -> None:
    task = TaskConfig(tools=(f"{__file__}:look",), max_prompt_length=50)
    with pytest.raises(InputError, match=r"^a prompt has [0-9]{3} tokens; at most 50 are allowed \(task.max_prompt_le"):
        build(validate(RunConfig(model=str(calling), device="cpu", task=task)))


def test_a_row_need_fit_with_only_one_of_several_sets_of_tools(calling: Path, tmp_path: Path) -> None:
    def made(limit: int) -> TrainingSession:
        rows = [{"prompt": "x" * 600, "environment": "short"}] * 3
        return build(a_run(calling, rows, tmp_path, environment=f"{__file__}:BOTH", max_prompt_length=limit))

    run = made(660)
    encode = run.policy.prompt_encoder(run.environment.toolsets()[1], as_chats=True)
    with_tools = len(encode(run.task.train_problem(0, 0).prompt))
    assert with_tools > 660 and run.shapes[0].max_len == 660 + run.config.max_response_length
    with pytest.raises(InputError, match="2 of 2 training prompts"):
        made(599)


def test_prompts_without_tools_are_measured_as_they_are_played(calling: Path, tmp_path: Path) -> None:
    """As chats by an environment that could have had tools, else as text."""
    rows, shown = [{"prompt": "x" * 600}] * 3, 0
    for name in ("Short", "Bare"):
        config = a_run(calling, rows, tmp_path, environment=f"{__file__}:{name}", reward=())
        run = build(config)
        given = run.environment().start(run.task.train_problem(0, 0).columns | rows[0], 0)
        shown = len(run.policy.tokens.encode_prompt(given))
        with pytest.raises(InputError, match=rf"2 of 2 training prompts .*\({shown} tokens\)"):
            build(replace(config, task=replace(config.task, max_prompt_length=shown - 1)))
        assert build(replace(config, task=replace(config.task, max_prompt_length=shown))).task.rows == 2
    assert shown == 600


def test_a_text_that_does_not_show_an_environments_tools_is_refused(calling: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "say 1"}] * 2
    for name in ("Told", "Untold"):
        config = a_run(calling, rows, tmp_path, environment=f"{__file__}:{name}", reward=(), validation_prompts=0)
        run = build(replace(config, trainer=TrainerConfig(prompts_per_step=2)))
        loop = Loop(run.config, run)
        if name == "Told":
            assert len(loop.step(0)[1]) == 2
            continue
        with pytest.raises(InputError, match=r"line [12].*: the environment has tools, and its prompt is a text"):
            loop.step(0)
