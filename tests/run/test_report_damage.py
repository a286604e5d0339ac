"""A report of a run folder in which files are missing, damaged or hold values out of all measure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from report_cases import make_run, read, step_metrics

from lockstep.errors import InputError
from lockstep.run.metrics import MetricsWriter, write_json
from lockstep.run.report import write_comparison, write_report


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "rollouts.jsonl", "summary.json", "parity.json"])
def test_a_missing_file_leaves_its_part_out(tmp_path: Path, missing: str) -> None:
    make_run(tmp_path)
    (tmp_path / missing).unlink()
    assert read(tmp_path).tags


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that gives an error in place of its bytes")
@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "rollouts.jsonl"])
def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path, name: str) -> None:
    (make_run(tmp_path) / name).unlink()
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=f"{name} cannot be read: .*Input/output error"):
        write_report(tmp_path)


def test_a_configuration_alone_and_one_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("steps: 3\n")
    assert "parity: not checked" in read(tmp_path).text
    assert any("1 steps recorded" in part for part in read(make_run(tmp_path, steps=1)).text)


def test_a_folder_of_a_model_is_no_run(tmp_path: Path) -> None:
    run, model = make_run(tmp_path / "run"), tmp_path / "run" / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for write in (lambda: write_report(model), lambda: write_comparison([run, model], tmp_path / "runs.html")):
        with pytest.raises(InputError, match=f"^{model} is not a run folder: it has none of a run's files$"):
            write()
    assert [path.name for path in model.iterdir()] == ["config.json"] and not (tmp_path / "runs.html").exists()


def test_damaged_files(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "summary.json").write_text("{torn")
    assert any("summary.json: " in text for text in read(tmp_path).text)
    (tmp_path / "config.yaml").write_text("a_field_of_another_version: 1\n")
    assert {"Written by another version.", "a_field_of_another_version: 1\n"} <= set(read(tmp_path).text)
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match="metrics.jsonl, line 1"):
        write_report(tmp_path)


def test_a_page_is_written_where_a_page_belongs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = (run / "config.yaml").read_bytes()
    (tmp_path / "folder.html").mkdir()
    for out in (run / "config.yaml", tmp_path, tmp_path / "folder.html", run / "config.yaml" / "x.html"):
        for write in (lambda: write_report(run, out), lambda: write_comparison([run, run], out)):  # noqa: B023
            with pytest.raises(InputError, match=re.escape(str(out))):
                write()
    with pytest.raises(InputError, match="nosuch/x.html: there is no folder"):
        write_report(run, tmp_path / "nosuch" / "x.html")
    assert (run / "config.yaml").read_bytes() == before and not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("step", [str(10**400), "1.5", '"3"', "-1", "true", "[" * 100_000])
def test_a_step_that_is_no_step_is_named(tmp_path: Path, step: str) -> None:
    path = make_run(tmp_path, steps=1) / "metrics.jsonl"
    path.write_text(path.read_text() + f'{{"step": {step}}}\n')
    with pytest.raises(InputError, match="metrics.jsonl, line 2: not a JSON object with a whole number `step`"):
        write_report(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text(f'{{"step": {step}, "samples": []}}\n')
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="metrics.jsonl is not a regular file"):
        write_report(tmp_path)
    path.rmdir()
    assert read(tmp_path).tags


def test_values_out_of_all_measure(tmp_path: Path) -> None:
    huge = 10**400
    make_run(tmp_path)
    with MetricsWriter(tmp_path / "metrics.jsonl", 5) as metrics:
        metrics.write(step_metrics(5) | {"entropy": huge})
    write_json(tmp_path / "rollouts.jsonl", {})
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"step": 0, "samples": [{"reward": huge}]}) + "\n")
    validation = {"validation": {"x": {"a": 1}, "1": {"b": huge, "c": "NaN", "d": 0.5}, "2": 3}}
    write_json(tmp_path / "summary.json", {"total_s": huge, "startup_s": huge, "n": huge} | validation)
    assert "Entropy, nats a token" in read(tmp_path).text
    write_comparison([tmp_path, tmp_path], tmp_path / "runs.html")


@pytest.mark.parametrize("depth", [500, 900, 100_000])
@pytest.mark.parametrize("name", ["summary.json", "parity.json", "failure.json"])
def test_nested_without_end(tmp_path: Path, name: str, depth: int) -> None:
    make_run(tmp_path)
    (tmp_path / name).write_text('{"a":' * depth + "1" + "}" * depth)
    assert read(tmp_path).tags
    (tmp_path / name).write_text('{"error": ' + "[" * depth + "]" * depth + "}")
    assert read(tmp_path).tags


@pytest.mark.parametrize(
    "group", ['{"step": 0, "samples": 3}', '{"step": 0, "samples": [3]}', '{"step": 0, "samples": null}']
)
def test_rollouts_that_are_none_are_left_out(tmp_path: Path, group: str) -> None:
    make_run(tmp_path, steps=1)
    (tmp_path / "rollouts.jsonl").write_text(group + "\n")
    assert "Sample rollouts" not in read(tmp_path).text
