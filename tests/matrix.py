"""Every family, five random tiny models each, through all that must hold of it; `tests/models` has a covering set.

    python tests/matrix.py OUTCOME.json [--shard 1/2] [--only FAMILY ...]

A case is a family, a way and a seed: `same` (logits, greedy tokens and folders beside `transformers`), `float32` and
`bfloat16` (generator and trainer over three updates, eager and captured), `processes` (`lockstep train` on two
processes and on one, of the family's tiny random model), `tp` (the same where processes share products, of the trainer
and of the generator, in several degrees). OUTCOME.json says of each what came of it and the seconds,
and the commit; what it has of the same sources is not done again, so that an interrupted run is gone on with. Exits
with 1 unless all hold.
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
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases() -> Iterator[tuple[str, str, int]]:
    """Family, way and seed; the quickest ways first."""
    for way, seeds in {"same": SEEDS, "processes": 1, "tp": 1, **dict.fromkeys(DTYPES, SEEDS)}.items():
        yield from ((family, way, seed) for seed in range(seeds) for family in MAKERS)


def run(family: str, way: str, seed: int, folder: Path) -> None:
    """Raises what does not hold."""
    if way == "same":
        assert_same_model(family, seed, folder)
    elif way == "processes":
        assert_processes_agree(family, folder)
    elif way == "tp":
        assert_degrees_agree(family, folder)
    else:
        assert_roles_agree(family, seed, folder, DTYPES[way])


def assert_processes_agree(family: str, folder: Path) -> None:
    """Three steps on two processes end with the weights of one process, and no token differed: that ends a run."""
    one, two = (trained(family, folder, name, ranks)[0] for name, ranks in (("one", 1), ("two", 2)))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


# Processes, and of the trainer and the generator how many share products.
DEGREES = ((2, 2, 1), (2, 2, 2), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 1, 2), (4, 2, 4), (4, 4, 2))


def assert_degrees_agree(family: str, folder: Path) -> None:
    """In every degree that the family's tiny model has: no token differs, the first step's rollouts are one process's,
    weights have the same bits where the trainer's layouts are the same, and are otherwise within 1e-5."""
    one, rollouts = trained(family, folder, "one", 1)
    config, by_degree = next(iter(FAMILIES[family].architectures.values())), {1: one}
    for ranks, tp, generator_tp in DEGREES:
        try:
            require_degree(config, max(tp, generator_tp), "a degree")
        except InputError:
            continue
        flags = "--parallel.tp", str(tp), "--parallel.generator-tp", str(generator_tp)
        shards = () if ranks // tp <= 2 else ("--parallel.batch-shards", "4")
        found, sampled = trained(family, folder, f"{ranks} {tp} {generator_tp}", ranks, *flags, *shards)
        assert sampled[:4] == rollouts[:4], flags  # a line a group
        if shards:
            continue  # other micro-batches
        same = by_degree.setdefault(tp, found)
        assert all(torch.equal(found[key], same[key]) for key in one), flags
        assert all((found[key] - one[key]).norm() <= 1e-5 * one[key].norm() for key in one), flags


def trained(family: str, folder: Path, name: str, ranks: int, *flags: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights of three steps on so many processes, in which no token differed, and the lines of the rollouts."""
    if not (folder / "in").exists():
        init_folder(next(iter(FAMILIES[family].architectures)), folder / "in", 0)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": "hello " * (1 + i % 4)}) + "\n" for i in range(9)))
    options = ["train", "dataset", "--model", str(folder / "in"), "--task.data", str(folder / "data.jsonl")]
    options += ["--task.reward", f"{folder / 'rewards.py'}:low", "--task.validation-prompts", "0", "--steps", "3"]
    options += ["--trainer.prompts-per-step", "4", "--sampling.num-generations", "4"]
    options += [] if "--parallel.batch-shards" in flags else ["--parallel.batch-shards", "2"]
    options += ["--sampling.max-completion-length", "8", "--optimizer.learning-rate", "3e-3", "--device", "cpu"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "lockstep", *options, *flags, "--run-dir", str(folder / name)]
    done = finished(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in steps) and len(steps) == 3
    weights = load_file(folder / name / "model" / "model.safetensors")
    return weights, (folder / name / "rollouts.jsonl").read_text().splitlines()


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
    known = json.loads(args.outcome.read_text()) if args.outcome.exists() else {}
    found: dict[str, Any] = known["cases"] if known.get("sources") == sources() else {}
    for family, way, seed in list(cases())[part - 1 :: parts]:
        name = f"{family} {way} {seed}"
        if family not in args.only or found.get(name, {}).get("outcome") == "holds":
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(family, way, seed, Path(folder))
                outcome = "holds"
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"[:500]
        found[name] = {"outcome": outcome, "seconds": round(time.perf_counter() - began, 1)}
        print(name, found[name], flush=True)
        record = {"commit": commit(), "sources": sources(), "cases": found}
        args.outcome.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    failed = [name for name, case in found.items() if case["outcome"] != "holds"]
    print(f"{len(found)} cases, {len(failed)} do not hold", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
