"""Settings that the other benchmarks leave alone: each a few steps of `lockstep train` with parity strict.

A case is `lockstep train` in a process of its own (several with `torchrun`), on prompts cut for the seed workload, with
graphs as they are by default. What must hold of it is in the table: no token different, no recompile, and the weights
of another case, or others than its. A case that fails costs itself; one that cannot end within the budget is not begun.
The memory of one sample's activations is read off a trainer in this process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import seed_workload
from common import Report, random_model

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.trainer import Trainer, pack
from lockstep.types import RolloutGroup, SamplingParams, Segment, Trajectory

STEPS, KILLED_AT = 4, "3"
SPARE_S = 5.0
TAIL = 2500  # characters kept of what a case that failed has printed
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """Flags of `lockstep train` beside those of every case, and what must hold.

    Attributes:
        arch: of the model; none: the dense one.
        same: the case whose weights must come out.
        other: one whose weights must not.
        killed: the process ends with SIGKILL in its third step, and the run is resumed.
    """

    flags: tuple[str, ...] = ()
    arch: str | None = None
    processes: int = 1
    same: str | None = None
    other: str | None = None
    killed: bool = False
    gpu: bool = False


CAPTURED = ("--compile.capture", "step")  # the default on a GPU
BINDING = "budget"  # stands for one that some layers must be computed again for; see `command`
SAVED = ("--checkpoint.interval", "1")
GROUPS = ("--optimizer.freeze", "model.embed_tokens", "--optimizer.lr-scales", "model.layers.*.mlp=0.5",
          "--optimizer.weight-decays", "model.norm=0.1")  # fmt: skip
SHARDS = ("--parallel.batch-shards", "2")
STOPPED = ("--sampling.stop", "a", "e", "--sampling.no-ignore-eos")  # some completions end, some are cut
EXPERTS, LATENT = "tiny-qwen3-moe", "tiny-deepseek-v3"
CASES = {
    "plain": Case(),
    "full_and_piecewise": Case(("--compile.cudagraph-mode", "full_and_piecewise"), same="plain", gpu=True),
    "per_sample": Case(("--trainer.mode", "per_sample")),
    "activation_memory_gib": Case((*CAPTURED, "--compile.activation-memory-gib", BINDING), same="plain"),
    "num_iterations": Case(("--trainer.num-iterations", "2"), other="plain"),
    "num_mini_batches": Case(("--trainer.num-mini-batches", "2", "--sampling.top-p", "0.9"), other="plain"),
    "parameter groups": Case(GROUPS, other="plain"),
    "parameter groups, resumed": Case((*GROUPS, *SAVED), same="parameter groups", killed=True),
    "beta": Case(("--loss.beta", "0.5"), other="plain"),
    "checkpoints": Case(SAVED, same="plain"),
    "resumed": Case(SAVED, same="plain", killed=True),
    "truncated": Case(STOPPED),
    "mask_truncated_completions": Case((*STOPPED, "--loss.mask-truncated-completions"), other="truncated"),
    "router biases kept": Case((), LATENT),
    "router_bias_rate": Case(("--optimizer.router-bias-rate", "0.01"), LATENT, other="router biases kept"),
    "groups, one process": Case((*GROUPS, *SHARDS)),
    "groups, sharded": Case((*GROUPS, *SHARDS), processes=2, same="groups, one process"),
    "experts, one process": Case(SHARDS, EXPERTS),
    "experts, sharded": Case(SHARDS, EXPERTS, 2, same="experts, one process"),
}
ACTIVATIONS = "per_sample, activations"


def mean_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The mean token id: a reward that differs for any two samples. At the call that `KILL_AT` counts, the process
    ends."""
    mean_token.calls = getattr(mean_token, "calls", 0) + 1  # type: ignore[attr-defined]
    if os.environ.get("KILL_AT") == str(mean_token.calls):  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(ids) / max(len(ids), 1) for ids in completion_ids]


