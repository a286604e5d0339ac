"""What a checkpoint records of the data that a run reads. `test_run.py` resumes whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import RunConfig, TaskConfig
from lockstep.run import resume
from lockstep.run.metrics import to_json


def recorded(data: Path | str) -> Any:
    """The fingerprint of `data` as `task.data`."""
    return resume.inputs(RunConfig(task=TaskConfig(data=str(data))))["data"]["task.data"]


def test_a_file_is_its_size_and_bytes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("abc")
    first = recorded(file)
    assert first["size"] == 3
    file.write_text("abd")
    assert recorded(file) != first
    file.write_text("abc")
    assert recorded(file) == first


@pytest.mark.parametrize("name", ["more.parquet", "deep/er.arrow"])
def test_a_folder_is_its_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "rows.parquet").write_text("abc")
    first = recorded(tmp_path)
    (tmp_path / name).write_text("")  # of no bytes, but a file
    assert recorded(tmp_path) != first
    (tmp_path / name).unlink()
    (tmp_path / "cache-1.arrow").write_text("what datasets keeps")
    (tmp_path / ".lock").write_text("")
    assert recorded(tmp_path) == first


def test_a_file_of_a_folder_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "1.parquet").write_text("abc")
    (tmp_path / "2.parquet").write_text("abd")
    first = recorded(tmp_path)
    (tmp_path / "2.parquet").rename(tmp_path / "3.parquet")  # in the same place of their order
    assert recorded(tmp_path) != first


def test_validation_rows_and_the_mask_are_recorded_too(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    task = TaskConfig(data="somebody/rows", validation_data=str(file))
    config = RunConfig(task=task, attention="flex", attention_mask=f"{file}:mask")
    found = []
    for text in ("abc", "abd"):
        file.write_text(text)
        found.append(resume.inputs(config)["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"task.validation_data", "attention_mask"}


def test_a_hub_id_is_recorded_by_its_name() -> None:
    assert recorded("somebody/rows") is None
    assert resume.inputs(RunConfig())["data"] == dict.fromkeys(resume._DATA_FIELDS)


def test_the_configuration_is_standard_json() -> None:
    config = replace(RunConfig(), steps=4)
    settings = resume.inputs(config)["config"]
    assert settings["steps"] == 4 and settings["sampling.stop"] == []
    to_json(settings)
