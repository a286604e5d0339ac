"""A wheel, built from the source distribution and installed away from the source, has all of the package and trains."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from processes import finished

import lockstep
from lockstep.ops.native import library

PACKAGE = Path(lockstep.__file__).parent
MADE = ("__pycache__", "*.so")
FIRST = ["train", "--steps", "2", "--trainer.warmup-steps", "2", "--trainer.warmup-batch-size", "4"]
FIRST += ["--trainer.prompts-per-step", "2", "--sampling.num-generations", "2"]
FIRST += ["--sampling.max-completion-length", "4", "--task.validation-prompts", "2"]


def python(*command: str, cwd: Path, **environment: str) -> str:
    done = finished([sys.executable, *command], cwd=cwd, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building writes beside the source."""
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheels")
    shutil.copytree(PACKAGE, source / "lockstep", ignore=shutil.ignore_patterns(*MADE))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PACKAGE.parent / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    python("-c", build, str(out), cwd=source)
    (archive,) = out.glob("*.tar.gz")
    python("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", str(archive), cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_a_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    there = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    source = {name for name in there if "/__pycache__/" not in name and not name.endswith(".so")}
    assert {"lockstep/ops/native/rows.c", "lockstep/ops/native/vector.h", "lockstep/py.typed"} <= source
    assert any(name.startswith("lockstep/ops/tables/") and name.endswith(".json") for name in source)
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if name.startswith("lockstep/")}
        assert {name for name in packed if not name.endswith(".so")} == source
        for name in source:
            assert file.read(name) == (PACKAGE.parent / name).read_bytes(), name
    assert (library.built is None) == (packed == source), "the C library is in it, where there is a compiler"


def test_an_installed_wheel_runs_the_first_command(wheel: Path, tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    install = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", str(site))
    python(*install, str(wheel), cwd=work)
    at = {"PYTHONPATH": str(site), "LOCKSTEP_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    where = "import lockstep; from lockstep.ops import cpu_backend; print(lockstep.__file__, cpu_backend(), flush=True)"
    command = "import sys; from lockstep.__main__ import entry; sys.exit(entry())"  # as the script `lockstep` does
    assert "entry" in (next(site.glob("*.dist-info")) / "entry_points.txt").read_text()
    place, shown = python("-c", f"{where}; {command}", *FIRST, "--run-dir", "run", cwd=work, **at).split("\n", 1)
    file, backend = place.split()
    assert Path(file).is_relative_to(site) and (backend == "native") == (library.built is not None)
    run = work / "run"
    assert "identical  yes" in shown and json.loads((run / "parity.json").read_text())["identical"]
    assert (run / "report.html").stat().st_size > 10_000 and (run / "model" / "model.safetensors").is_file()