def command(case: Case, folder: Path, run: Path, device: str) -> list[str]:
    small = device == "cpu"
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.processes)] if case.processes > 1 else []
    prompts, samples, tokens = (2, 4, 8) if small else (4, 8, 64)
    fixed = {
        "--model": folder / (case.arch or "dense") / "model",
        "--data": folder / "dense" / "prompts.jsonl",
        "--reward": f"{Path(__file__).resolve()}:mean_token",
        "--run-dir": run,
        "--device": device,
        "--steps": STEPS,
        "--trainer.prompts-per-step": prompts,
        "--sampling.num-generations": samples,
        "--sampling.max-completion-length": tokens,
        "--task.validation-prompts": 0,
        "--optimizer.learning-rate": 1e-4,
        "--loss.scale-rewards": "group",
    }
    if start:
        fixed["--parallel.timeout"] = 120
    flags = [str(word) for pair in fixed.items() for word in pair]
    free = () if "--sampling.no-ignore-eos" in case.flags else ("--sampling.ignore-eos",)
    return [
        *(sys.executable, *start, "-m", "lockstep", "train", "dataset", *flags, "--metrics.no-progress", *free),
        *(("0.001" if small else "0.1") if flag == BINDING else flag for flag in case.flags),
    ]


def finished(words: Sequence[str], limit: float, **more: str) -> tuple[int, str]:
    """Exit code and what was printed; a command that takes too long is ended, and those that it started."""
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((root, f"{root}/benchmarks", os.environ.get("PYTHONPATH", ""))),
        **more,
    }
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        return code, file.read().decode(errors="replace")


def run_case(case: Case, folder: Path, run: Path, device: str, limit: float) -> dict[str, Any]:
    """What the run leaves; `failed` and what it printed where it did not come to its end."""
    began = time.monotonic()
    if case.killed:
        code, printed = finished(command(case, folder, run, device), limit, KILL_AT=KILLED_AT)
        if code != -signal.SIGKILL or time.monotonic() - began > limit:
            return {"failed": f"exit code {code} instead of a kill", "tail": printed[-TAIL:]}
        words = [sys.executable, "-m", "lockstep", "train", "--resume", str(run)]
    else:
        words = command(case, folder, run, device)
    code, printed = finished(words, limit - (time.monotonic() - began))
    found: dict[str, Any] = {"seconds": time.monotonic() - began, "flags": list(case.flags)}
    if code != 0:
        return {**found, "failed": f"exit code {code}", "tail": printed[-TAIL:]}
    return found | outcome(run)


def outcome(run: Path) -> dict[str, Any]:
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    certificate = json.loads((run / "parity.json").read_text())
    compiled = json.loads((run / "summary.json").read_text()).get("compile", {})
    weights = b"".join(path.read_bytes() for path in sorted((run / "model").glob("*.safetensors")))
    return {
        "steps": len(steps),
        "tokens_checked": certificate["tokens_checked"],
        "tokens_different": certificate["tokens_different"],
        "identical": certificate["identical"],
        "recompiles": steps[-1].get("recompiles", 0),
        "replays": {k: v for k, v in steps[-1].items() if k.startswith("graph_replays")},
        "levels": {name: f["level"] for name, f in compiled.get("functions", {}).items() if "level" in f},
        "passes": compiled.get("passes", {}),
        "kl": [step.get("kl") for step in steps],
        "skipped": [step.get("frac_reward_zero_std") for step in steps],
        "step_s": [step["time/step"] for step in steps],
        "peak_gib": max((step.get("memory/peak_gib") or 0.0 for step in steps), default=0.0),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
    }


