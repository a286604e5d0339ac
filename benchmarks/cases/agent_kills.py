"""An agentic run that is killed ten times, at random, and resumed: the bits of one that was not.

`lockstep train` with the environment of `tests/data/agents.py`, whose tool takes any time and answers the same to the
same. SIGKILL comes at a random turn of a random step, or a little later. The rollouts, the certificate, the weights and
the metrics (but times) must be the same bytes; no prompt is lost, and none is there twice. Last, trajectories are
sampled again alone, with what the tool answered as recorded, and asked for anew.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cases.learning import COMMAND, lines
from common import Report

from lockstep.run.replay import replay

ROOT = Path(__file__).parents[2]
GROUPS, SAMPLES = 2, 3
FLAGS = [
    *("sum-digits", "--device", "cpu", "--seed", "3", "--trainer.warmup-steps", "0", "--task.validation-prompts", "0"),
    *("--trainer.prompts-per-step", str(GROUPS), "--sampling.num-generations", str(SAMPLES)),
    *("--sampling.max-completion-length", "32", "--sampling.stop", *string.ascii_letters[:40]),
    *("--task.environment", f"{ROOT / 'tests' / 'data' / 'agents.py'}:Agent", "--task.max-turns", "4"),
    *("--task.max-response-length", "200", "--checkpoint.interval", "3", "--metrics.no-progress"),
]
SAME = ("rollouts.jsonl", "parity.json", "model/model.safetensors")
TIMED = ("time/", "perf/", "memory/", "environment/wait_s")


def launched(*arguments: str, kill_after: tuple[int, float] = (0, 0.0)) -> int:
    """The exit code of `lockstep train`, ended so many seconds after so many turns, if it was not done before."""
    calls, seconds = kill_after
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KILL_AFTER": f"{calls} {seconds}"}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", COMMAND, "train", *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2000:]}")
    return done.returncode


def untimed(path: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.startswith(TIMED)} for line in lines(path)]


def killed_on_and_on(run: Path, begin: list[str], kills: int, chance: random.Random) -> list[dict[str, Any]]:
    """Begin the run and go on with it until it was killed so often, then to its end; what each kill left."""
    found: list[dict[str, Any]] = []
    while len(found) < kills:
        how = begin if not (run / "config.yaml").exists() else ["--resume", str(run)]
        at = chance.randint(1, 70), round(chance.uniform(0, 0.2), 3)
        if launched(*how, kill_after=at) == 0:
            break
        steps = [path.name for path in (run / "checkpoints").glob("step_*")]
        found.append({"turns": at[0], "seconds": at[1], "steps": len(lines(run / "metrics.jsonl"))})
        found[-1]["checkpoint"] = max((int(name.removeprefix("step_")) for name in steps), default=None)
        print(f"kill {len(found)}: {found[-1]}", file=sys.stderr, flush=True)
    launched("--resume", str(run))
    return found


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of when it is killed")


def measure(args: argparse.Namespace, report: Report) -> bool:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        begin = [*FLAGS, "--steps", str(args.steps), "--run-dir"]
        launched(*begin, str(whole))
        kills = killed_on_and_on(killed, [*begin, str(killed)], args.kills, random.Random(args.seed))
        same = {name: (killed / name).read_bytes() == (whole / name).read_bytes() for name in SAME}
        same["metrics.jsonl, but times"] = untimed(killed / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
        rollouts = lines(killed / "rollouts.jsonl")
        wanted = [(step, group) for step in range(args.steps) for group in range(GROUPS)]
        same["every prompt once"] = [(line["step"], line["group"]) for line in rollouts] == wanted
        named = [f"{args.steps // 2}/1/2", f"{args.steps - 1}/0/1"]
        for again in (False, True):
            differences = [replay(killed, name, call_tools=again).difference for name in named]
            same[f"replayed, tools {'asked anew' if again else 'as recorded'}"] = differences == ["", ""]
        tokens = sum(len(sample["token_ids"]) for line in rollouts for sample in line["samples"])
    report.figures |= {"steps": args.steps, "kills": kills, "same": same, "tokens": tokens}
    report.figures["seconds"] = round(time.monotonic() - began, 1)
    report.tables.append([["", "same"], *([name, str(value)] for name, value in same.items())])
    report.notes.append(f"{len(kills)} kills, {tokens:,} tokens in {args.steps} steps")
    return len(kills) < args.kills or not all(same.values())
