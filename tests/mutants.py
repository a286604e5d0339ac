"""Plants the edits of `mutants.toml`, one at a time, and runs the tests that should catch each.

    python tests/mutants.py OUTCOME.json [--commit HEAD] [--shard 1/2] [--only NAME ...]

Works on a checkout of the commit in a folder of its own, with a C library of its own. An edit is caught when a test
fails that passes without it; it survived when all pass. OUTCOME.json says which, with the test, the seconds and the
commit; what it has of the same commit, edit and tests is not done again. Exits with 1 unless all were caught.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TIMEOUT = 900.0  # seconds for the tests of one edit; an edit that makes them hang is caught
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutant:
    """An edit: `old`, which stands once in `file`, becomes `new`. `why` says what could then be observed."""

    name: str
    area: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def planted_in(self, text: str) -> str:
        """The text with the edit."""
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Those of `mutants.toml`, in its order."""
    listed = tomllib.loads((HERE / "mutants.toml").read_text("utf-8"))["mutant"]
    return [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in listed]


class Checkout:
    """A commit's files in a folder of their own, with the C library built from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failing: set[str] = set()  # tests that fail without any edit, which are left out once they are known
        self.environment = os.environ | {
            **{"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        }
        self.build()
        self._libraries = {path: path.with_name(f"{path.name}.kept") for path in folder.rglob("_kernels*.so")}
        for path, kept in self._libraries.items():
            shutil.copy2(path, kept)

    def build(self) -> None:
        """Build the C library; `RuntimeError` when the compiler refuses."""
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        if done.returncode or "error:" in done.stderr:  # the extension is optional: a failure is no error to setuptools
            raise RuntimeError(f"the C library does not build: {done.stderr[-2000:]}")

    def find(self, mutant: Mutant) -> Path | None:
        """The file that an edit belongs in: its own, or the only one of the package that has the text once."""
        own = self.folder / mutant.file
        for candidates in ([own], sorted((self.folder / "lockstep").rglob("*.[pch]*"))):
            texts = {path: path.read_text("utf-8") for path in candidates if path.suffix in (".py", ".c", ".h")}
            holding = [path for path, text in texts.items() if mutant.old in text]
            if len(holding) == 1 and texts[holding[0]].count(mutant.old) == 1:
                return holding[0]
        return None

    def has(self, test: str) -> str | None:
        """The test's file where it is now: at its path, or the only one of its name; None if there is none."""
        file, _, _ = test.partition("::")
        if (self.folder / file).exists():
            return test
        named = [str(path.relative_to(self.folder)) for path in (self.folder / "tests").rglob(Path(file).name)]
        return named[0] + test.removeprefix(file) if len(named) == 1 else None

    @contextmanager
    def planted(self, mutant: Mutant, path: Path) -> Iterator[None]:
        """The edit while it is in place, C compiled."""
        before = path.read_text("utf-8")
        path.write_text(mutant.planted_in(before), "utf-8")
        try:
            if path.suffix != ".py":
                self.build()
            yield
        finally:
            path.write_text(before, "utf-8")
            for library, kept in self._libraries.items():
                shutil.copy2(kept, library)

    def pytest(self, arguments: Sequence[str], timeout: float = TIMEOUT) -> tuple[list[str], str]:
        """The tests that failed, and the output; what hangs is ended with all that it started, and has failed."""
        process = subprocess.Popen(
            [*PYTEST, *(f"--deselect={test}" for test in sorted(self.failing)), *arguments],
            **{"cwd": self.folder, "env": self.environment, "start_new_session": True, "text": True},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as ended:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(ended, subprocess.TimeoutExpired):
                raise
            return ["timeout"], process.communicate()[0]
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE)
        if process.returncode not in (0, 1, 4) and not failed:  # 4: there is no such test
            raise RuntimeError(f"pytest ended with {process.returncode}: {output[-2000:]}")
        return failed, output

    def without_edit(self, tests: Sequence[str]) -> list[str]:
        """Those of the tests that fail, of so many at a time as a command line takes."""
        failed: list[str] = []
        for i in range(0, len(tests), 50):
            failed += self.pytest(tests[i : i + 50], timeout=4 * TIMEOUT)[0]
        return failed


