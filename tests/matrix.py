"""Every family, five random tiny models each, through all that must hold of it; `tests/models` has a covering set.

    python tests/matrix.py OUTCOME.json [--shard 1/2] [--only FAMILY ...] [--ways WAY ...]

A case is a family, a way and a seed: `same` (logits, greedy tokens and folders beside `transformers`), `float32` and
`bfloat16` (generator and trainer over three updates, eager and captured), `processes` (`lockstep train` on two
processes and on one), `tp` and `cells` (the same in the layouts of `layout_runs`, which stand in the seed's place, of
the family's own tiny model). OUTCOME.json says of each what came of it, the seconds and the commit;
what it has of the same sources is not done again, so that an interrupted run is gone on with. Exits with 1 unless all
hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import processes
import torch
from family_cases import MAKERS, assert_roles_agree, assert_same_model, folder_of
from layout_runs import (
    CELLS,
    DEGREES,
    LIKELY,
    assert_cells_agree,
    assert_degrees_agree,
    assert_same_run,
    run_of,
    trained,
)

from lockstep.cache import fingerprint
from lockstep.models.tokenizer import byte_tokenizer

SEEDS = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BESIDE = "family_cases.py", "layout_runs.py", "matrix.py"  # of the tests: outcomes are of these, too

Case = tuple[str, str, str]


def cases() -> Iterator[Case]:
    """Family, way, and a seed or a layout; the quickest ways first, and all layouts of a family together."""
    seeds = list(map(str, range(SEEDS)))
    for way in ("same", "processes", *DTYPES):
        yield from ((family, way, seed) for seed in seeds for family in MAKERS)
    for family in MAKERS:
        yield from ((family, way, kind) for way, kinds in (("tp", DEGREES), ("cells", CELLS)) for kind in kinds)


def run(case: Case, folder: Path) -> None:
    """Raises what does not hold. The folder is empty, and the one above it is the family's."""
    family, way, kind = case
    if way == "same":
        assert_same_model(family, int(kind), folder)
    elif way == "processes":
        assert_processes_agree(family, int(kind), folder)
    elif way == "cells":
        assert_cells_agree(family, kind, folder)
    elif way == "tp":
        assert_degrees_agree(family, kind, folder)
    else:
        assert_roles_agree(family, int(kind), folder, DTYPES[way])


def assert_processes_agree(family: str, seed: int, folder: Path) -> None:
    """Three steps on two processes end with the weights of one process, and no token differed: that ends a run."""
    words = {"vocab_size": 263, "eos_token_id": byte_tokenizer().eos_token_id}
    options = run_of(family, folder, lambda family, path: folder_of(family, seed, path, **words))
    options += [*LIKELY, "--sampling.temperature", "3", "--trainer.prompts-per-step", "4"]  # some are sure of a token
    options += ["--parallel.batch-shards", "2"]
    one, two = (trained(folder / str(count), count, [*options, "--steps", "3"]) for count in (1, 2))
    assert_same_run(one, two, 3)


def sources() -> str:
    """What an outcome is of: the package, and these tests."""
    beside = [Path(__file__).with_name(name).read_text("utf-8") for name in BESIDE]
    return fingerprint.digest(fingerprint.sources(), beside)


def commit() -> str:
    """The checkout's last one; `sources` tells whether it is what ran."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True).stdout.strip()


def outcome_of(case: Case, folder: Path) -> str:
    """What came of a case, in one line."""
    try:
        folder.mkdir(parents=True)
        run(case, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-500:]
    return "holds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outcome", type=Path)
    parser.add_argument("--shard", default="1/1", help="I/N: the I-th of every N cases")
    parser.add_argument("--only", nargs="*", default=list(MAKERS), help="families")
    parser.add_argument("--ways", nargs="*", default=["same", "processes", *DTYPES, "tp", "cells"])
    args = parser.parse_args()
    part, parts = map(int, args.shard.split("/"))
    found: dict[str, Any] = json.loads(args.outcome.read_text()) if args.outcome.exists() else {}
    made_of = {"commit": commit(), "sources": sources()}
    asked = [case for case in cases() if case[0] in args.only and case[1] in args.ways]
    processes.PRELOADED += ["family_cases", "layout_runs"]  # processes begin with what this one has imported
    with tempfile.TemporaryDirectory() as scratch:
        for case in asked[part - 1 :: parts]:
            name, known = " ".join(case), found.get(" ".join(case), {})
            if (known.get("outcome"), known.get("sources")) == ("holds", made_of["sources"]):
                continue
            began = time.perf_counter()
            outcome = outcome_of(case, Path(scratch, case[0], name))
            found[name] = {"outcome": outcome, "seconds": round(time.perf_counter() - began, 1), **made_of}
            print(name, found[name], flush=True)
            args.outcome.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    failed = [name for name, case in found.items() if case["outcome"] != "holds"]
    print(f"{len(found)} cases, {len(failed)} do not hold", *failed, sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
