"""Runs of several processes, one of which is killed (`kill -9`) at a random moment, again and again: each is gone on
with until it ends, and must leave the bits of a run that nobody killed.

Every second kill comes while a checkpoint is written. The processes that are left must end by themselves, with the exit
code of a failure. What a run leaves are its metrics (without times), its rollouts and its model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import Report

from lockstep.models.init import init_folder

LIMIT_S = 200.0  # of a process, and for those that are left to end
REWARD = """
def letters(completion_ids, **_):
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]
"""
MEASURED = "time/", "perf/", "memory/"


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tries", type=int, default=10, help="runs that are killed")
    parser.add_argument("--kills", type=int, default=2, help="of each, unless it ends before")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arch", default="tiny")
    parser.add_argument("--seed", type=int, default=0)


def measure(given: argparse.Namespace, report: Report) -> bool:
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        init_folder(given.arch, folder / "model", 0)
        (folder / "rewards.py").write_text(REWARD)
        rows = [json.dumps({"prompt": "hello " * (1 + i % 4)}) for i in range(64)]
        (folder / "data.jsonl").write_text("\n".join(rows))
        began = time.perf_counter()
        first = _ended(_start(given, folder, folder / "whole"))
        if any(first):
            raise SystemExit(f"{first}\n{(folder / 'whole.log').read_text()[-4000:]}")
        seconds, whole = time.perf_counter() - began, left(folder / "whole")
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        report.figures |= {**settings, "whole": whole, "tries": []}
        for number in range(given.tries):
            found = tried(given, folder, number, chance, seconds)
            found["same"] = not any(found["exit_codes"]) and left(folder / f"killed-{number}") == whole
            if not found["same"]:
                found["said"] = (folder / f"killed-{number}.log").read_text()[-4000:]
            report.figures["tries"].append(found)
            report.save()
    tries = report.figures["tries"]
    same = sum(found["same"] for found in tries)
    kills = [kill for found in tries for kill in found["kills"]]
    report.figures["same"] = same
    report.notes.append(f"{same} of {len(tries)} runs, killed {len(kills)} times, left the bits of one that was not")
    return same < len(tries)


def tried(
    given: argparse.Namespace, folder: Path, number: int, chance: random.Random, seconds: float
) -> dict[str, Any]:
    """One run, killed so many times and gone on with."""
    kills, run = [], folder / f"killed-{number}"
    for kill in range(given.kills):
        ranks = _start(given, folder, run)
        victim, step = chance.randrange(given.processes), chance.randrange(1, given.steps)
        while_writing = (number + kill) % 2 == 0
        until = time.perf_counter() + (LIMIT_S if while_writing else chance.uniform(0.2, 1.0) * seconds)
        while time.perf_counter() < until and all(rank.poll() is None for rank in ranks):
            if while_writing and any(_step(path) >= step for path in (run / "checkpoints").glob(".tmp-step_*")):
                break
            time.sleep(0.001)
        with suppress(ProcessLookupError):
            ranks[victim].kill()
        codes = _ended(ranks)
        there = sorted(path.name for path in (run / "checkpoints").glob("*step_*"))
        kills.append({"rank": victim, "while_writing": while_writing, "exit_codes": codes, "checkpoints": there})
        if not any(codes):
            break
    return {"kills": kills, "exit_codes": _ended(_start(given, folder, run))}


def _step(path: Path) -> int:
    return int(path.name.removeprefix(".tmp-step_").partition("-")[0])


def _start(given: argparse.Namespace, folder: Path, run: Path) -> list[subprocess.Popen[bytes]]:
    """The processes of a run that begins or goes on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    new = [
        *("dataset", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--run-dir", str(run)),
        *("--reward", f"{folder / 'rewards.py'}:letters", "--device", given.device, "--steps", str(given.steps)),
        *("--trainer.prompts-per-step", "4", "--sampling.num-generations", "4", "--task.validation-prompts", "0"),
        *("--sampling.max-completion-length", "12", "--trainer.max-tokens-per-micro-batch", "128"),
        *("--checkpoint.interval", "1", "--parallel.batch-shards", str(given.processes)),
        *("--parallel.timeout", "60", "--metrics.no-progress", "--optimizer.learning-rate", "1e-3"),
    ]
    more = ["--resume", str(run)] if (run / "config.yaml").exists() else new
    ranks = {"WORLD_SIZE": str(given.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks |= {"OMP_NUM_THREADS": "1"}
    with (folder / f"{run.name}.log").open("ab") as log:
        return [
            subprocess.Popen(
                [sys.executable, "-m", "lockstep", "train", *more],
                env=os.environ | ranks | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=log,
                stderr=log,
            )
            for rank in range(given.processes)
        ]


def _ended(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit codes, when all have ended."""
    try:
        return [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def left(run: Path) -> dict[str, str]:
    """SHA-256 of what a run left."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]
    parts = {"metrics": json.dumps(metrics).encode(), "rollouts": (run / "rollouts.jsonl").read_bytes()}
    parts["model"] = b"".join(path.read_bytes() for path in sorted((run / "model").glob("*.safetensors")))
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
