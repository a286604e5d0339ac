"""Runs of several processes, of which a random one is killed (`kill -9`) or stopped at a random moment, again and
again: each is gone on with until it ends, and must leave the bits of a run that nobody touched.

Moments are while a checkpoint is written, and in a step, in turn; every third process is stopped (`kill -STOP`). The
processes that are left, and one that was stopped, must end by themselves within the deadline, with the exit code of a
failure, one message from one of them, and a stack of each that is not gone. What a run leaves are its metrics (without
times), its rollouts and its model. `--tp` and `--generator-tp` have the processes share products.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import Report

from lockstep.models.init import init_folder

LIMIT_S = 300.0  # of a process
LEAST_PROMPTS = 4  # of a step
TIMEOUT_S = 30  # `parallel.timeout`
DEADLINE_S = 2.0 * TIMEOUT_S  # for those that are left to end: it, its grace, and how busy the machine is
FAULT = "lockstep: failed: "
REWARD = """
def letters(completion_ids, **_):
    return [sum(97 <= t < 123 for t in ids) / len(ids) for ids in completion_ids]
"""
MEASURED = "time/", "perf/", "memory/", "graph_replays"  # which of a start that checks its graphs are more


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--generator-tp", type=int, default=1)
    parser.add_argument("--collectives", action="store_true", help="which move the words that GPUs would push")
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
        first = _ended(_start(given, folder, folder / "whole"))
        if any(first):
            raise SystemExit(f"{first}\n{(folder / 'whole.log').read_text()[-4000:]}")
        whole = left(folder / "whole")
        settings = {name: value for name, value in vars(given).items() if name != "json"}
        report.figures |= {**settings, "whole": whole, "tries": []}
        for number in range(given.tries):
            found = tried(given, folder, number, chance)
            ended = not any(found["exit_codes"])
            found["differ"] = differing(folder / "whole", folder / f"killed-{number}") if ended else []
            found["same"] = ended and not found["differ"]
            if not (found["same"] and all(kill["in_order"] for kill in found["kills"])):
                found["said"] = (folder / f"killed-{number}.log").read_text()[-4000:]
            report.figures["tries"].append(found)
            report.save()
    tries = report.figures["tries"]
    same = sum(found["same"] for found in tries)
    kills = [kill for found in tries for kill in found["kills"]]
    in_order = sum(kill["in_order"] for kill in kills)
    report.figures |= {"same": same, "in_order": in_order}
    report.notes.append(f"{same} of {len(tries)} runs, hit {len(kills)} times, left the bits of one that was not")
    report.notes.append(
        f"{in_order} of {len(kills)} times all ended within the deadline, one told of it, and left stacks"
    )
    return same < len(tries) or in_order < len(kills)


def tried(given: argparse.Namespace, folder: Path, number: int, chance: random.Random) -> dict[str, Any]:
    """One run, hit so many times and gone on with."""
    kills, run = [], folder / f"killed-{number}"
    for kill in range(given.kills):
        begun, done = len(_log(run)), min(_steps_done(run), given.steps - 2)
        number_of_hit = number * given.kills + kill
        stops, while_writing = number_of_hit % 3 == 2, number_of_hit % 2 == 0
        victim, step = chance.randrange(given.processes), chance.randrange(done + 1, given.steps)
        latest = (being_written if while_writing else made)(run)
        ranks = _start(given, folder, run)
        _wait(ranks, latest, step)
        time.sleep(0 if while_writing else chance.uniform(0.0, 1.5))
        with suppress(ProcessLookupError):
            ranks[victim].send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
        began = time.perf_counter()
        codes = _ended(ranks)
        found = {"rank": victim, "stopped": stops, "while_writing": while_writing, "exit_codes": codes}
        found["seconds"] = round(time.perf_counter() - began, 1)
        found["checkpoints"] = sorted(path.name for path in (run / "checkpoints").glob("*step_*"))
        kills.append(found | _told(given, run, begun, found))
        if not any(codes):
            break
    return {"kills": kills, "exit_codes": _ended(_start(given, folder, run))}


def _wait(ranks: list[subprocess.Popen[bytes]], latest: Callable[[], int], step: int) -> None:
    """Until the latest step is this one or a later one; or until a process ends."""
    until = time.perf_counter() + LIMIT_S
    while time.perf_counter() < until and all(rank.poll() is None for rank in ranks) and latest() < step:
        time.sleep(0.001)


def being_written(run: Path) -> Callable[[], int]:
    """The latest step whose checkpoint is being written, from now on; what the last start has left is not."""
    before = {*(run / "checkpoints").glob(".tmp-step_*")}
    return lambda: max(map(_step, {*(run / "checkpoints").glob(".tmp-step_*")} - before), default=0)


def made(run: Path) -> Callable[[], int]:
    """The latest step that is made, from now on: metrics have those of the last start before it."""
    begun = len(_log(run))
    return lambda: max(map(int, re.findall(r"^step (\d+)/", _log(run)[begun:], re.MULTILINE)), default=0)


def _steps_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return len(metrics.read_bytes().splitlines()) if metrics.exists() else 0


def _told(given: argparse.Namespace, run: Path, begun: int, found: dict[str, Any]) -> dict[str, Any]:
    """What was said of a fault, what the others were doing, and whether that is as it must be. One that leaves after
    the last step has no stacks to write any more, and nothing is asked of a run that has ended."""
    said, stacks = _log(run)[begun:], sorted((run / "stacks").glob("rank-*.txt"))
    codes, text = found["exit_codes"], "".join(path.read_text() for path in stacks)
    doing = [room for room in ("generator", "trainer", "run") if f"/lockstep/{room}/" in text]
    messages = said.count(FAULT)
    in_time = found["seconds"] <= DEADLINE_S
    others = {code for rank, code in enumerate(codes) if rank != found["rank"]}
    written = [path.stem for path in stacks if path.stat().st_size]
    leaving = _steps_done(run) >= given.steps
    told = others == {1} and messages == 1 and (leaving or len(written) == len(codes))
    whole = in_time and (told or leaving and others == {0})
    known = {"leaving": leaving, "messages": messages, "stacks": written, "doing": doing[:1]}
    return known | {"in_order": whole or not any(codes)}


def _log(run: Path) -> str:
    log = run.with_name(f"{run.name}.log")
    return log.read_text() if log.exists() else ""


def _step(path: Path) -> int:
    return int(path.name.removeprefix(".tmp-step_").partition("-")[0])


def _start(given: argparse.Namespace, folder: Path, run: Path) -> list[subprocess.Popen[bytes]]:
    """The processes of a run that begins or goes on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ["--resume", str(run)] if (run / "config.yaml").exists() else begun(given, folder, run)
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