def wrong(case: Case, found: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """What does not hold of a case."""
    if "failed" in found:
        return [found["failed"]]
    odd = [] if found["steps"] == STEPS else [f"{found['steps']} steps"]
    if not found["identical"] or found["tokens_different"] or not found["tokens_checked"]:
        odd.append(f"{found['tokens_different']} of {found['tokens_checked']} tokens different")
    if found["recompiles"]:
        odd.append(f"{found['recompiles']} recompiles")
    for name, alike in ((case.same, True), (case.other, False)):
        if name is not None:
            weights = others.get(name, {}).get("weights_sha256")
            if weights is None:
                odd.append(f"{name} has no weights to compare with")
            elif (weights == found["weights_sha256"]) != alike:
                odd.append(f"the weights of {name}{' are others' if alike else ', which it was to change'}")
    return odd


def activations(arch: str, device: str) -> dict[str, Any]:
    """Memory that forward and backward take above what stays, by mode and number of samples: `per_sample` must hold
    one set of activations however many samples there are."""
    model = random_model(arch, device)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False)
    length = 16 if device == "cpu" else 1024
    found: dict[str, Any] = {"length": length, "gib": {}}
    for mode in ("per_sample", "packed"):
        for count in (2, 8, 8, 2):
            ids = torch.randint(0, 256, (count + 1, length), generator=torch.Generator().manual_seed(1)).tolist()
            turns = [[Segment(ids[0]), Segment(row, sampled=True)] for row in ids[1:]]
            made = [Trajectory(s, advantage=1.0 - i % 2, loss_weight=1e-3) for i, s in enumerate(turns)]
            group = [RolloutGroup(made, SamplingParams())]
            batches = pack(group, max_tokens=1 << 17, mode=mode, check_parity=False)  # type: ignore[arg-type]
            found["gib"].setdefault(f"{mode}, {count} samples", []).append(peak_of(trainer, batches, device))
    if device == "cuda":
        few, many = (max(found["gib"][f"per_sample, {count} samples"][-1:]) for count in (2, 8))
        found["one_set"] = many <= 1.02 * few
    return found


def peak_of(trainer: Trainer, batches: list[Any], device: str) -> float:
    """GiB above those that were taken before; 0 on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    for batch in batches:
        trainer.forward_backward(batch.to(trainer.model.embed.device), loss_type="sft")
    if device == "cpu":
        return 0.0
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def chosen(only: Sequence[str], device: str) -> list[str]:
    processes = torch.cuda.device_count() if device == "cuda" else 2
    fits = [n for n, c in CASES.items() if c.processes <= processes and (device == "cuda" or not c.gpu)]
    return [name for name in [*fits, ACTIVATIONS] if not only or name in only]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="of dense cases; default: tiny on a CPU, qwen3-100m on a GPU")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="default: 540")
    parser.add_argument("--limit", type=float, default=150, metavar="SECONDS", help="of a case; default: 150")
    parser.add_argument("--only", nargs="*", default=[], choices=[*CASES, ACTIVATIONS], metavar="CASE")


def measure(args: argparse.Namespace, report: Report) -> bool:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the case that is at work is ended too
    end = time.monotonic() + args.budget - SPARE_S
    arch = args.arch or ("tiny" if args.device == "cpu" else "qwen3-100m")
    figures = report.figures
    figures |= {"arch": arch, "cases": {}, "wrong": {}}
    names = chosen(args.only, args.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, of in (("dense", arch), *((n, n) for n in {CASES[n].arch for n in names if n in CASES} if n)):
            (folder / name).mkdir()
            seed_workload.prepare(folder / name, of)
        for i, name in enumerate(names):
            left = end - time.monotonic()
            if left < 10:
                figures["wrong"][name] = ["not begun: the budget is spent"]
                continue
            if name == ACTIVATIONS:
                found = figures["cases"][name] = activations(arch, args.device)
                odd = [] if found.get("one_set", True) else [f"more memory for more samples: {found['gib']}"]
            else:
                limit = min(args.limit, left)
                found = figures["cases"][name] = run_case(CASES[name], folder, folder / f"run{i}", args.device, limit)
                odd = wrong(CASES[name], found, figures["cases"])
            if odd:
                figures["wrong"][name] = odd
            print(f"{name}: {'; '.join(odd) or 'holds'}, {found.get('seconds', 0):.1f} s", file=sys.stderr, flush=True)
            report.save()
    rows = [["case", "seconds", "tokens checked", "different", "holds"]]
    for name, found in figures["cases"].items():
        counts = [str(found.get(key, "-")) for key in ("tokens_checked", "tokens_different")]
        holds = "; ".join(figures["wrong"].get(name, [])) or "yes"
        rows.append([name, f"{found.get('seconds', 0):.1f}", *counts, holds])
    report.tables.append(rows)
    return bool(figures["wrong"])
