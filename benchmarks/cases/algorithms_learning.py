"""Every algorithm on the first recipe: held-out problems solved before and after, and where nothing is to be learned.

`lockstep train --loss.loss-type NAME` in a process each, a thread each, several at once, for some seeds. The control is
the same run with advantages of zero, which must leave the held-out problems as they are. `sft` is the recipe's warm-up
alone, before it an untrained model. A teacher's pupils come last, once there is a run that learned to be the teacher;
their control has the teacher that they are themselves. Flags that follow `--` are every run's. With the recipe's one
update a rollout all ratios are 1, and most losses differ by their means alone; `--updates 2` makes others. Where the
warm-up leaves no room, what must rise is the reward of the samples.

With `--shared` a seed has one warm-up, of its `sft` run, that its other runs begin from. With `--folder` run folders
stay there, and what the file of `--json` holds as done is not run again, so that several calls fill one file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cases.learning import COMMAND, content, lines
from common import Report, made_by

from lockstep.algorithms import ALGORITHMS, SUPERVISED
from lockstep.ops.native import library

ROOT = Path(__file__).parents[2]
SOLVED = "validation/rewards/correct/mean"
TEACHER = "grpo"  # its runs teach
CEILING = 0.97  # of the problems: what is left are a few rare sums
ZEROED = '''"""Each algorithm with advantages of zero."""
from lockstep.algorithms import ALGORITHMS


def zeroed(self, config, rewards):
    return [[0.0] * len(group) for group in rewards]


def estimated(self, config, rewards, values):  # of a critic, whose values are then right, too
    return [[0.0] * len(sample) for sample in values], values


for name, algorithm in ALGORITHMS.items():
    globals()[name] = type(name, (algorithm,), {"advantages": zeroed, "estimate": estimated})
'''
TINY = {
    **{"--steps": "1", "--trainer.warmup-steps": "1", "--trainer.warmup-batch-size": "2"},
    **{"--trainer.prompts-per-step": "2", "--sampling.num-generations": "2", "--task.validation-prompts": "2"},
}


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        control: nothing is to be learned.
        updates: of a rollout.
        shared: it begins from what the seed's `sft` run made.
    """

    algorithm: str
    seed: int
    control: bool = False
    updates: int = 1
    shared: bool = False

    @property
    def name(self) -> str:
        more = f"-{self.updates}-updates" if self.updates > 1 else ""
        return f"{self.algorithm}-{self.seed}{more}" + "-control" * self.control

    @property
    def begin(self) -> Trial | None:
        """The run whose model it begins from."""
        return self.other(SUPERVISED) if self.shared and self.algorithm != SUPERVISED else None

    @property
    def teacher(self) -> Trial | None:
        """The run whose model it learns from; a control's is what it is itself."""
        taught = ALGORITHMS[self.algorithm].has_teacher
        return self.other(SUPERVISED if self.control else TEACHER) if taught else None

    def other(self, algorithm: str) -> Trial:
        """Another algorithm's run like this one."""
        return replace(self, algorithm=algorithm, control=False)

    def flags(self, scratch: Path) -> dict[str, str]:
        """Of `lockstep train`."""
        own = {"--seed": str(self.seed)}
        if self.algorithm == SUPERVISED:
            return own | {"--steps": "0"} | ({"--trainer.warmup-steps": "0"} if self.control else {})
        if self.begin:
            begin = scratch / self.begin.name
            own |= {"--config": str(begin / "config.yaml"), "--model": str(begin / "model")}
            own |= {"--trainer.warmup-steps": "0", "--steps": "120"}
        own |= {"--trainer.num-iterations": str(self.updates)} if self.updates > 1 else {}
        own["--loss.loss-type"] = self.algorithm
        if self.teacher:
            return own | {"--loss.teacher": str(scratch / self.teacher.name / "model")}
        if self.control:
            own["--loss.loss-type"] = f"{scratch / 'zeroed.py'}:{self.algorithm}"
            own["--trainer.no-skip-zero-variance"] = ""
        return own


