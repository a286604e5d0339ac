"""The README's commands parse, and its example runs."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep
from lockstep import config_file
from lockstep.cli import main
from lockstep.config import RunConfig

README = Path(lockstep.__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("lockstep ")
]


def example(name: str) -> str:
    """The Python block under `<!-- example: NAME -->`."""
    (code,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", TEXT, re.DOTALL)
    return code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_commands_of_every_kind() -> None:
    assert {command.split()[1] for command in COMMANDS} == {"train", "generate", "eval", "parity", "init"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    (folder / "runs/first").mkdir(parents=True)
    config_file.save(RunConfig(), folder / "runs/first/config.yaml")
    done = SimpleNamespace(identical=True, render=str, to_dict=dict)
    run = SimpleNamespace(train=lambda *_: {}, generate=lambda *_: [], evaluate=lambda *_: {})
    monkeypatch.setitem(sys.modules, "lockstep.run", run)
    monkeypatch.setitem(sys.modules, "lockstep.parity", SimpleNamespace(check_model=lambda *_: done))
    monkeypatch.setitem(sys.modules, "lockstep.models.init", SimpleNamespace(init_folder=lambda *_: {}))
    assert main(shlex.split(command)[1:]) == 0


def test_the_reward_example(folder: Path) -> None:
    code = example("own-reward")
    assert len(code.splitlines()) <= 15
    (folder / "sums.py").write_text(code)
    defined = runpy.run_path("sums.py", run_name="__main__")
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 100 and rows[12] == {"prompt": "1 + 2 = ", "answer": "3"}
    assert defined["exact"](completions=["so 3", "4"], answer=["3", "3"], prompts=["", ""]) == [1.0, 0.0]
    assert "--data sums.jsonl --reward sums.py:exact" in TEXT
