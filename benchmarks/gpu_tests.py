"""Tests of `tests/gpu`, by file: what passed, what failed and why, and what they printed; saved after every test."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from common import save

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from sharing import WHERE

ROOT = Path(__file__).parents[1]
REPORT_CHARACTERS = 3000  # kept of a failure


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="names in tests/gpu without test_ and _gpu.py; default: all")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only tests whose names fit (pytest's own)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the outcomes here")
    share = "--ranks-share-gpu"
    parser.add_argument(share, action="store_true", help="ranks of tests of several GPUs share the first; NCCL 2.30 on")
    args = parser.parse_args()
    folder = ROOT / "tests" / "gpu"
    files = [folder / f"test_{name}_gpu.py" for name in args.files] or [folder]
    saved = Saved(args.json, **({"where": WHERE} if args.ranks_share_gpu else {}))
    began = time.perf_counter()
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", args.k]
    code = pytest.main([*options, *([share] if args.ranks_share_gpu else []), *map(str, files)], plugins=[saved])
    saved.figures["seconds"] = time.perf_counter() - began
    save("gpu_tests", {**saved.figures, "complete": True}, args.json)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