def trials(args: argparse.Namespace) -> list[list[Trial]]:
    """Those of a wave run side by side; what a run begins from, or learns from, is of a wave before it."""
    only, how = args.only, {"updates": args.updates, "shared": args.shared}
    taught = [n for n in ALGORITHMS if ALGORITHMS[n].has_teacher and (not only or n in only)]
    needed = [TEACHER] * bool(taught) + [SUPERVISED] * (bool(taught) or args.shared)
    plain = [n for n in ALGORITHMS if n not in taught and (not only or n in (*only, *needed))]
    begin = [n for n in plain if n == SUPERVISED and args.shared]
    groups = begin, [n for n in plain if n not in begin], taught
    waves = [[Trial(n, s, **how) for s in range(args.seeds) for n in names] for names in groups]
    controls = 0 if args.no_controls else 1  # of the first seed alone
    return [wave + [replace(t, control=True) for t in wave if t.seed < controls] for wave in waves]


def build_operators() -> None:
    """The operators in C, where a copy of the tree came without them; a machine without a compiler goes on without."""
    if library.current is None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ran(trial: Trial, scratch: Path, more: dict[str, str], end: float) -> dict[str, Any]:
    """Run it with `more` flags, for as long as there is time; what it found."""
    run, began, own = scratch / trial.name, time.monotonic(), trial.flags(scratch)
    untrained = own.get("--trainer.warmup-steps") == "0"
    more = {name: value for name, value in more.items() if not (untrained and "warmup" in name)}
    own = own | more if trial.shared else more | own
    flags = [word for pair in own.items() for word in pair if word]
    command = [sys.executable, "-c", COMMAND, "train", *flags, "--device", "cpu", "--metrics.no-progress"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            [*command, "--run-dir", str(run)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
            timeout=max(end - began, 0.1),
        )  # fmt: skip
        status = "done" if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout[-500:]}"
    except subprocess.TimeoutExpired:
        status = "there was no more time"
    flags = [word.replace(f"{scratch}/", "") for word in flags]
    found = {"status": status, "flags": flags, "seconds": time.monotonic() - began, **outcome(run)}
    return found | {name: made_by()[name] for name in ("commit", "torch", "device")}


def outcome(run: Path) -> dict[str, Any]:
    """What a run folder says; None for what it does not hold."""
    summary, certificate = content(run / "summary.json"), content(run / "parity.json")
    metrics = lines(run / "metrics.jsonl")
    held_out = {int(step): values[SOLVED] for step, values in (summary or {}).get("validation", {}).items()}
    solved = [held_out[step] for step in sorted(held_out)] or [None]
    found = {"solved": held_out, "before": solved[0], "after": solved[-1], "steps": len(metrics)}
    found["rewards"] = [round(m["reward/mean"], 4) for m in metrics]
    return found | {key: (certificate or {}).get(key, 0) for key in ("tokens_checked", "tokens_different")}


def rose(record: dict[str, Any]) -> bool:
    """Whether more held-out problems are solved; from the ceiling on, whether samples are rewarded more."""
    if record["before"] < CEILING:
        return record["after"] > record["before"]
    first, last = (statistics.mean(part) for part in (record["rewards"][:10], record["rewards"][-10:]))
    return record["after"] >= CEILING and last > first


def wrong(name: str, records: dict[str, dict[str, Any]]) -> list[str]:
    """What does not hold of an algorithm's runs."""
    found = []
    for trial, r in records.items():
        if r["algorithm"] != name:
            continue
        if r["status"] != "done" or r["after"] is None:
            found.append(f"{trial}: {r['status']}")
        elif r["tokens_different"]:
            found.append(f"{trial}: {r['tokens_different']} tokens different")
        elif r["control"] and r["after"] > r["before"]:
            found.append(f"{trial}: rose from {r['before']:.3f} to {r['after']:.3f}")
        elif not r["control"] and not rose(r):
            found.append(f"{trial}: {r['before']:.3f} to {r['after']:.3f}, did not rise")
    return found


def row(name: str, records: dict[str, dict[str, Any]], args: argparse.Namespace) -> list[str]:
    of_seeds = [Trial(name, s, updates=args.updates) for s in range(args.seeds)]
    mine = [records.get(trial.name) for trial in (*of_seeds, replace(of_seeds[0], control=True))]
    known = [r for r in mine if r is not None]
    cells = ["-" if r is None or r["after"] is None else f"{r['before']:.1%} -> {r['after']:.1%}" for r in mine]
    seconds = statistics.median([r["seconds"] for r in known] or [0.0])
    different = f"{sum(r['tokens_different'] for r in known)} of {sum(r['tokens_checked'] for r in known):,}"
    return [name, *cells, different, f"{seconds:.0f}"]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="algorithms; default: all")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="at once (default: one a core)")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS", help="every run is ended then")
    parser.add_argument("--updates", type=int, default=1, help="of a rollout (default: 1)")
    parser.add_argument("--no-controls", action="store_true", help="only what is to learn")
    parser.add_argument("--shared", action="store_true", help="one warm-up a seed, for all its runs")
    parser.add_argument("--folder", type=Path, help="run folders stay here; what --json has is not run again")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG VALUE", help="of `lockstep train`, for every run")
    parser.add_argument("--tiny", action="store_true", help="a step of next to nothing: only whether all of it runs")


