"""Tests of `tests/gpu`, by file: what passed, what failed and why, and what they printed; saved after every test.

With `--gpus` files run side by side on a machine's GPUs, each in a process that sees as many as it needs, the longest
in shards; with `--share` each GPU has several at once, as most of a test's time is compiling, and tests that are timed
come last, one at a time on each. With `--go-on` a run that ended early is gone on with: what passed, of the same
sources on a GPU of the same name, is kept, and the figures' seconds are those of the last run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from common import made_by, save

from lockstep.cache import fingerprint

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from sharing import WHERE

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
REPORT_CHARACTERS = 3000  # kept of a failure
SEVERAL = {"fsdp": (2,), "push": (2, 8), "tp": (2, 4, 8)}  # GPUs of a file's tests; of several `N_gpus` are apart
PARTS = {"fsdp": ("not steps", "steps and sharded", "steps and gathered", "steps and products")}  # by their names
SLOWEST = "fsdp", "scores", "families", "tp", "push", "attention_backward", "fused", "flex"  # begin first
SHARDS = {"scores": 3, "families": 2, "fused": 2}  # of the files that take longest
_PORTS = itertools.count(29600)  # torchrun's, another for each file
POLL_S, SAVE_S = 0.5, 10.0
KNOWN = "known.json"  # beside the outcomes of a run: what passed before it


class Saved:
    """A plugin of pytest's: writes the outcome of each test as it comes, and the words compared (`census`).

    Args:
        known: names of tests that passed before, which are left out.
        shard: "I/N", the I-th of N equal parts of what there is to run.
    """

    def __init__(self, path: Path | None, known: Collection[str] = (), shard: str = "1/1", **about: str) -> None:
        self.path, self.known, self.shard = path, known, shard
        self.figures: dict[str, Any] = {**about, "passed": 0, "failed": 0, "skipped": 0, "words": {}}
        self.figures |= {"tests": {}, "failures": {}}

    @pytest.hookimpl(trylast=True)  # after names and marks were looked at
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        part, parts = map(int, self.shard.split("/"))
        left = [item for item in items if item.nodeid not in self.known]
        size = -(-len(left) // parts)
        own = left[(part - 1) * size : part * size]
        config.hook.pytest_deselected(items=list({*items} - {*own}))
        items[:] = own

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
    """Tests of these files that need so many GPUs, of those whose names and marks fit; or a shard of these."""

    files: Sequence[str]
    gpus: int
    expression: str
    marks: str
    shard: str = "1/1"

    @property
    def name(self) -> str:
        name = self.files[0] if len(self.files) == 1 else self.marks
        name += f" {self.shard}" * (self.shard != "1/1") + f" ({self.expression})" * bool(self.expression)
        return f"{name}, {self.gpus} GPUs" if self.gpus > 1 else name


class Running(NamedTuple):
    """A part's process, the GPUs that it sees, and where it writes."""

    part: Part
    process: subprocess.Popen[bytes]
    gpus: list[str]
    outcome: Path


def parts_of(name: str, gpus: int, expression: str, marks: str) -> list[Part]:
    """Those of a file; one that needs more GPUs than there are has what there is, and skips its tests."""
    sizes, shards = SEVERAL.get(name, (1,)), SHARDS.get(name, 1)
    found = []
    for size, part in itertools.product(sizes, PARTS.get(name, ("",))):
        fit = " and ".join(filter(None, (expression, f"{size}_gpus" * (len(sizes) > 1), part)))
        found += [Part([name], min(size, gpus), fit, marks, f"{shard}/{shards}") for shard in range(1, shards + 1)]
    return found


def sources() -> str:
    """What an outcome is of: the package, the tests of GPUs, and what these import of the other tests' folder."""
    beside = (path for path in FOLDER.parent.glob("*.py") if not path.name.startswith("test_"))
    return fingerprint.digest(
        fingerprint.sources(), [p.read_text("utf-8") for p in sorted((*FOLDER.glob("*.py"), *beside))]
    )


def passed_before(path: Path | None) -> dict[str, Any]:
    """What passed in the run of this file, as figures; nothing if there is none, or it is of other sources or another
    GPU. (The words that a test compared before it failed are counted with those of its next run.)"""
    found = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
    if (found.get("sources"), found.get("device")) != (sources(), made_by()["device"]):
        found = {"tests": {}, "words": {}}
    tests = {name: test for name, test in found["tests"].items() if test["outcome"] == "passed"}
    return {"passed": len(tests), "failed": 0, "skipped": 0, "tests": tests, "failures": {}, "words": found["words"]}


def listed(names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """The tests of files, by file, and whether each is timed."""
    files = [str(FOLDER / f"test_{name}_gpu.py") for name in names]
    done = subprocess.run([sys.executable, __file__, "--list", *files], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, bool]] = {name: {} for name in names}
    for test, timed in json.loads(done.stdout.splitlines()[-1]).items():
        found[Path(test.partition("::")[0]).stem[len("test_") : -len("_gpu")]][test] = timed
    return found


