"""`lockstep precompile`, and runs that start with what it left: faults on the way cost time and nothing else."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, finished, running_lockstep, wait_for

from lockstep.cli.main import main

FLAGS = {
    **{"--trainer.prompts-per-step": "1", "--trainer.warmup-steps": "0", "--sampling.num-generations": "2"},
    **{"--sampling.max-completion-length": "4", "--task.validation-prompts": "1", "--device": "cpu"},
    **{"--compile.capture": "step"},
}
SMALL = ["--task.easy", *(text for flag in FLAGS.items() for text in flag)]


@pytest.fixture(scope="module", autouse=True)
def two_layers(shallow: Path) -> Iterator[None]:
    """Of this model all graphs are."""
    SMALL.extend(("--model", str(shallow)))
    yield
    del SMALL[-2:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder after one precompilation."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_CACHE", str(folder))
        assert main(["precompile", *SMALL]) == 0
    return folder


@pytest.fixture
def cache(tmp_path: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test's own folder of graphs, as they were made once."""
    shutil.copytree(made, tmp_path / "cache")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


def precompile(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["precompile", *SMALL, "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def summary_of(capsys: pytest.CaptureFixture[str], run_dir: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["train", *SMALL, "--steps", "1", "--run-dir", str(run_dir), "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_made_is_reused_by_runs_and_what_changed_is_named(cache: Path, capsys, tmp_path: Path) -> None:
    files = len(list(cache.iterdir()))
    warm = precompile(capsys)
    assert (warm["made"], warm["reused"], warm["refused"], warm["traces"]) == (0, files, 0, 0)
    assert warm["checks"]["known"] == warm["checks"]["cases"] > 0 and "load_graphs" in warm["seconds"]
    assert warm["folder"] == str(cache) and warm["bytes"] == warm["folder_bytes"] > 0
    run = summary_of(capsys, tmp_path / "run", "--optimizer.learning-rate", "1e-3", "--seed", "5")
    assert (run["compile"]["traces"], run["compile"]["loaded"]) == (0, files) and run["compile"]["refused"] == []
    assert main(["precompile", *SMALL, "--optimizer.beta2", "0.9"]) == 0
    out = capsys.readouterr().out
    assert "refused " in out and "constants.optimizer.beta2 was '0.95' and is '0.9'" in out
    assert f"0 made, {files - 1} reused, 1 refused and made anew; 1 trace;" in out


def test_what_is_damaged_is_made_again(cache: Path, capsys, tmp_path: Path) -> None:
    damaged = sorted(cache.glob("decode-*"))[:2] + sorted(cache.glob("optim_step-*"))
    for i, file in enumerate(damaged):
        data = file.read_bytes()
        file.write_bytes([data[:-9], b"\0" * 99, data.replace(b"lockstep", b"lockste1", 1)][i])
    run = summary_of(capsys, tmp_path / "run")
    assert run["compile"]["traces"] == 3 and len(run["compile"]["refused"]) == 3
    assert all("is damaged" in reason for reason in run["compile"]["refused"])
    assert precompile(capsys)["made"] == 0


def test_killed_in_the_middle_it_leaves_what_it_had(cache: Path, capsys) -> None:
    for file in list(cache.iterdir())[1:]:
        file.unlink()
    with running_lockstep(["precompile", *SMALL]) as process:
        wait_for(lambda: len(list(cache.glob("*.graph"))) >= 2, process)
        process.send_signal(signal.SIGKILL)
        process.communicate(DEADLINE)
    left = len(list(cache.glob("*.graph")))
    after = precompile(capsys)
    assert left >= 2 and after["reused"] == left and after["refused"] == 0 and process.returncode == -signal.SIGKILL


def test_without_a_folder_to_write_to_a_run_goes_on(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", os.devnull)
    run = summary_of(capsys, tmp_path / "run", "--compile.verify", "off")
    assert run["compile"]["traces"] > 0 == run["compile"]["loaded"] and run["steps_done"] == 1
    assert main(["precompile", *SMALL, "--compile.verify", "off"]) == 1
    assert re.search(
        rf"{os.devnull}/graphs cannot be written: (\d+) of \1 graphs are not kept", capsys.readouterr().err
    )


def test_a_disk_that_has_room_for_some_graphs_is_told(cache: Path, capsys) -> None:
    small, large = (next(cache.glob(f"{name}-*")) for name in ("optim_step", "forward_backward"))
    limit, sizes = resource.getrlimit(resource.RLIMIT_FSIZE), (small.stat().st_size, large.stat().st_size)
    small.unlink()
    large.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (sum(sizes) // 2, limit[1]))
    try:
        assert main(["precompile", *SMALL]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert f"{cache} cannot be written: 1 of " in capsys.readouterr().err
    assert small.exists() and not large.exists()


def test_where_nothing_can_be_kept_it_says_so(capsys) -> None:
    assert main(["precompile", "--device", "cpu"]) == 2
    assert (
        "compile.capture is none, so there is nothing to compile; set --compile.capture step" in capsys.readouterr().err
    )
    assert main(["precompile", *SMALL, "--compile.dump", "there"]) == 2
    assert main(["precompile", "no-such-recipe"]) == 2


def test_graphs_with_a_pass_of_ones_own_are_not_kept_and_it_says_so(capsys, tmp_path: Path) -> None:
    (file := tmp_path / "mine.py").write_text("def tidy(captured):\n    return captured, 'nothing'\n")
    assert main(["precompile", *SMALL, "--compile.passes", "default", f"{file}:tidy"]) == 2
    assert "mine.py:tidy: such graphs are made at every start and not kept; remove it" in capsys.readouterr().err


def test_a_warm_start_imports_no_tracer(cache: Path, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from lockstep.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "heavy = ['sympy', 'torch._dynamo', 'torch._inductor', 'torch.onnx', 'triton', 'transformers', 'datasets']\n"
        "heavy += ['rich', 'matplotlib', 'wandb']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    flags = ["train", *SMALL, "--steps", "1", "--run-dir", str(tmp_path / "run")]
    done = finished([sys.executable, "-c", program, *flags])
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["compile"]["traces"] == 0 and not {"startup/trace", "startup/import_tracer"} & summary.keys()
