"""Every family, five random tiny models each, through all that must hold of it; `tests/models` has a covering set.

    python tests/matrix.py OUTCOME.json [--shard 1/2] [--only FAMILY ...]

A case is a family, a way and a seed: `same` (logits, greedy tokens and folders beside `transformers`), `float32` and
`bfloat16` (generator and trainer over three updates, eager and captured), `processes` (`lockstep train` on two
processes and on one, of the family's tiny random model), and `layouts`, the same of four families on two and four
processes that share products in training, in generation, or in both. OUTCOME.json says of each what came of it and the
seconds, and the commit; what it has of the same sources is not done again, so that an interrupted run is gone on with.
Exits with 1 unless all hold.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from family_cases import MAKERS, assert_roles_agree, assert_same_model
from processes import finished
from safetensors.torch import load_file

from lockstep.cache import fingerprint
from lockstep.models import Decoder, save_model
from lockstep.models.families import FAMILIES
from lockstep.models.init import init_folder, initialize
from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer

SEEDS = 5
REWARD = """
def low(completion_ids, **_):
    "The share of small tokens."
    return [sum(t < 200 for t in ids) / len(ids) for ids in completion_ids]
"""
SPREAD = "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"
# Processes, those that share the trainer's products, those that share the generator's, and whether steps are graphs.
LAYOUTS = [
    (processes, tp, generator_tp, graphs)
    for processes in (2, 4)
    for tp in (1, 2)
    for generator_tp in (1, 2, 4)
    for graphs in (False, True)
    if generator_tp <= processes and tp * generator_tp > 1
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def cases() -> Iterator[tuple[str, str, int]]:
    """Family, way and seed; the quickest ways first. The seed of `layouts` is the layout's number."""
    for way, seeds in {"same": SEEDS, "processes": 1, **dict.fromkeys(DTYPES, SEEDS)}.items():
        yield from ((family, way, seed) for seed in range(seeds) for family in MAKERS)
    yield from ((family, "layouts", number) for family in SPREAD for number in range(len(LAYOUTS)))


def run(family: str, way: str, seed: int, folder: Path) -> None:
    """Raises what does not hold."""
    if way == "same":
        assert_same_model(family, seed, folder)
    elif way == "processes":
        assert_processes_agree(family, folder)
    elif way == "layouts":
        assert_layout_agrees(family, folder, *LAYOUTS[seed])
    else:
        assert_roles_agree(family, seed, folder, DTYPES[way])


def assert_processes_agree(family: str, folder: Path) -> None:
    """Three steps on two processes end with the weights of one process, and no token differed: that ends a run."""
    init_folder(next(iter(FAMILIES[family].architectures)), folder / "in", 0)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": "hello " * (1 + i % 4)}) + "\n" for i in range(9)))
    options = [
        "train",
        "dataset",
        "--model",
        str(folder / "in"),
        "--task.data",
        str(folder / "data.jsonl"),
        "--steps",
        "3",
    ]
    options += ["--task.reward", f"{folder / 'rewards.py'}:low", "--task.validation-prompts", "0"]
    options += ["--trainer.prompts-per-step", "4", "--sampling.num-generations", "4", "--parallel.batch-shards", "2"]
    options += ["--sampling.max-completion-length", "8", "--optimizer.learning-rate", "3e-3", "--device", "cpu"]
    for name, launcher in {"one": [], "two": ["-m", "torch.distributed.run", "--nproc-per-node", "2"]}.items():
        command = [sys.executable, *launcher, "-m", "lockstep", *options, "--run-dir", str(folder / name)]
        done = finished(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = (load_file(folder / name / "model" / "model.safetensors") for name in ("one", "two"))
    steps = [json.loads(line) for line in (folder / "two" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in steps) and len(steps) == 3
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def assert_layout_agrees(family: str, folder: Path, processes: int, tp: int, generator_tp: int, graphs: bool) -> None:
    """Three steps whose prompts run in chunks and whose samples are preempted: no token differs between the roles, the
    first step samples what one process does, and where nobody shares the trainer's products all steps do."""
    own = replace(next(iter(FAMILIES[family].architectures.values())), eos_token_ids=(byte_tokenizer().eos_token_id,))
    config = own if own.mla is not None else replace(own, num_heads=8, num_kv_heads=4)
    save_model(initialize(Decoder(config, torch.float32), 0), folder / "in")
    save_tokenizer(byte_tokenizer(), folder / "in")
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": "hello " * (1 + i % 4)}) + "\n" for i in range(9)))
    options = ["train", "dataset", "--model", str(folder / "in"), "--task.data", str(folder / "data.jsonl")]
    options += ["--task.reward", f"{folder / 'rewards.py'}:low", "--task.validation-prompts", "0", "--steps", "3"]
    options += ["--trainer.prompts-per-step", "8", "--sampling.num-generations", "4", "--parallel.batch-shards", "4"]
    options += ["--sampling.max-completion-length", "24", "--optimizer.learning-rate", "3e-3", "--device", "cpu"]
    options += [
        "--generator.kv-cache-tokens",
        "160",
        "--generator.max-num-batched-tokens",
        "24",
        "--sampling.top-p",
        "0.9",
    ]
    shared = ["--parallel.tp", str(tp), "--parallel.generator-tp", str(generator_tp)]
    shared += ["--compile.capture", "step"] if graphs else []
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    for name, before, after in ("one", [], []), ("several", launcher, shared):
        command = [sys.executable, *before, "-m", "lockstep", *options, *after, "--run-dir", str(folder / name)]
        done = finished(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-2000:]
    metrics = [json.loads(line) for line in (folder / "several" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["grad_norm"] > 0 and step["parity/tokens_different"] == 0 for step in metrics) and len(metrics) == 3
    one, several = ((folder / name / "rollouts.jsonl").read_text().splitlines() for name in ("one", "several"))
    same = len(one) if tp == 1 else len(one) // 3
    assert len(one) == len(several) == 24 and one[:same] == several[:same]


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
