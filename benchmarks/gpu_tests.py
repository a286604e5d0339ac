"""Tests of `tests/gpu`, by file: what passed, what failed and why, and what they printed; saved after every test.

With `--gpus` files run side by side on a machine's GPUs, each in a process that sees as many as it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import save

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from sharing import WHERE

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
REPORT_CHARACTERS = 3000  # kept of a failure
SEVERAL = {"fsdp": 2, "push": 2, "tp": 4}  # GPUs that a file's tests have use for
SLOWEST = "fsdp", "scores", "families", "tp", "attention_backward", "fused", "flex"  # begin first
FIRST_PORT = 29600  # of torchrun's, a number further for each that runs beside others
POLL_S = 0.5


class Saved:
    """A plugin of pytest's: writes the outcome of each test as it comes, and the words compared (`census`)."""

    def __init__(self, path: Path | None, **about: str) -> None:
        self.path = path
        self.figures: dict[str, Any] = {**about, "passed": 0, "failed": 0, "skipped": 0, "words": {}}
        self.figures |= {"tests": {}, "failures": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        f = self.figures
        f[report.outcome] += 1
        f["tests"][report.nodeid] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            f["failures"][report.nodeid] = report.longreprtext[-REPORT_CHARACTERS:]
        if printed := report.capstdout.strip():
            f["tests"][report.nodeid]["printed"] = printed.splitlines()
        for what, (words, different) in report.user_properties:
            total = f["words"].setdefault(what, [0, 0])
            total[0] += words
            total[1] += different
        save("gpu_tests", f, self.path)
        print(f"{report.outcome} {report.nodeid} {report.duration:.1f} s", file=sys.stderr, flush=True)


class Part(NamedTuple):
    """A file's process, the GPUs that it sees, and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    gpus: list[str]
    outcome: Path


def side_by_side(names: Sequence[str], gpus: int, expression: str, path: Path | None) -> int:
    """Run each file on as many GPUs as it needs, the slowest first; how many failed or did not come to their end."""
    waiting = sorted(names, key=lambda name: SLOWEST.index(name) if name in SLOWEST else len(SLOWEST))
    free, running, ended, bad, began = list(map(str, range(gpus))), list[Part](), list[Part](), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        while waiting or running:
            for name in list(waiting):
                if (count := needed(name, gpus)) <= len(free):
                    waiting.remove(name)
                    own, free = free[:count], free[count:]
                    running.append(started(name, own, expression, Path(scratch)))
            time.sleep(POLL_S)
            for part in [part for part in running if part.process.poll() is not None]:
                running.remove(part)
                free += part.gpus
                bad += part.process.returncode not in (0, int(pytest.ExitCode.NO_TESTS_COLLECTED))
                ended.append(part)
                figures = merged([one.outcome for one in ended])
                about = {"gpus": gpus, "seconds": time.perf_counter() - began, "ended_badly": bad}
                save("gpu_tests", {**figures, **about, "complete": not (waiting or running)}, path)
                print(f"{part.name}: {part.process.returncode}, {about['seconds']:.0f} s", flush=True)
    return bad


def needed(name: str, gpus: int) -> int:
    """GPUs of a file, or as many as there are."""
    return min(SEVERAL.get(name, 1), gpus)


def started(name: str, gpus: list[str], expression: str, scratch: Path) -> Part:
    outcome = scratch / f"{name}.json"
    given = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "PET_MASTER_PORT": str(FIRST_PORT + int(gpus[0]))}
    command = [sys.executable, __file__, name, "-k", expression, "--json", str(outcome)]
    return Part(name, subprocess.Popen(command, env=os.environ | given, stdout=subprocess.DEVNULL), gpus, outcome)


def merged(outcomes: Sequence[Path]) -> dict[str, Any]:
    """The figures of several files as those of one run."""
    found: dict[str, Any] = {"tests": {}, "failures": {}, "words": {}}
    counts = Counter[str]()
    for one in (json.loads(path.read_text(encoding="utf-8")) for path in outcomes if path.exists()):
        counts.update({kind: one[kind] for kind in ("passed", "failed", "skipped")})
        for kind in ("tests", "failures"):
            found[kind] |= one[kind]
        for what, (words, different) in one["words"].items():
            before = found["words"].get(what, (0, 0))
            found["words"][what] = [before[0] + words, before[1] + different]
    return {**{kind: counts[kind] for kind in ("passed", "failed", "skipped")}, **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="names in tests/gpu without test_ and _gpu.py; default: all")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only tests whose names fit (pytest's own)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the outcomes here")
    parser.add_argument("--gpus", type=int, default=0, help="files side by side on so many; default: one by one")
    share = "--ranks-share-gpu"
    parser.add_argument(share, action="store_true", help="ranks of tests of several GPUs share the first; NCCL 2.30 on")
    args = parser.parse_args()
    if args.gpus:
        names = args.files or [path.name[len("test_") : -len("_gpu.py")] for path in FOLDER.glob("test_*_gpu.py")]
        return int(side_by_side(names, args.gpus, args.k, args.json) > 0)
    files = [FOLDER / f"test_{name}_gpu.py" for name in args.files] or [FOLDER]
    saved = Saved(args.json, **({"where": WHERE} if args.ranks_share_gpu else {}))
    began = time.perf_counter()
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", args.k]
    code = pytest.main([*options, *([share] if args.ranks_share_gpu else []), *map(str, files)], plugins=[saved])
    saved.figures["seconds"] = time.perf_counter() - began
    save("gpu_tests", {**saved.figures, "complete": True}, args.json)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
