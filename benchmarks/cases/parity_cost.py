"""What bitwise parity costs: decode, the train step and the whole RL step of the seed workload, with it and without.

Without means two things, each in a process of its own, and the cost is against the faster one: the same kernels with
nothing compared (`parity off`), and torch's default cuBLAS with its own choice of algorithm, splits of K included, for
every matrix product. Attention stays ours in both. What a library's could save is measured apart: cuDNN's and
FlashAttention-2's on the train step's sequences, each with its own copy of the prompt, which is how they take them.
Where one is faster than ours with its shared prompts, the difference over all layers is taken off the time without
parity.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
from cases.capture import make_runtime, train_batch
from cases.generate import CASES, Ours, random_prompts
from cases.seed_workload import ours as rl_steps
from cases.seed_workload import prepare
from common import Report, graph_us, in_a_process, random_model, seconds, summary
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.models.init import architecture
from lockstep.ops import Packed, attention_packed
from lockstep.ops.linear import choice as linear_choice
from lockstep.ops.linear import cublas
from lockstep.trainer import Trainer

MODES = ("parity", "parity off", "library products")
PARTS = ("decode and prefill, 40 sequences", "train step", "RL step")
ATTENTION = "attention"
TRAINED = PARTS[1:]  # parts with one backward pass
LIMIT = 1.05
RL_STEPS = 8
LIBRARIES = {
    "cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION},
    "cpu": {"torch": SDPBackend.MATH},
}


def use_the_library() -> None:
    """torch's defaults for every product: nothing here is under the contract any more."""
    cublas.configure_cuda = lambda: None  # type: ignore[assignment]
    linear_choice.choose = lambda *_, **__: linear_choice.LIBRARY  # type: ignore[assignment]


def attention_times(arch: str, repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of forward and backward in all layers: ours with shared prompts, and the libraries' without."""
    c, case = architecture(arch), CASES["seed, top-p" if device == "cuda" else "cpu"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    prompt, length = case.prompt, case.prompt + case.new
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)

    def leaves(*shape: int) -> list[torch.Tensor]:
        made = (torch.randn(*shape[:-1], n, shape[-1], c.head_dim, device=device) for n in heads)
        return [x.to(dtype).requires_grad_() for x in made]

    own = [prompt, *[case.new] * case.samples] * case.prompts
    starts = [
        g * (prompt + case.samples * case.new) * bool(i) for g in range(case.prompts) for i in range(1 + case.samples)
    ]
    prefixes = [0, *[prompt] * case.samples] * case.prompts
    layout = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, *accumulate(own)], starts, prefixes)]
    packed = [x.detach().transpose(0, 1).contiguous().requires_grad_() for x in leaves(sum(own))]
    batched = leaves(case.sequences, length)

    def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    def library(kernel: SDPBackend) -> None:
        with sdpa_kernel(kernel):
            out = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=True)
            gradients(out, batched)

    runs = {"ours": lambda: gradients(attention_packed(*packed, Packed(*layout, length)), packed)}
    for name, kernel in LIBRARIES[device].items():
        runs[name] = lambda kernel=kernel: library(kernel)
    for run in runs.values():
        run()
    graphed = (lambda run: graph_us(run) / 1e6) if device == "cuda" else (lambda run: seconds(run, device))
    return {name: [c.num_layers * graphed(run) for _ in range(repeats)] for name, run in runs.items()}


def part(mode: str, arch: str, folder: str, repeats: str, device: str) -> dict[str, list[float]]:
    """Seconds of each part."""
    if mode == ATTENTION:
        return attention_times(arch, int(repeats), device)
    if mode == "library products":
        use_the_library()
    checked = mode == "parity"
    times = parts(arch, checked, int(repeats), device)
    if device == "cuda":
        torch.cuda.empty_cache()
    count = RL_STEPS if device == "cuda" else 2
    extra = {"verify": "off"} if device == "cuda" else {}
    steps = rl_steps(Path(folder), 0.0, "strict" if checked else "off", extra, count)["step_s"]
    return times | {PARTS[-1]: steps[1:]}


def parts(arch: str, checked: bool, repeats: int, device: str) -> dict[str, list[float]]:
    """A round of generation, and a train step on the same work."""
    model = random_model(arch, device)
    case = CASES["seed, top-p" if device == "cuda" else "cpu"]
    runtime = make_runtime("CUDA graph", model.embed.device)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=runtime)
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
    runtime.close()
    return times


def medians_of(mode: str, args: argparse.Namespace, arch: str, folder: Path) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum of each part, of a process of its own."""
    found = in_a_process("parity_cost", mode, arch, folder, args.repeats, args.device)
    if (folder / "run").exists():
        (folder / "run").rename(folder / f"run {mode}")
    return {part: summary(times) for part, times in found.items()}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")


def measure(args: argparse.Namespace, report: Report) -> bool:
    arch = args.arch or ("tiny" if args.device == "cpu" else "qwen3-0.6b")
    figures = report.figures
    figures |= {"arch": arch, "modes": {}}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch), arch)
        for mode in MODES:
            figures["modes"][mode] = medians_of(mode, args, arch, Path(scratch))
            report.save()
        figures[ATTENTION] = medians_of(ATTENTION, args, arch, Path(scratch))
    taken = {name: s["median_s"] for name, s in figures[ATTENTION].items()}
    saved = figures["saved_by_a_library_s"] = max(0.0, taken["ours"] - min(taken.values()))
    rows = [["part", *(f"{mode}, ms" for mode in MODES), "cost"]]
    figures["cost"] = {}
    for part in PARTS:
        medians = [figures["modes"][mode][part]["median_s"] for mode in MODES]
        figures["cost"][part] = medians[0] / (min(medians[1:]) - (saved if part in TRAINED else 0.0))
        rows.append([part, *(f"{m * 1e3:.1f}" for m in medians), f"{figures['cost'][part]:.3f}"])
    report.tables.append(rows)
    report.notes.append("attention in all layers, ms: " + ", ".join(f"{n} {1e3 * s:.2f}" for n, s in taken.items()))
    return max(figures["cost"].values()) > LIMIT
