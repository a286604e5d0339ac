"""Two source trees in turn: generation, the train step and the seed workload, with peak memory and the words made.

Each tree measures with its own benchmarks, in one process a tree that stays up, so that both are timed in the same
minutes: a round is one call of either. The seed workload is a fresh process each time, in turn too: cold in caches of
its own and then warm. A difference counts where the medians are further apart than both `--tolerance` and the spread of
the rounds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TOLERANCE, STARTUP_TOLERANCE = 0.02, 0.05
COLD, WARM = "seed workload, cold", "seed workload, warm"
GENERATE = {"cuda": ("one", "seed", "seed, top-p", "mid", "mixed"), "cpu": ("cpu", "cpu, no shared prompt")}
TRAIN = ("all tokens", "the RL step's work")
ROLES = ("generate", "train")


def _benchmark(name: str) -> Any:
    """The tree's own; older ones have it beside this file's place."""
    try:
        return importlib.import_module(f"cases.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(name)


def _generation(name: str, device: str) -> Callable[[], object]:
    from common import random_model

    generate = _benchmark("generate")

    model = random_model("qwen3-0.6b" if device == "cuda" else "tiny", device)
    if name != generate.MIXED:
        case = generate.CASES[name]
        return generate.Ours(model, case, generate.random_prompts(case.prompts, lambda: case.prompt))
    from lockstep.types import SamplingParams

    case = generate.MIXED_CASE
    base = SamplingParams(n=case.samples, ignore_eos=True)
    shapes = [case.prompt[:1] + case.new[1:], case.prompt[1:] + case.new[:1]] * (case.groups // 8)
    engine = generate.make_engine(model, case.running // 2, case.prompt[1] + case.new[1], base)
    return lambda: generate.saturated_rate(engine, shapes, base, 0.0, 1)


def _training(name: str, device: str) -> Callable[[], object]:
    import torch
    from common import random_model

    train_step = _benchmark("train_step")
    count, length, prompt, arch = (40, 245, 145, "qwen3-0.6b") if device == "cuda" else (32, 128, 64, "tiny")
    tokens = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))
    tokens[:, :prompt] = tokens[::8, :prompt].repeat_interleave(8, 0)[:count]
    groups = train_step.groups(tokens, 1 if name == TRAIN[0] else 8, prompt)
    return train_step.Ours(random_model(arch, device), groups)


def _family(name: str, device: str) -> Callable[[], object]:
    """`ROLE: FAMILY`, a role of the benchmark of families; training leaves the weights as they are, so that what it is
    given again and again stays the generator's."""
    families = _benchmark("families")
    families.LEARNING_RATE = 0.0
    role, _, chosen = name.partition(": ")
    known, case = (families.TINY, families.TINY_CASE) if device == "cpu" else (families.FAMILIES, families.CASE)
    if chosen not in known or role not in ROLES:
        raise SystemExit(f"--case {name!r}: use {' or '.join(ROLES)}, ': ' and one of {', '.join(known)}")
    family = known[chosen]
    takes_config = "config" in inspect.signature(families.Policy).parameters  # an older tree's
    policy = families.Policy(family.config if takes_config else family, getattr(family, "case", None) or case, device)
    policy.start(())
    return partial(policy.generate, 0) if role == ROLES[0] else partial(policy.train, policy.generate(0))


def _words(run: Any) -> str | None:
    """Digest of the weights that a step made, where it made any."""
    if not hasattr(run, "trainer"):
        return None
    import torch

    digest = hashlib.sha256()
    for parameter in run.trainer.model.parameters():
        digest.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def serve(device: str) -> None:
    """Open, run and close cases as the lines of standard input say; one line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    import torch
    from common import seconds

    run: Any = None
    for line in sys.stdin:
        order, _, name = line.strip().partition(" ")
        found: dict[str, Any] = {}
        if order == "open":
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            make = _training if name in TRAIN else _family if ": " in name else _generation
            run = make(name, device)
            run()  # what a first call makes
        elif order == "run":
            found["seconds"] = seconds(run, device)
        else:
            found["words"] = _words(run)
            run = None
            gc.collect()
            if device == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.empty_cache()
        print(json.dumps(found), file=answers, flush=True)


class Tree:
    """A source tree, its caches, and the process that measures in it."""

    def __init__(self, root: Path, device: str, scratch: Path) -> None:
        self.root, self.device, self.scratch = root, device, scratch
        self._caches(scratch / "cases")
        command = [sys.executable, "-P", __file__, "--serve", "--device", device]  # with the tree's own benchmarks
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=self.environment, cwd=root, **pipes)

    def _caches(self, folder: Path) -> None:
        path = f"{self.root}:{self.root / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"
        own = {"LOCKSTEP_CACHE": str(folder / "lockstep"), "TRITON_CACHE_DIR": str(folder / "triton")}
        self.environment = {**os.environ, "PYTHONPATH": path, **own}

    def ask(self, order: str) -> dict[str, Any]:
        """The process's answer to `open CASE`, `run` or `close`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(order, file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"{self.root}: ended at {order!r} with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def seed_workload(self, caches: str, steps: int) -> dict[str, Any]:
        """A fresh process with caches of this name: cold if they are new, else warm."""
        self._caches(self.scratch / caches)
        path = self.scratch / f"{caches}.json"
        arch = "qwen3-0.6b" if self.device == "cuda" else "tiny"
        benchmarks = self.root / "benchmarks"
        alone = benchmarks / "seed_workload.py"  # of an older tree
        command = [str(alone)] if alone.exists() else [str(benchmarks / "run.py"), "seed_workload"]
        command += ["--arch", arch, "--steps", str(steps), "--json", str(path)]
        subprocess.run([sys.executable, *command], env=self.environment, cwd=self.root, check=True, stdout=sys.stderr)
        (run,) = json.loads(path.read_text())["systems"].values()
        return dict(run)


