"""What bitwise parity costs: decode, the train step and the whole RL step of the seed workload, with it and without.

Without means two things, each in a process of its own, and the cost is against the faster one: the same kernels with
nothing compared (`parity off`), and torch's default cuBLAS with its own choice of algorithm, splits of K included, for
every matrix product. Attention stays ours in both: on these shapes it is faster than torch's FlashAttention
(`benchmarks/ops.py`), which reads a shared prompt once for every sample.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from capture import make_compiler, train_batch
from common import arguments, finish, random_model, save, seconds, summary
from generate import CASES, Ours, random_prompts
from seed_workload import ours as rl_steps
from seed_workload import prepare

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.ops import backend, linear_table
from lockstep.trainer import Trainer

MODES = ("parity", "parity off", "library products")
PARTS = ("decode and prefill, 40 sequences", "train step", "RL step")
LIMIT = 1.05
RL_STEPS = 8


def use_the_library() -> None:
    """torch's defaults for every product: nothing here is under the contract any more."""
    backend.configure_cuda = lambda: None  # type: ignore[assignment]
    linear_table.choose = lambda *_: None  # type: ignore[assignment]


def measure(mode: str, arch: str, folder: Path, repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each part."""
    if mode == "library products":
        use_the_library()
    checked = mode == "parity"
    times = parts(arch, checked, repeats, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    count = RL_STEPS if device == "cuda" else 2
    extra = {"verify": "off"} if device == "cuda" else {}
    steps = rl_steps(folder, 0.0, "strict" if checked else "off", extra, count)["step_s"]
    return times | {PARTS[-1]: steps[1:]}


def parts(arch: str, checked: bool, repeats: int, device: str) -> dict[str, list[float]]:
    """A round of generation, and a train step on the same work."""
    model = random_model(arch, device)
    case = CASES["seed, top-p" if device == "cuda" else "cpu"]
    compiler = make_compiler("CUDA graph", model.embed.device)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, compiler=compiler)
    generate = Ours(model, case, random_prompts(case.prompts, lambda: case.prompt))  # weights stay now
    batch = train_batch(model, case.prompts, case.prompt, case.new).to(model.embed.device)
    batch.check_parity = checked

    def train() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(0.0)

    times = {}
    for name, run in zip(PARTS, (generate, train), strict=False):
        run()
        run()
        times[name] = [seconds(run, device) for _ in range(repeats)]
    if compiler:
        compiler.close()
    return times


def in_a_process(mode: str, arch: str, folder: Path, repeats: int, device: str) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum of each part."""
    command = [sys.executable, __file__, "--mode", mode, "--arch", arch, "--folder", str(folder)]
    command += ["--repeats", str(repeats), "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    (folder / "run").rename(folder / f"run {mode}")
    return {part: summary(times) for part, times in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> int:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    arch = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    if args.mode:
        found = measure(args.mode, arch, args.folder, args.repeats, args.device)
        print(json.dumps(found))
        return 0
    figures: dict[str, Any] = {"arch": arch, "modes": {}}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), arch)
        for mode in MODES:
            figures["modes"][mode] = in_a_process(mode, arch, Path(scratch), args.repeats, args.device)
            save("parity_cost", figures, args.json)
    rows = [["part", *(f"{mode}, ms" for mode in MODES), "cost"]]
    figures["cost"] = {}
    for part in PARTS:
        medians = [figures["modes"][mode][part]["median_s"] for mode in MODES]
        figures["cost"][part] = medians[0] / min(medians[1:])
        rows.append([part, *(f"{m * 1e3:.1f}" for m in medians), f"{figures['cost'][part]:.3f}"])
    finish("parity_cost", figures, rows, args.json)
    return int(max(figures["cost"].values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