def begun(given: argparse.Namespace, folder: Path, run: Path) -> list[str]:
    """The flags of a run that begins; each shard has as many prompts."""
    shards = given.processes // given.tp
    prompts = -(-LEAST_PROMPTS // shards) * shards
    return [
        *("dataset", "--model", str(folder / "model"), "--data", str(folder / "data.jsonl"), "--run-dir", str(run)),
        *("--reward", f"{folder / 'rewards.py'}:letters", "--device", given.device, "--steps", str(given.steps)),
        *("--trainer.prompts-per-step", str(prompts), "--sampling.num-generations", "4"),
        *("--sampling.max-completion-length", "12", "--trainer.max-tokens-per-micro-batch", "128"),
        *("--task.validation-prompts", "0", "--checkpoint.interval", "1", "--parallel.batch-shards", str(shards)),
        *("--parallel.tp", str(given.tp), "--parallel.generator-tp", str(given.generator_tp)),
        *["--parallel.no-symmetric-memory"] * given.collectives,
        *("--parallel.timeout", str(TIMEOUT_S), "--metrics.no-progress", "--optimizer.learning-rate", "1e-3"),
    ]


def _ended(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit codes, when all have ended."""
    try:
        return [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def differing(whole: Path, other: Path) -> list[str]:
    """Which of a run's parts are not as the other's, and of the metrics which and where first."""
    parts = left(whole)
    found = [name for name, words in left(other).items() if words != parts[name]]
    for line, (a, b) in enumerate(zip(_metrics(whole), _metrics(other), strict=False)):
        names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if names:
            return [*found, *(f"line {line}, {name}: {a.get(name)} and {b.get(name)}" for name in names)]
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    """All but what is measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(MEASURED)} for line in lines]


def left(run: Path) -> dict[str, str]:
    """SHA-256 of what a run left."""
    parts = {"metrics": json.dumps(_metrics(run)).encode(), "rollouts": (run / "rollouts.jsonl").read_bytes()}
    parts["model"] = b"".join(path.read_bytes() for path in sorted((run / "model").glob("*.safetensors")))
    return {name: hashlib.sha256(part).hexdigest() for name, part in parts.items()}
