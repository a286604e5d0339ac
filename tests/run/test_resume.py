"""What a checkpoint records of the data that a run reads. `test_resumed_runs.py` resumes whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.config import LossConfig, RunConfig, TaskConfig, recipes
from lockstep.errors import InputError
from lockstep.json_file import to_json
from lockstep.run import checkpoint, resume
from lockstep.run.crash import CRASH_FILE
from lockstep.run.recorder import FAILURE_FILE, Recorder
from lockstep.run.train import train


def recorded(data: Path | str) -> Any:
    """The fingerprint of `data` as `task.data`."""
    return resume.identify_inputs(RunConfig(task=TaskConfig(data=str(data))))["data"]["task.data"]


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
    (tmp_path / "deep" / "__pycache__").mkdir()  # of a package, with the time of its module
    (tmp_path / "deep" / "__pycache__" / "own.cpython-311.pyc").write_text("")
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
        found.append(resume.identify_inputs(config)["data"])
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"task.validation_data", "attention_mask"}


def test_a_module_s_file_is_recorded_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loss, task = LossConfig("algorithm_of_mine:Loss"), TaskConfig(tools=("lockstep.environments.sandbox:run_python",))
    found = []
    for text in ("abc", "abd"):
        Path("algorithm_of_mine.py").write_text(text)
        found.append(resume.identify_inputs(RunConfig(loss=loss, task=task)))
    of_the_package = found[0]["data"]["task.tools lockstep.environments.sandbox:run_python"]
    assert of_the_package is None, "which other versions may have"

    def resumed(then: dict[str, Any]) -> None:
        loaded = checkpoint.LoadedCheckpoint(tmp_path / "step_1", 1, {"inputs": then}, ())
        resume.require_same(tmp_path, loaded, found[0])

    resumed(found[0])
    resumed(found[0] | {"data": {}})  # as earlier versions
    with pytest.raises(InputError, match=r"loss\.loss_type algorithm_of_mine:Loss was 3 bytes .* and is 3 bytes"):
        resumed(found[1])


def test_a_hub_id_is_recorded_by_its_name() -> None:
    assert recorded("somebody/rows") is None
    assert resume.identify_inputs(RunConfig())["data"] == dict.fromkeys(resume._DATA_FIELDS)


def test_the_configuration_is_standard_json() -> None:
    config = replace(RunConfig(), steps=4)
    settings = resume.identify_inputs(config)["config"]
    assert settings["steps"] == 4 and settings["sampling.stop"] == []
    to_json(settings)


@pytest.mark.parametrize("value", ['"text"', "null", "true", "[1]", "1" + "0" * 400, '"NaN"'])
def test_a_metric_that_is_no_number_is_named_before_anything_is_written(tmp_path: Path, value: str) -> None:
    good = to_json(dict.fromkeys(resume.SUMMARIZED_METRICS, 0.5))[1:]
    bad = good.replace('"time/sync": 0.5', f'"time/sync": {value}')
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, ' + good + '\n{"step": 1, ' + bad + "\n")
    resume._require_records(tmp_path, 1)  # the second line is of a step that is redone
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: time/sync is .*, not a number; delete the line"):
        resume._require_records(tmp_path, 2)
    path.write_text('{"step": 0, "updates": ' + value + ", " + good + "\n")  # which early versions did not record
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1: updates is .*, not a number"):
        resume._require_records(tmp_path, 1)
    path.write_text('{"step": 0}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 1: time/generate is None, not a number"):
        resume._require_records(tmp_path, 1)
    path.unlink()
    (tmp_path / "rollouts.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match=r"rollouts\.jsonl, line 1"):
        resume._require_records(tmp_path, 1)


def test_a_refused_resume_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / CRASH_FILE).write_text("how it ended")
    with pytest.raises(InputError, match="the run has 1 steps and no whole checkpoint"):
        train(recipes.sum_digits(None), tmp_path, resume=True)
    assert (tmp_path / CRASH_FILE).read_text() == "how it ended"


def test_evidence_of_an_earlier_failure_goes_when_the_run_is_done(tmp_path: Path) -> None:
    (tmp_path / FAILURE_FILE).write_text("{}")
    recorder = Recorder(recipes.sum_digits(None), tmp_path)
    recorder._finish(KeyboardInterrupt())
    assert (tmp_path / FAILURE_FILE).exists()
    recorder._finish(None)
    assert not (tmp_path / FAILURE_FILE).exists()
