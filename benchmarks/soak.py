"""Runs of random settings, each made in several ways that must leave the same words.

A setting is a tiny architecture with flags that decide the words: the loss, the sampling, the updates a step. A way is
what must not: other graphs and passes, batches and caches of the generator, one process or two, tensor parallelism in
generation, masters on the host, new files of graphs or those of the runs before, and being killed (a process, or all)
at any time and resumed. Every setting is run in its default way first, then in random ones, until the time is over.
Rollouts with their log-probabilities, losses, gradient norms and weights are compared. Exits with 1 unless all runs
ended, with the same words; logs of those that did not are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import save, torchrun

from lockstep.models.init import ARCHITECTURES, init_folder

STEPS = 4
RANKS = 2  # shards of a step's prompts, and processes where there are several
BASE = (
    f"--steps {STEPS} --trainer.warmup-steps 2 --checkpoint.interval 1 --parallel.batch-shards {RANKS} "
    "--sampling.max-completion-length 20 --optimizer.learning-rate 1e-3"
)
REWARD = """
def letters(completions, **rest):
    return [len(set(text)) / 10 for text in completions]
"""
LOSSES = "grpo", "dr_grpo", "gspo", "cispo", "sapo", "dppo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo"
DECIDING = (  # of each line one
    ("", *(f"--loss.loss-type {name}" for name in LOSSES)),
    ("", "--sampling.top-p 0.9", "--sampling.temperature 0.7 --sampling.top-k 20", "--sampling.min-p 0.02"),
    ("", "", "--trainer.num-iterations 2", "--trainer.num-mini-batches 2"),
    ("", "", "--loss.beta 0.04", "--optimizer.max-grad-norm 0", "--optimizer.freeze model.layers.0.*"),
)


def graphs(*kinds: str, options: Sequence[str] = ("",)) -> list[str]:
    return [f"--compile.capture {kind} {option}".strip() for kind in kinds for option in options]


PASSES = "--compile.no-canonicalize", "--compile.recompute full", "--compile.recompute elementwise"
EXCHANGES = (
    "--compile.no-bucket-collectives", "--compile.no-reorder-collectives", "--compile.no-reshard-after-forward"
)  # fmt: skip
EITHER = (
    ("", "--generator.max-num-seqs 7", "--generator.max-num-batched-tokens 64"),
    ("", "", "--generator.no-prefix-caching", "--generator.steps-per-sync 1"),
)
STATE = ("", "--optimizer.offload")  # on GPUs
PIECES = "--compile.cudagraph-mode none", "--compile.cudagraph-mode piecewise"
ON_ONE = (
    graphs("none", "layer", "step", "joint"), graphs("step", "joint", options=PASSES), graphs("step", options=PIECES)
)  # fmt: skip
ON_SEVERAL = (graphs("none", "step"), graphs("step", options=PASSES + EXCHANGES), graphs("step", options=PIECES[:1]))
LAYOUTS = "", "", "--parallel.generator-tp 2", "--parallel.zero-stage 3"
LIMIT_AFTER_KILL_S = 90.0  # in which the others notice
CACHES = "8192", "8192", "1024"  # tokens; in the smallest, samples are preempted


@dataclass
class Run:
    """One run. `ended`: the exit status, or what else became of it. `words`: the hash of what it left, if it ended."""

    setting: str
    way: str
    ranks: int
    new_caches: bool
    kills: list[float]  # seconds after which each attempt but the last is killed
    ended: int | str = "not begun"
    words: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def choices(lines: Sequence[Sequence[str]], draw: random.Random) -> str:
    return " ".join(filter(None, map(draw.choice, lines)))


def settings(archs: Sequence[str], draw: random.Random) -> Iterator[str]:
    while True:
        for arch in draw.sample(archs, len(archs)):
            yield f"{arch} {choices(DECIDING, draw)}".strip()


def random_way(setting: str, gpus: int, draw: random.Random) -> Run:
    ranks = draw.choice((1, RANKS)) if gpus != 1 else 1
    either = (ON_SEVERAL if ranks > 1 else ON_ONE)[: 3 if gpus else 2]
    lines = [*EITHER, ["", *draw.choice(either)], *([LAYOUTS] if ranks > 1 else []), *([STATE] if gpus else [])]
    kills = [draw.uniform(2, 40 if gpus else 20) for _ in range(draw.choice((0, 0, 1, 2)))]
    cache = f"--generator.kv-cache-tokens {draw.choice(CACHES)}"
    return Run(setting, f"{choices(lines, draw)} {cache}".strip(), ranks, draw.random() < 0.3, kills)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    parents = dict[int, int]()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [pid]
    for above in found:
        found += [child for child, parent in parents.items() if parent == above]
    return found


def kill(child: subprocess.Popen[bytes], draw: random.Random) -> None:
    """Kill all of a run's processes, or one below the first, whose end must end the others."""
    everyone = descendants(child.pid)
    for pid in draw.choice((everyone, [draw.choice(everyone[1:] or everyone)])):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_all(child: subprocess.Popen[bytes]) -> None:
    for pid in descendants(child.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def attempt(child: subprocess.Popen[bytes], kill_after: float | None, limit: float, draw: random.Random) -> Any:
    """How a process and those below it ended: the exit status, what is wrong with the end, or None where it was killed
    as asked. `limit`: seconds that it may take."""
    try:
        return child.wait(limit if kill_after is None else kill_after)
    except subprocess.TimeoutExpired:
        if kill_after is None:
            end_all(child)
            return "out of time"
    kill(child, draw)
    try:
        child.wait(LIMIT_AFTER_KILL_S)
    except subprocess.TimeoutExpired:
        end_all(child)
        return "does not end though a process was killed"
    return None


def execute(run: Run, folder: Path, models: Path, gpus: int, draw: random.Random, deadline: float) -> None:
    """Make a run in this empty folder, and fill in what became of it."""
    arch, *flags = run.setting.split()
    new = ["sum-digits", "--model", str(models / arch), "--device", "cuda" if gpus else "cpu", *BASE.split(), *flags]
    new += [*run.way.split(), "--reward", f"{models / 'reward.py'}:letters", "--run-dir", str(folder / "run")]
    environment = dict(os.environ)
    if run.new_caches:
        environment |= {"LOCKSTEP_CACHE": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
    if gpus and run.ranks == 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(draw.randrange(gpus))
    launcher = [*torchrun(run.ranks), "-m"] if run.ranks > 1 else [sys.executable, "-m"]
    began = time.monotonic()
    with open(folder / "log", "wb") as log:
        for kill_after in [*run.kills, None]:
            resumable = any((folder / "run" / "checkpoints").glob("step_*"))
            if not resumable and (folder / "run").exists():
                (folder / "run").rename(folder / f"begun-{time.monotonic_ns()}")
            command = [*launcher, "lockstep", "train", *(["--resume", str(folder / "run")] if resumable else new)]
            log.write(f"\n$ {shlex.join(command)}\n".encode())
            log.flush()
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
            ended = attempt(child, kill_after, max(deadline - time.monotonic(), 60.0), draw)
            if ended is not None:
                break
    run.ended, run.seconds = ended, round(time.monotonic() - began, 1)
    if ended == 0:
        try:
            run.words = words_of(folder / "run")
        except Exception as error:
            run.ended = f"what it left cannot be compared: {error!r}"


def words_of(run: Path) -> dict[str, str]:
    """Hashes of what must not depend on the way. `AssertionError`: a step learned nothing."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [[row[name] for name in ("step", "loss", "grad_norm", "kl", "reward/mean", "entropy")] for row in rows]
    assert len(rows) == STEPS and all(row["grad_norm"] > 0 for row in rows), "a step learned nothing"
    weights = [path.read_bytes() for path in sorted((run / "model").glob("*.safetensors"))]
    parts = {"rollouts": (run / "rollouts.jsonl").read_bytes(), "steps": json.dumps(steps).encode()}
    parts["weights"] = b"".join(weights)
    return {name: hashlib.sha256(part).hexdigest()[:16] for name, part in parts.items()}


class Soak:
    """What the workers share: the settings in turn, and all runs."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.args, self.scratch, self.deadline = args, scratch, time.monotonic() + args.seconds
        self.draw, self.lock, self.runs = random.Random(args.seed), threading.Lock(), list[Run]()
        self.settings = settings(args.only, random.Random(args.seed))
        self.due = list[Run]()  # the next ones; those of a setting follow one another

    def next(self) -> Run:
        with self.lock:
            if not self.due:
                setting = next(self.settings)
                plain = Run(setting, "--generator.kv-cache-tokens 8192", 1, False, [])
                self.due = [plain, *(random_way(setting, self.args.gpus, self.draw) for _ in range(self.args.ways))]
            self.runs.append(run := self.due.pop(0))
            return run

    def work(self, number: int) -> None:
        draw = random.Random(f"{self.args.seed} {number}")
        while time.monotonic() < self.deadline - 60:
            with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
                run = self.next()
                execute(run, Path(folder), self.scratch / "models", self.args.gpus, draw, self.deadline)
                self.keep(run, Path(folder))

    def keep(self, run: Run, folder: Path) -> None:
        """Write what there is; of a run that failed, or differs from one that ended before, its log too."""
        with self.lock:
            others = [other.words for other in self.runs if other.setting == run.setting and other.words]
            well = run.ended == "out of time" or run.ended == 0 and all(words == run.words for words in others)
            if not well:
                self.args.logs.mkdir(exist_ok=True)
                (self.args.logs / f"{self.runs.index(run)}.log").write_bytes((folder / "log").read_bytes())
            print("as it must be" if well else "WRONG", json.dumps(asdict(run)), flush=True)
            self.save(complete=False)

    def save(self, complete: bool) -> None:
        made = {**self.summary(), "runs": [asdict(run) for run in self.runs], "complete": complete}
        save("soak", {"seed": self.args.seed, "gpus": self.args.gpus, **made}, self.args.json)

    def summary(self) -> dict[str, Any]:
        found = dict[str, list[Run]]()
        for run in self.runs:
            if run.words:
                found.setdefault(run.setting, []).append(run)
        return {
            "ended": sum(map(len, found.values())),
            "compared": sum(len(runs) - 1 for runs in found.values()),
            "differing": [key for key, runs in found.items() if any(run.words != runs[0].words for run in runs)],
            "failed": sum(run.ended not in (0, "out of time", "not begun") for run in self.runs),
        }


def main() -> int:
    tiny = [name for name in ARCHITECTURES if name.startswith("tiny")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="no run begins in the last minute (default: 600)")
    parser.add_argument("--workers", type=int, default=2, help="runs beside each other (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ways", type=int, default=3, help="of a setting, random ones besides its default (default: 3)"
    )
    parser.add_argument("--only", nargs="*", default=tiny, metavar="ARCH", help="default: every tiny architecture")
    parser.add_argument("--gpus", type=int, default=0, help="0: on the CPU, 1: one process a run (default: 0)")
    parser.add_argument("--logs", type=Path, default=Path("soak-logs"), help="where logs of failed runs go")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write all runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for arch in args.only:
            init_folder(arch, Path(scratch, "models", arch), seed=0)
        Path(scratch, "models", "reward.py").write_text(REWARD)
        soak = Soak(args, Path(scratch))
        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(soak.work, range(args.workers)))
    soak.save(complete=True)
    print(json.dumps(summary := soak.summary()))
    return int(bool(summary["differing"] or summary["failed"]))


if __name__ == "__main__":
    sys.exit(main())
