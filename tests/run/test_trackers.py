"""Trackers: real event files, a real offline Weights & Biases run, and failures that stay outside of training."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lockstep.cli.main import main
from lockstep.config import MetricsConfig
from lockstep.errors import InputError
from lockstep.run import trackers as run_trackers
from lockstep.run.trackers import Trackers, require_trackers

RESUMES = "never", "allow"
METRICS = {"reward/mean": 0.5, "kl": None, "note": "text", "flag": True, "parity/tokens_checked": 100}
TINY = [
    *("--trainer.warmup-steps", "0", "--trainer.prompts-per-step", "2", "--sampling.num-generations", "2"),
    *("--task.validation-prompts", "0", "--sampling.max-completion-length", "4", "--steps", "3"),
]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a folder of event files, as TensorBoard reads it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_nothing_is_tracked_by_default(tmp_path: Path) -> None:
    trackers = Trackers(MetricsConfig(), tmp_path, {})
    trackers.log(0, METRICS)
    trackers.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trackers = Trackers(MetricsConfig(trackers=("tensorboard",)), tmp_path, {})
    trackers.log(0, METRICS)
    trackers.log(1, METRICS | {"reward/mean": math.nan})
    trackers.close()
    found = scalars(tmp_path / "tensorboard")
    assert found.keys() == {"reward/mean", "parity/tokens_checked"}
    assert found["parity/tokens_checked"] == [(0, 100.0), (1, 100.0)]
    assert found["reward/mean"][0] == (0, 0.5) and math.isnan(found["reward/mean"][1][1])


def test_tensorboard_purges_the_steps_that_come_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for steps, value in ((range(0, 6), 1.0), (range(4, 7), 2.0)):
        trackers = Trackers(MetricsConfig(trackers=("tensorboard",)), tmp_path, {})
        for step in steps:
            trackers.log(step, {"loss": value})
        trackers.close()
    expected = [(step, 1.0) for step in range(4)] + [(step, 2.0) for step in range(4, 7)]
    assert scalars(tmp_path / "tensorboard")["loss"] == expected


def test_a_run_writes_what_its_metrics_file_has(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = tmp_path / "run"
    assert main(["train", *TINY, "--metrics.trackers", "tensorboard", "--run-dir", str(run)]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = scalars(run / "tensorboard")["reward/mean"]
    assert [step for step, _ in found] == [0, 1, 2]
    assert [value for _, value in found] == pytest.approx([line["reward/mean"] for line in lines], rel=1e-6)


def test_wandb_offline_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = MetricsConfig(trackers=("wandb",), project="sums")
    ids = []
    for step in range(2):
        trackers = Trackers(config, tmp_path, {"optimizer.learning_rate": 1e-6})
        trackers.log(step, METRICS)
        trackers.close()
        ids.append((tmp_path / "wandb" / "run-id").read_text())
    assert ids[0] == ids[1]  # the second continues the first
    wandb.teardown()  # its service writes behind us; this waits for it
    histories = list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0].strip()}/run-*.wandb"))
    assert histories and all(b"reward/mean" in history.read_bytes() for history in histories)


def test_trackio_goes_on_where_a_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a module of trackio 0.43's signatures, as the package itself takes a server along."""
    calls: list[Any] = []

    def init(project: str, name: str | None = None, *, config: Any, resume: str, **quiet: bool) -> SimpleNamespace:
        calls.append((project, name, config, resume, sorted(quiet)))
        return SimpleNamespace(log=lambda metrics, step=None: calls.append((step, metrics)), finish=lambda: None)

    module = ModuleType("trackio")
    module.__spec__ = ModuleSpec("trackio", None, origin="here")
    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "trackio", module)
    for step in range(2):
        trackers = Trackers(MetricsConfig(trackers=("trackio",), project="sums"), tmp_path, {"seed": 3})
        trackers.log(step, METRICS)
        trackers.close()
        (tmp_path / "metrics.jsonl").touch()
    began = [("sums", tmp_path.name, {"seed": 3}, how, ["auto_log_cpu", "auto_log_gpu", "embed"]) for how in RESUMES]
    numbers = {"reward/mean": 0.5, "parity/tokens_checked": 100.0}
    assert calls == [began[0], (0, numbers), began[1], (1, numbers)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_bad_input(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wandb").mkdir()  # its own output, which Python would take for a package
    absent = [entry for entry in sys.path if "site-packages" not in entry]
    monkeypatch.setattr(sys, "path", ["", *absent])
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["train", "--metrics.trackers", name, "--run-dir", "run"]) == 2
    assert f"pip install 'lockstep-rl[{name}]'" in capsys.readouterr().err
    assert not Path("run").exists()


class Kept:
    """A user's tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def __call__(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((step, metrics))

    def close(self) -> None:
        self.closed += 1


kept = Kept()


def only_a_step(step: int) -> None:
    pass


async def later(step: int, metrics: dict[str, float]) -> None:
    pass


class Later:
    async def __call__(self, step: int, metrics: dict[str, float]) -> None:
        pass


later_object = Later()


def leaves(step: int, metrics: dict[str, float]) -> None:
    raise SystemExit("enough")


def test_a_function_of_the_users_gets_the_numbers_and_is_closed(tmp_path: Path) -> None:
    kept.__init__()  # type: ignore[misc]
    trackers = Trackers(MetricsConfig(trackers=(f"{__name__}:kept",)), tmp_path, {})
    trackers.log(0, METRICS)
    kept.steps[0][1].clear()  # it is the tracker's own
    trackers.log(1, METRICS)
    trackers.close()
    assert kept.steps == [(0, {}), (1, {"reward/mean": 0.5, "parity/tokens_checked": 100.0})] and kept.closed == 1


def test_a_run_calls_a_function_of_a_file_at_each_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text(
        "def save(step, metrics):\n    if step == 2:\n        raise OSError('disk full')\n"
        f"    open({str(tmp_path / 'saved')!r}, 'a').write(f'{{step}} {{metrics[\"reward/mean\"]}}\\n')\n"
    )
    run, name = tmp_path / "run", f"{tmp_path / 'mine.py'}:save"
    assert main(["train", *TINY, "--metrics.trackers", name, "--run-dir", str(run)]) == 0
    (said,) = [message for message in caplog.messages if "trackers" in message]
    assert re.search(r"mine.py:save failed and is off from here on: OSError: disk full \(.*mine.py, line 3\)$", said)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    saved = (tmp_path / "saved").read_text().splitlines()
    assert saved == [f"{line['step']} {line['reward/mean']}" for line in lines[:2]] and len(lines) == 3


def is_cancelled(step: int, metrics: dict[str, float]) -> None:
    raise asyncio.CancelledError("by a server")


def test_a_function_that_leaves_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = tuple(f"{__name__}:{name}" for name in ("leaves", "is_cancelled"))
    trackers = Trackers(MetricsConfig(trackers=names), tmp_path, {})
    trackers.log(0, METRICS)
    assert re.search(r"leaves failed and is off from here on: SystemExit: enough \(.*, line", caplog.text)
    assert re.search(r"is_cancelled failed and is off from here on: CancelledError: by a server \(", caplog.text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("only_a_step", r"is called with \(step, metrics\): too many positional arguments"),
        ("Kept", "is a class; name a function, or an object of that class"),
        ("later", "is async, and nothing would await it; make it a plain def"),
        ("later_object", "is async, and nothing would await it; make it a plain def"),
        ("kepd", "has no function 'kepd'; did you mean kept"),
    ],
)
def test_functions_that_cannot_be_trackers_are_refused_first(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        require_trackers(("tensorboard", f"{__name__}:{name}")[1:])


def test_those_before_one_that_cannot_start_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def refuse(*_: object) -> None:
        raise InputError("cannot start")

    kinds = {"tensorboard": lambda *_: SimpleNamespace(close=lambda: closed.append("tensorboard")), "wandb": refuse}
    monkeypatch.setattr(run_trackers, "_PACKAGES", kinds)
    monkeypatch.setattr(run_trackers, "require_trackers", lambda names: None)
    with pytest.raises(InputError, match="cannot start"):
        Trackers(MetricsConfig(trackers=("tensorboard", "wandb")), tmp_path, {})
    assert closed == ["tensorboard"]


def test_a_tracker_that_fails_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    trackers = Trackers(MetricsConfig(trackers=("tensorboard",)), tmp_path, {})
    trackers.log(0, METRICS)
    assert len(caplog.messages) == 1 and "tensorboard failed and is off from here on" in caplog.text
    trackers.log(1, METRICS)
    trackers.close()
    assert len(caplog.messages) == 1


def test_wandb_that_cannot_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(InputError, match="wandb cannot start: no API key; log in with"):
        Trackers(MetricsConfig(trackers=("wandb",)), tmp_path, {})


def test_required_packages_that_are_there() -> None:
    pytest.importorskip("tensorboard")
    require_trackers(("tensorboard",))