def measure(args: argparse.Namespace, report: Report) -> bool:
    build_operators()
    began, records, waves = time.monotonic(), kept(args), trials(args)
    report.figures["runs"] = records
    with contextlib.ExitStack() as stack:
        scratch = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pool = stack.enter_context(ThreadPoolExecutor(args.processes))
        scratch.mkdir(parents=True, exist_ok=True)
        (scratch / "zeroed.py").write_text(ZEROED)
        more = (TINY if args.tiny else {}) | dict(zip(args.flags[::2], args.flags[1::2], strict=True))

        again = missing([t for wave in waves for t in wave if not done(records, t)], scratch)

        def run(trial: Trial) -> None:
            before = done(records, trial)
            if before and trial not in again:
                return
            shutil.rmtree(scratch / trial.name, ignore_errors=True)
            found = ran(trial, scratch, more, began + args.budget)
            if before:
                return
            about = {"algorithm": trial.algorithm, "control": trial.control, "updates": trial.updates}
            records[trial.name] = about | found
            print(
                f"{trial.name}: {found['status']}, {found['before']} -> {found['after']}", file=sys.stderr, flush=True
            )
            conclude(report, records)
            report.save()

        for wave in waves:
            list(pool.map(run, wave))
    conclude(report, records)
    report.complete = not report.figures["missing"]
    names = list(dict.fromkeys(record["algorithm"] for record in records.values()))
    heads = ["algorithm", *(f"seed {s}" for s in range(args.seeds)), "control", "tokens different", "seconds"]
    report.tables.append([heads, *(row(name, records, args) for name in names)])
    report.notes += [line for found in report.figures["wrong"].values() for line in found]
    undone = [t for wave in waves for t in wave if not done(records, t)]
    return bool(undone) or (bool(report.notes) and not args.tiny)


def kept(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the file holds already, where the run folders are kept too."""
    before = args.folder and args.json and content(args.json)
    return dict(before["runs"]) if before else {}


def done(records: dict[str, dict[str, Any]], trial: Trial) -> bool:
    return records.get(trial.name, {}).get("status") == "done"


def missing(undone: list[Trial], scratch: Path) -> set[Trial]:
    """The runs whose models these need, and that are not in the folder: they are run again, and their figures stay."""
    needed = {other for trial in undone for other in (trial.begin, trial.teacher) if other}
    gone = [other for other in needed if not (scratch / other.name / "model").is_dir()]
    return {*gone, *missing(gone, scratch)} if gone else set()


def conclude(report: Report, records: dict[str, dict[str, Any]]) -> None:
    """Note what does not hold of what was run so far."""
    supervised = [record for record in records.values() if record["algorithm"] == SUPERVISED]
    for untrained in [record for record in supervised if record["control"]][:1]:
        for record in supervised:
            record["before"] = untrained["after"]
    names = dict.fromkeys(record["algorithm"] for record in records.values())
    report.figures["wrong"] = {name: wrong(name, records) for name in names}
    report.figures["missing"] = lacking(records)


def lacking(records: dict[str, dict[str, Any]]) -> list[str]:
    """The runs that were not done, and the algorithms without one of as many updates as others have, or a control."""
    found = [name for name, record in records.items() if record["status"] != "done"]
    well = [record for record in records.values() if record["status"] == "done"]
    for updates in sorted({record["updates"] for record in records.values()}):
        had = {r["algorithm"] for r in well if r["updates"] == updates and not r["control"]}
        found += [f"{name}, updates {updates}" for name in ALGORITHMS if name not in had]
    controlled = {r["algorithm"] for r in well if r["control"]}
    return found + [f"{name}, control" for name in ALGORITHMS if name not in controlled]