def list_tests(files: Sequence[str]) -> int:
    """Print what `listed` reads."""
    found: dict[str, bool] = {}

    class Listed:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            found.update({item.nodeid: item.get_closest_marker("timed") is not None for item in items})

    quiet = ["-q", "--collect-only", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    code = pytest.main([*quiet, *files], plugins=[Listed()])
    print(f"\n{json.dumps(found)}")
    return int(code)


def work(
    names: Sequence[str], gpus: int, share: int, expression: str, before: dict[str, Any]
) -> tuple[list[Part], list[Part]]:
    """The parts of files, the slowest first, and those that come when these are done; without files of which all that
    is asked for passed `before`."""
    order = sorted(names, key=lambda name: SLOWEST.index(name) if name in SLOWEST else len(SLOWEST))
    tests, passed, apart = listed(order) if before["tests"] else {}, before["tests"], share > 1

    def lacking(name: str, timed: bool) -> bool:
        """Whether there may be tests of a file left that did not pass, of this kind where kinds are apart."""
        return name not in tests or any(
            test not in passed and (not apart or is_timed == timed) for test, is_timed in tests[name].items()
        )

    begun = [name for name in order if lacking(name, False)]
    first = [part for name in begun for part in parts_of(name, gpus, expression, "not timed" if apart else "")]
    timed = [name for name in order if apart and lacking(name, True)]
    shards = [Part(timed, 1, expression, "timed", f"{shard}/{gpus}") for shard in range(1, gpus + 1)] if timed else []
    return first, shards


def side_by_side(
    names: Sequence[str], gpus: int, share: int, expression: str, path: Path | None, before: dict[str, Any]
) -> int:
    """Run each file on as many GPUs as it needs, of which each has `share` at once, but for what passed `before`; how
    many failed or did not come to their end. Of what is running when this is ended, the last few seconds are lost."""
    waiting, last = work(names, gpus, share, expression, before)
    free = Counter({str(gpu): share for gpu in range(gpus)})
    running, bad, began, made_of = list[Running](), 0, time.perf_counter(), {"sources": sources()}
    with tempfile.TemporaryDirectory() as scratch:
        ended = [Path(scratch, KNOWN)]
        ended[0].write_text(json.dumps(before))
        saved = began

        def save_all() -> None:
            about = {"gpus": gpus, "share": share, "seconds": time.perf_counter() - began, "ended_badly": bad}
            figures = {**merged([*ended, *(one.outcome for one in running)]), **made_of, **about}
            save("gpu_tests", {**figures, "complete": not (waiting or running or last)}, path)

        while waiting or running or last:
            if not (waiting or running):
                waiting, last = last, []
            for part in list(waiting):
                own = [gpu for gpu, _ in (+free).most_common(part.gpus)]  # those with the fewest
                if len(own) == part.gpus:
                    waiting.remove(part)
                    free.subtract(own)
                    running.append(started(part, own, Path(scratch)))
            time.sleep(POLL_S)
            gone = [one for one in running if one.process.poll() is not None]
            for one in gone:
                running.remove(one)
                free.update(one.gpus)
                ended.append(one.outcome)
                bad += one.process.returncode not in (0, int(pytest.ExitCode.NO_TESTS_COLLECTED))
                print(f"{one.part.name}: {one.process.returncode}, {time.perf_counter() - began:.0f} s", flush=True)
            if gone or time.perf_counter() > saved + SAVE_S:
                saved = time.perf_counter()
                save_all()
        save_all()
    return bad


def started(part: Part, gpus: list[str], scratch: Path) -> Running:
    port = next(_PORTS)
    outcome = scratch / f"{port}.json"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # by whoever began this, from tests of a CPU
    given = {"CUDA_VISIBLE_DEVICES": "" if hidden else ",".join(sorted(gpus)), "PET_MASTER_PORT": str(port)}
    command = [sys.executable, __file__, *part.files, "-k", part.expression, "-m", part.marks, "--json", str(outcome)]
    command += ["--shard", part.shard, "--known", str(scratch / KNOWN)]
    return Running(part, subprocess.Popen(command, env=os.environ | given, stdout=subprocess.DEVNULL), gpus, outcome)


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
    parser.add_argument("-m", metavar="MARKS", default="", help="only tests whose marks fit (pytest's own)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the outcomes here")
    parser.add_argument("--gpus", type=int, default=0, help="files side by side on so many; default: one by one")
    parser.add_argument("--share", type=int, default=1, help="files that each of these has at once; default: 1")
    parser.add_argument("--go-on", action="store_true", help="with --gpus: leave out what passed by the file of --json")
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shard", default="1/1", help=argparse.SUPPRESS)
    parser.add_argument("--known", type=Path, help=argparse.SUPPRESS)
    shared = "--ranks-share-gpu"
    parser.add_argument(shared, action="store_true", help="ranks of tests of several GPUs share those that there are")
    args = parser.parse_args()
    if args.list:
        return list_tests(args.files)
    if args.go_on and not (args.gpus and args.json):
        parser.error("--go-on needs --gpus, and --json with the file of the run that is gone on with")
    if args.gpus:
        before = passed_before(args.json if args.go_on else None)
        if args.go_on:
            print(f"{before['passed']} tests passed before, of these sources on such a GPU", flush=True)
        names = args.files or [path.name[len("test_") : -len("_gpu.py")] for path in FOLDER.glob("test_*_gpu.py")]
        return int(side_by_side(names, args.gpus, args.share, args.k, args.json, before) > 0)
    files = [FOLDER / f"test_{name}_gpu.py" for name in args.files] or [FOLDER]
    known = json.loads(args.known.read_text("utf-8"))["tests"] if args.known else ()
    saved = Saved(args.json, known, args.shard, **({"where": WHERE} if args.ranks_share_gpu else {}))
    began = time.perf_counter()
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", args.k, "-m", args.m]
    code = pytest.main([*options, *([shared] if args.ranks_share_gpu else []), *map(str, files)], plugins=[saved])
    saved.figures["seconds"] = time.perf_counter() - began
    save("gpu_tests", {**saved.figures, "complete": True}, args.json)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
