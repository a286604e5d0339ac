"""Every family, five random tiny models each, through all that must hold of it; `tests/models` has a covering set.

    python tests/matrix.py OUTCOME.json [--shard 1/2] [--only FAMILY ...]

A case is a family, a way and a seed: `same` (logits, greedy tokens and folders beside `transformers`), `float32` and
`bfloat16` (generator and trainer over three updates, eager and captured), `processes` (`lockstep train` on two
processes and on one, of the family's tiny random model), `tp` (the same where processes share products, of the trainer
and of the generator, in several degrees), `cells` (on one, two and four, of eight shards in two cells, with two updates
a rollout, and gone on with on another number). OUTCOME.json says of each what came of it, the seconds and the commit;
what it has of the same sources is not done again, so that an interrupted run is gone on with. Exits with 1 unless all
hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from family_cases import MAKERS, assert_roles_agree, assert_same_model
from processes import finished
from safetensors.torch import load_file

from lockstep.cache import fingerprint
from lockstep.errors import InputError
from lockstep.models.checks import require_degree
from lockstep.models.families import FAMILIES
from lockstep.models.init import init_folder

SEEDS = 5
REWARD = """
def low(completion_ids, **_):
    "The share of small tokens."
    return [sum(t < 200 for t in ids) / len(ids) for ids in completion_ids]
"""
TIMED = ("time/", "perf/", "memory/")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases() -> Iterator[tuple[str, str, int]]:
    """Family, way and seed; the quickest ways first."""
    for way, seeds in {"same": SEEDS, "processes": 1, "tp": 1, "cells": 1, **dict.fromkeys(DTYPES, SEEDS)}.items():
        yield from ((family, way, seed) for seed in range(seeds) for family in MAKERS)


def run(family: str, way: str, seed: int, folder: Path) -> None:
    """Raises what does not hold."""
    if way == "same":
        assert_same_model(family, seed, folder)
    elif way == "processes":
        assert_processes_agree(family, folder)
    elif way == "cells":
        assert_cells_agree(family, folder)
    elif way == "tp":
        assert_degrees_agree(family, folder)
    else:
        assert_roles_agree(family, seed, folder, DTYPES[way])


def assert_processes_agree(family: str, folder: Path) -> None:
    """Three steps on two processes end with the weights of one process, and no token differed: that ends a run."""
    options = run_of(family, folder)
    options += ["--trainer.prompts-per-step", "4", "--parallel.batch-shards", "2", "--steps", "3"]
    one, two = (trained(folder / str(count), count, options) for count in (1, 2))
    assert_same_run(one, two, 3)


def assert_cells_agree(family: str, folder: Path) -> None:
    """Steps of two updates, of eight shards in two cells of several micro-batches each; two processes go on where four
    have saved, one where two, and four where one has."""
    options = run_of(family, folder)
    options += ["--trainer.prompts-per-step", "16", "--trainer.max-tokens-per-micro-batch", "64"]
    options += ["--trainer.num-iterations", "2", "--parallel.batch-shards", "8", "--parallel.cell", "4"]
    options += ["--checkpoint.interval", "2"]
    runs = {count: trained(folder / str(count), count, [*options, "--steps", "2"]) for count in (1, 2, 4)}
    for count in (2, 4):
        assert_same_run(runs[1], runs[count], 2)
    for count, then in {4: 2, 2: 1, 1: 4}.items():
        command = ["train", "--resume", str(folder / str(count)), "--steps", "3"]
        runs[count] = trained(folder / str(count), then, command)
    for count in (2, 4):
        assert_same_run(runs[1], runs[count], 3)
    flat = [option if before != "--parallel.cell" else "8" for before, option in pairwise(["", *options])]
    other = trained(folder / "flat", 1, [*flat, "--steps", "2"])
    assert other["metrics.jsonl"][0]["reward/mean"] == runs[1]["metrics.jsonl"][0]["reward/mean"]
    assert any(not torch.equal(other["weights"][key], tensor) for key, tensor in runs[1]["weights"].items())


def run_of(family: str, folder: Path) -> list[str]:
    """The command of a run with the family's tiny random model, made here, without its steps and their prompts."""
    init_folder(next(iter(FAMILIES[family].architectures)), folder / "in", 0)
    (folder / "rewards.py").write_text(REWARD)
    lines = [json.dumps({"prompt": "hello " * (1 + i % 4)}) + "\n" for i in range(19)]
    (folder / "data.jsonl").write_text("".join(lines))
    options = ["train", "dataset", "--model", str(folder / "in"), "--task.data", str(folder / "data.jsonl")]
    options += ["--task.reward", f"{folder / 'rewards.py'}:low", "--task.validation-prompts", "0"]
    options += ["--sampling.num-generations", "4", "--sampling.max-completion-length", "8"]
    return [*options, "--optimizer.learning-rate", "3e-3", "--device", "cpu"]