@contextmanager
def checkout(commit: str) -> Iterator[Checkout]:
    """A `Checkout` that goes in the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as above:
        folder = Path(above) / "lockstep"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, commit], cwd=HERE, check=True)
        try:
            yield Checkout(folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=HERE, check=True)


def outcome_of(mutant: Mutant, place: Checkout) -> dict[str, Any]:
    """What became of one edit: "caught" by which tests, "survived", or why it could not be tried ("gone")."""
    began, path = time.perf_counter(), place.find(mutant)
    found: dict[str, Any] = {"area": mutant.area, "outcome": "gone", "old": mutant.old, "new": mutant.new}
    tests = [test for test in map(place.has, mutant.tests) if test]
    if path is not None and tests:
        with place.planted(mutant, path):
            failed, output = place.pytest(["-x", *tests])
        ran = failed or re.search(r"\d+ passed", output)
        found |= {"outcome": "caught" if failed else "survived" if ran else "no test ran", "by": failed}
        found["output"] = output.strip().splitlines()[-1:]
    return found | {"tests": list(mutant.tests), "seconds": round(time.perf_counter() - began, 1)}


def control(outcomes: dict[str, dict[str, Any]], place: Checkout) -> list[str]:
    """Run what caught edits without them, once each; the names of the edits that it has not caught after all."""
    open_ones = [o for o in outcomes.values() if o["outcome"] == "caught" and not o.get("controlled")]
    tests = sorted({test for o in open_ones for test in o["by"] if test != "timeout"})
    place.failing |= set(place.without_edit(tests)) if tests else set()
    for found in open_ones:
        found["controlled"] = True
    return [name for name, found in outcomes.items() if place.failing.intersection(found.get("by", ()))]


def is_known(mutant: Mutant, found: dict[str, Any] | None, commit: str) -> bool:
    """Whether an outcome is of this commit, edit and tests."""
    now = {"commit": commit, "old": mutant.old, "new": mutant.new, "tests": list(mutant.tests)}
    return found is not None and all(found.get(name) == value for name, value in now.items())


def figures(outcomes: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many edits of each area had which outcome."""
    areas: dict[str, Counter[str]] = {}
    for found in outcomes.values():
        areas.setdefault(found["area"], Counter())[found["outcome"]] += 1
    return {area: dict(counts) for area, counts in areas.items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcome", type=Path, help="JSON file of the outcomes, read and written")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th edit from the i-th on")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these edits alone")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left behind
    part, parts = map(int, given.shard.split("/"))
    wanted = [m for m in mutants()[part - 1 :: parts] if not given.only or m.name in given.only]
    commit = subprocess.run(
        ["git", "rev-parse", given.commit], cwd=HERE, check=True, capture_output=True, text=True
    ).stdout.strip()
    outcomes = json.loads(given.outcome.read_text("utf-8"))["mutants"] if given.outcome.exists() else {}

    def save() -> None:
        record = {"figures": figures(outcomes), "mutants": outcomes}
        given.outcome.write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    with checkout(commit) as place:
        rest = [mutant for mutant in wanted if not is_known(mutant, outcomes.get(mutant.name), commit)]
        while True:
            for mutant in rest:
                found = outcomes[mutant.name] = outcome_of(mutant, place) | {"commit": commit}
                print(f"{found['outcome']:9} {found['seconds']:6.1f} s  {mutant.name}", flush=True)
                save()
            again = control(outcomes, place)
            if not again:
                break
            rest = [mutant for mutant in wanted if mutant.name in again]
        save()
    print(json.dumps(figures(outcomes), indent=1))
    return int(any(outcomes[mutant.name]["outcome"] != "caught" for mutant in wanted))


if __name__ == "__main__":
    sys.exit(main())
