"""Tests in forked processes are reported as those of one process are, and none is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import finished

MODULES = {
    "passes": """
import pytest

@pytest.mark.parametrize("x", range(40))
def test_many(x): pass

def test_skipped(): pytest.skip()
""",
    "fails": """
import warnings

def test_wrong():
    print("what it said")
    warnings.warn("be warned")
    assert 7 == 8
""",
    "dies": """
import os

def test_first(): pass

def test_last(): os._exit(9)
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("modules")
    (made / "conftest.py").write_text("from forks import pytest_addoption, pytest_runtestloop")
    for name, code in MODULES.items():
        (made / f"test_{name}.py").write_text(code)
    return made


def ran(folder: Path, *names: str) -> tuple[int, str]:
    files = [f"test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "--forks", "2", "-p", "no:cacheprovider", *files]
    done = finished(command, cwd=folder, env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""})
    return done.returncode, done.stdout


def test_what_fails_is_shown_with_all_that_it_said(folder: Path) -> None:
    code, said = ran(folder, "passes", "fails")
    assert code == 1 and "1 failed, 40 passed, 1 skipped, 1 warning in" in said
    assert all(part in said for part in ("assert 7 == 8", "- Captured stdout call -", "what it said", "be warned"))


def test_a_process_that_is_lost_is_named(folder: Path) -> None:
    code, said = ran(folder, "dies", "passes")
    assert code == 3 and "a process ended with 9 in test_dies.py::test_last" in said


def test_all_pass(folder: Path) -> None:
    code, said = ran(folder, "passes")
    assert code == 0 and "40 passed, 1 skipped in" in said