def trained(run: Path, count: int, options: list[str]) -> dict[str, Any]:
    """What a run on so many processes wrote, without times."""
    launcher = [] if count == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    given = options if "--resume" in options else [*options, "--run-dir", str(run)]
    done = finished([sys.executable, *launcher, "-m", "lockstep", *given], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = {"weights": load_file(run / "model" / "model.safetensors")}
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        found[name] = [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
    return found


def assert_same_run(one: dict[str, Any], other: dict[str, Any], steps: int) -> None:
    """In every bit: rollouts, losses, norms and weights; in no step a token differed."""
    found = one["metrics.jsonl"]
    assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in found) and len(found) == steps
    assert found == other["metrics.jsonl"] and one["rollouts.jsonl"] == other["rollouts.jsonl"] != []
    a, b = one["weights"], other["weights"]
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Processes, and of the trainer and the generator how many share products.
DEGREES = ((2, 2, 1), (2, 2, 2), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 2), (4, 2, 4), (4, 4, 2))

PRESSED = ["--generator.kv-cache-tokens", "128", "--generator.page-size", "16"]
PRESSED += ["--generator.max-num-batched-tokens", "24"]


def assert_degrees_agree(family: str, folder: Path) -> None:
    """In every degree that the family's tiny model has, with prompts in chunks, samples that are preempted, and on two
    processes as graphs: no token differs, the first step's rollouts are one process's, weights have the same bits where
    the trainer's layouts are the same, and are otherwise within 1e-5."""
    options = run_of(family, folder)
    options += ["--trainer.prompts-per-step", "4", "--steps", "3"]
    two_shards = ["--parallel.batch-shards", "2"]
    first = trained(folder / "one", 1, options + two_shards)
    one = first["weights"]
    config, by_degree = next(iter(FAMILIES[family].architectures.values())), {1: one}
    for ranks, tp, generator_tp in DEGREES:
        try:
            require_degree(config, max(tp, generator_tp), "a degree")
        except InputError:
            continue
        flags = ["--parallel.tp", str(tp), "--parallel.generator-tp", str(generator_tp), *PRESSED]
        flags += ["--compile.capture", "step"] if ranks == 2 else []
        two = ranks // tp <= 2
        shards = two_shards if two else ["--parallel.batch-shards", "4"]
        other = trained(folder / f"{ranks} {tp} {generator_tp}", ranks, options + flags + shards)
        steps = other["metrics.jsonl"]
        assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in steps) and len(steps) == 3
        assert other["rollouts.jsonl"][:4] == first["rollouts.jsonl"][:4], flags  # a line a group
        if not two:
            continue  # other micro-batches
        found = other["weights"]
        same = by_degree.setdefault(tp, found)
        assert all(torch.equal(found[key], same[key]) for key in one), flags
        assert all((found[key] - one[key]).norm() <= 1e-5 * one[key].norm() for key in one), flags


def sources() -> str:
    """What an outcome is of: the package, and these tests."""
    beside = [Path(__file__).with_name(name).read_text("utf-8") for name in ("family_cases.py", "matrix.py")]
    return fingerprint.digest(fingerprint.sources(), beside)


def commit() -> str:
    """The checkout's last one; `sources` tells whether it is what ran."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcome", type=Path)
    parser.add_argument("--shard", default="1/1", help="I/N: the I-th of every N cases")
    parser.add_argument("--only", nargs="*", default=list(MAKERS))
    args = parser.parse_args()
    part, parts = map(int, args.shard.split("/"))
    found: dict[str, Any] = json.loads(args.outcome.read_text()) if args.outcome.exists() else {}
    made_of = {"commit": commit(), "sources": sources()}
    for family, way, seed in list(cases())[part - 1 :: parts]:
        name = f"{family} {way} {seed}"
        known = found.get(name, {})
        if family not in args.only or (known.get("outcome"), known.get("sources")) == ("holds", made_of["sources"]):
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(family, way, seed, Path(folder))
                outcome = "holds"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"[:500]
        found[name] = {"outcome": outcome, "seconds": round(time.perf_counter() - began, 1), **made_of}
        print(name, found[name], flush=True)
        args.outcome.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    failed = [name for name, case in found.items() if case["outcome"] != "holds"]
    print(f"{len(found)} cases, {len(failed)} do not hold", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