def in_turn(trees: dict[str, Tree], case: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each round, peak memory and words, by tree."""
    for tree in trees.values():
        tree.ask(f"open {case}")
    times: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(rounds):
        for name in list(trees)[:: -1 if turn % 2 else 1]:
            times[name].append(trees[name].ask("run")["seconds"])
    return {name: {"seconds": times[name], **tree.ask("close")} for name, tree in trees.items()}


def seed_workloads(
    trees: dict[str, Tree], rounds: int, warm: int, steps: int
) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Total, start-up and memory of runs in turn, cold and then warm; what there is so far, after every turn."""
    cases: dict[str, dict[str, dict[str, Any]]] = {COLD: {}, WARM: {}}
    for turn in range(rounds):
        for i, case in enumerate([COLD, *[WARM] * warm]):
            for name in list(trees)[:: -1 if (turn + i) % 2 else 1]:
                run = trees[name].seed_workload(f"seed{turn}", steps)
                found = cases[case].setdefault(name, {"seconds": [], "startup_s": [], "step_s": [], "phases": []})
                found["seconds"].append(run["total_s"])
                found["startup_s"].append(run["startup_s"])
                found["step_s"].append(_median(run["step_s"][1:]))
                found["phases"].append(run["startup"])
                found["peak_gib"] = run["peak_gib"]
                found["tokens_different"] = run["certificate"]["tokens_different"]
            yield case, cases[case]


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def compared(found: dict[str, dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """The figures of both with the ratio of medians, and whether the second is slower beyond tolerance and spread."""
    before, after = (found[name] for name in ("before", "after"))
    a, b = _median(before["seconds"]), _median(after["seconds"])
    spread = max(max(f["seconds"]) - min(f["seconds"]) for f in (before, after)) / a
    slower = b / a - 1 > tolerance and b / a - 1 > spread
    return {**found, "ratio": b / a, "spread": spread, "slower": slower}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, nargs="?", help="the other source tree")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each tree in turn (default: 5)")
    parser.add_argument("--case", action="append", help="default: all of the device's; also 'train: FAMILY'")
    parser.add_argument("--seed-rounds", type=int, default=3, help="cold runs of the seed workload (default: 3)")
    parser.add_argument("--warm", type=int, default=2, help="warm runs after each cold one (default: 2)")
    parser.add_argument("--steps", type=int, default=10, help="of the seed workload (default: 10)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.device)
        return 0
    from common import finish, save

    figures: dict[str, Any] = {"before": os.environ.get("LOCKSTEP_BEFORE", str(args.before)), "cases": {}}
    with tempfile.TemporaryDirectory() as scratch:
        roots = {"before": args.before.resolve(), "after": ROOT}
        trees = {name: Tree(root, args.device, Path(scratch) / name) for name, root in roots.items()}
        for case in args.case or (*GENERATE[args.device], *TRAIN):
            figures["cases"][case] = compared(in_turn(trees, case, args.rounds), args.tolerance)
            save("compare", figures, args.json)
        for tree in trees.values():
            tree.end()
        if args.seed_rounds:
            for case, found in seed_workloads(trees, args.seed_rounds, args.warm, args.steps):
                figures["cases"][case] = compared(found, STARTUP_TOLERANCE)
                save("compare", figures, args.json)
    rows = [["case", "before s", "after s", "ratio", "spread", "peak GiB before", "after", "words equal"]]
    for case, f in figures["cases"].items():
        both = [f[name] for name in roots]
        medians = [f"{_median(b['seconds']):.4f}" for b in both]
        peaks = [f"{b.get('peak_gib') or 0:.2f}" for b in both]
        equal = str(both[0]["words"] == both[1]["words"]) if both[0].get("words") else "-"
        rows.append([case, *medians, f"{f['ratio']:.3f}", f"{f['spread']:.3f}", *peaks, equal])
    finish("compare", figures, rows, args.json)
    return int(any(f["slower"] for f in figures["cases"].values()))


if __name__ == "__main__":
    sys.exit(main())
