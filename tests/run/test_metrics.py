"""metrics.jsonl and its readers: valid JSON whatever the values, and one history whatever was killed."""

from __future__ import annotations

import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import InputError, LockstepError
from lockstep.json_file import to_json
from lockstep.run import resume
from lockstep.run.metrics import (
    ROLLOUTS_FILE,
    SUMMARY_FILE,
    MetricsWriter,
    add_to_step,
    atomic_write,
    logprobs_digest,
    read_records,
    rollout_records,
    write_json,
)
from lockstep.run.report.metric_titles import SECTIONS, catalogued_name, title_of
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams, Segment, Trajectory


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_to_json_is_standard_json_on_one_line(value: object) -> None:
    text = to_json(value)
    json.loads(text, parse_constant=refuse_constant)
    assert "\n" not in text


@given(st.floats(allow_nan=False))
def test_floats_survive_exactly(value: float) -> None:
    assert float(json.loads(to_json({"x": value}))["x"]) == value


def test_scalars_of_torch_and_numpy_and_paths() -> None:
    value = {"t": torch.tensor(0.5), "n": np.float32(math.nan), "i": np.int64(3), "p": Path("a/b"), "l": (1, -math.inf)}
    assert json.loads(to_json(value)) == {"t": 0.5, "n": "NaN", "i": 3, "p": "a/b", "l": [1, "-Infinity"]}


def test_a_metric_is_listed_once_and_found_by_the_name_it_is_recorded_under() -> None:
    names = [name for metrics in SECTIONS.values() for name in metrics]
    assert len(set(names)) == len(names)
    assert (
        catalogued_name("rewards/a/b/mean") == "rewards/<fn>/mean"
        and catalogued_name("reward_errors/f") == "reward_errors/<fn>"
    )
    assert title_of("rewards/a/b/mean") == "Reward function a/b" and title_of("lr") == "Learning rate"
    assert catalogued_name("my/own") is None and title_of("my/own") == "my/own"


def write(path: Path, steps: range, start: int, run: str) -> None:
    with MetricsWriter(path, start) as writer:
        for step in steps:
            writer.write({"run": run, "step": step})


def test_each_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({"loss": math.nan, "step": 0})
        assert path.read_text() == '{"step": 0, "loss": "NaN"}\n'


def test_resuming_drops_the_steps_that_come_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(0, 6), 0, "first")
    write(path, range(4, 8), 4, "second")
    records = list(read_records(path))
    assert [r["step"] for r in records] == list(range(8))
    assert [r["run"] for r in records] == ["first"] * 4 + ["second"] * 4


def test_resuming_keeps_earlier_lines_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = b'{"b": 1.0e-3,   "step": 0}\n'
    path.write_bytes(line + b'{"step": 1}\n')
    MetricsWriter(path, 1).close()
    assert path.read_bytes() == line


def test_metrics_are_added_to_a_step_and_later_steps_go(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", b'{"b": 1.0e-3,   "step": 0}\n'
    path.write_bytes(line + b'{"step": 1, "a": 2}\n{"step": 2}\n')
    add_to_step(path, 1, {"c": 3})
    assert path.read_bytes().startswith(line) and [*read_records(path)][1:] == [{"step": 1, "a": 2, "c": 3}]
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + b'{"step": 1}\n'[:-cut])
    assert [r["step"] for r in read_records(path)] == [0]
    write(path, range(1, 2), 1, "second")
    assert [r["step"] for r in read_records(path)] == [0, 1]


def test_several_lines_a_step_resume_together(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    with MetricsWriter(path) as writer:
        for step in (0, 0, 1, 1):
            writer.write({"step": step})
    MetricsWriter(path, 1).close()
    assert [r["step"] for r in read_records(path)] == [0, 0]


def test_of_many_rollouts_only_those_of_a_step_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, decoded = tmp_path / ROLLOUTS_FILE, []
    with MetricsWriter(path) as writer:
        for step in range(6):
            writer.write({"step": step, "group": 0, "samples": []})
    own = path.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr("lockstep.run.metrics.json", SimpleNamespace(loads=lambda line: decoded.append(line) or {}))
    resume._require_records(tmp_path, 4)
    MetricsWriter(path, 4).close()
    assert path.read_bytes() == b"".join(own[:4]) and decoded == []
    with pytest.raises(InputError, match="line 3: not a JSON object"):
        list(read_records(path, 2))
    assert decoded == [own[2]]


@pytest.mark.parametrize("bad", ["{not json}", "[1]", '{"loss": 1}', '{"step": null}', "\xff"])
def test_an_unreadable_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + bad.encode("latin-1") + b'\n{"step": 1}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2: "):
        MetricsWriter(path, 1)
    assert path.read_bytes().count(b"\n") == 3  # untouched


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that gives an error in place of its bytes")
def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")
    for read in (lambda: list(read_records(path)), lambda: MetricsWriter(path, 1)):
        with pytest.raises(InputError, match=r"metrics\.jsonl cannot be read: .*Input/output error"):
            read()
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, before[1]))
        try:
            with pytest.raises(LockstepError, match=r"could not write .*m\.jsonl: .*File too large"):
                writer.write({"step": 1, "text": "x" * 40})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(read_records(tmp_path / "m.jsonl")) == [{"step": 0}]
    MetricsWriter(tmp_path / "m.jsonl", start_step=1).close()
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 0}\n'


def test_a_file_that_the_disk_refuses_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))
    try:
        with pytest.raises(LockstepError, match=r"could not write .*/summary\.json: .*File too large"):
            write_json(path, {"a": "x" * 40})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_summary_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / SUMMARY_FILE, {"total_s": 1.0})
    write_json(tmp_path / SUMMARY_FILE, {"total_s": 2.0, "loss": math.inf})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"total_s": 2.0, "loss": "Infinity"}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_two_processes_may_replace_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with atomic_write(path) as temporary:
        temporary.write_text("first")
        if (other := os.fork()) == 0:
            write_json(path, {"a": 1})
            os._exit(0)
        assert os.waitpid(other, 0)[1] == 0 and json.loads(path.read_text()) == {"a": 1}
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_rollout_records() -> None:
    segments = [Segment([1, 2]), Segment([5, 6], True, [-0.5, -1.0], [-0.5, -1.0], [0, 0], text="hi")]
    made = Trajectory(segments, "stop", SampleIdentity(0, 0, 2, 7), reward=1.0, advantage=0.25)
    made.rewards = {"f": 1.0, "g": None}
    group = RolloutGroup([made], SamplingParams(), 7, "prompt")
    other = replace(made, segments=[segments[0], replace(segments[1], logprobs=[-0.5, -1.0 + 2**-24])])
    assert len({logprobs_digest(made), logprobs_digest(other)}) == 2 == len(logprobs_digest(made)) / 8
    assert list(rollout_records(2, [group])) == [
        {
            "step": 2,
            "group": 7,
            "prompt": "prompt",
            "prompt_token_ids": [1, 2],
            "samples": [
                {
                    "sample": 0,
                    "text": "hi",
                    "reward": 1.0,
                    "rewards": {"f": 1.0, "g": None},
                    "advantage": 0.25,
                    "tokens": 2,
                    "token_ids": [5, 6],
                    "finish_reason": "stop",
                    "segments": [{"kind": "given", "tokens": 2}, {"kind": "sampled", "tokens": 2}],
                    "logprobs_digest": logprobs_digest(made),
                }
            ],
        }
    ]
