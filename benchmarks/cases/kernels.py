"""Where the GPU time goes: the kernels of a decode and of a train step, largest first, replayed as CUDA graphs.

Kernels are put together by what they do, beside the least time that the bytes or FLOPs of it take. Launched
dependently, a kernel's time includes its wait for the one before, so they may add up to more than a step.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from cases.capture import make_runtime, train_batch
from cases.generate import Case, make_engine, random_prompts
from common import Report, first_layers, random_weights, seconds
from ops_common import BYTES_PER_S, FLOPS_PER_S
from torch.profiler import ProfilerActivity, profile

from lockstep.config import LossConfig, OptimizerConfig
from lockstep.generator import Engine
from lockstep.models import Decoder, ModelConfig, num_parameters
from lockstep.trainer import Trainer
from lockstep.types import PackedBatch, SampleIdentity

DECODE = {
    "decode 40": Case(5, 8, 145, 100, 0.8, 0.95),
    "decode 40, T=1": Case(5, 8, 145, 100),
    "decode 256": Case(32, 8, 256, 512),
    "decode 8": Case(1, 8, 145, 100),
    "decode 8, long prompt": Case(1, 8, 4400, 100, 0.8, 0.95),
}
TRAIN = {
    "train step": (5, 145, 100),
    "train step, 17,408 tokens": (4, 256, 512),
}  # prompts of 8 samples, lengths of both
SMALL_TRAIN = {"train step": (1, 20, 8)}
SMALL = {"decode 8": Case(2, 4, 20, 24, 0.8, 0.95)}
DECODE_STEPS, TRAIN_STEPS = 48, 5
GROUPS = {  # by what they do: patterns of kernels' names
    "attention, backward": r"_query_kernel|_key_kernel",
    "attention": r"_attention_kernel|_decode_kernel|_group_kernel|_merge_kernel",
    "drawing": r"_draw_kernel",
    "gradient of the logits": r"_grad_logits",
    "sums of exponentials": r"_block_sums|_fold_sums|_kept_sums|_fold_kept|_scores",
    "top-p": r"_bracket|_tally|_threshold",
    "norms, rotation, cache write": r"_rms_norm|_qk_norm_rope|_write_kv|_sum_partials_kernel",
    "SiLU": r"_silu",
    "AdamW": r"_adamw",
    "gradient norm": r"_square_sums",
    "gradients added up": r"_add_gradient",
    "embedding and its backward": r"_gather_",
    "products, LM head among them": (
        r"_linear_kernel|_async_kernel|_tma_kernel|gemm|nvjet|cutlass|xmma|cublas|addmm|aten::mm|aten::linear"
    ),
}
OTHER = "everything else"
Kernel = tuple[str, float, float]  # name, microseconds a step, launches a step
Found = tuple[list[Kernel], dict[str, float], float]  # kernels, floors by group, microseconds of a step


def kernels(run: Callable[[], int], device: str) -> list[Kernel]:
    """Of every kernel within `run`, which returns how many steps it made; largest first. On a CPU: of operators."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as recorded:
        steps = run()
        if device == "cuda":
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for event in recorded.events():
        if device == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time if device == "cuda" else event.self_cpu_time_total
            launches[event.name] += 1
    order = sorted(spent, key=lambda name: -spent[name])
    return [(name, spent[name] / steps, launches[name] / steps) for name in order]


def decode(model: Decoder, case: Case) -> Found:
    """Of decode steps in the middle of a round, the third after the warm-up, and the floors there; the step is timed a
    round before, without a profiler."""
    engine = make_engine(model, case.sequences, case.prompt + case.new, case.sampling)
    steps, device, step_us = min(DECODE_STEPS, case.new // 2), model.embed.device.type, 0.0
    for call in range(3):
        for group, prompt in enumerate(random_prompts(case.prompts, lambda: case.prompt)):
            engine.add_request(prompt, case.sampling, SampleIdentity(0, 0, call, group))
        while engine.scheduler.waiting or len(engine.scheduler.running) < case.sequences:
            engine.advance()
        advance(engine, (case.new - steps) // 2)
        if call == 1:
            made: list[int] = []
            step_us = 1e6 * seconds(lambda made=made: made.append(advance(engine, steps)), device) / made[0]
        elif call == 2:
            generated = case.new - engine.scheduler.running[0].remaining + steps / 2
            found = kernels(lambda: advance(engine, steps), device)
            advance(engine, case.new)
            return found, decode_floors(model.config, case, generated), step_us
        advance(engine, case.new)
    raise AssertionError


def advance(engine: Engine, steps: int) -> int:
    """Run at least so many decode steps, or all that there are; how many it were."""
    engine.drain()
    before = engine.scheduler.running[0].remaining if engine.scheduler.running else 0
    left = before
    while engine.scheduler.busy and before - left < steps:
        engine.advance()
        if before - left + engine.config.steps_per_sync * (engine.ahead + 1) >= steps:
            engine.drain()
        left = engine.scheduler.running[0].remaining if engine.scheduler.running else 0
    return before - left


def decode_floors(c: ModelConfig, case: Case, generated: float) -> dict[str, float]:
    """Microseconds a step that weights, keys and values, and logits take to be read once for each purpose."""
    rows, logits = case.sequences, 4 * case.sequences * c.vocab_size
    weights = 2 * (num_parameters(c) - (0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size))
    cached = 2 * 2 * c.num_kv_heads * c.head_dim * c.num_layers * (case.prompts * case.prompt + rows * generated)
    projected = c.num_heads * c.head_dim + 2 * c.num_kv_heads * c.head_dim
    bytes_ = {
        "products, LM head among them": weights,
        "attention": cached,
        "drawing": logits,
        "sums of exponentials": logits,
        "top-p": logits if case.top_p < 1 else 0,
        "norms, rotation, cache write": 2 * rows * c.num_layers * (4 * c.hidden_size + 2 * projected),
        "SiLU": 2 * rows * c.num_layers * 3 * c.intermediate_size,
    }
    return {name: 1e6 * size / BYTES_PER_S for name, size in bytes_.items()}


def train(model: Decoder, prompts: int, prompt: int, new: int) -> Found:
    """Of a step: forward, backward, clip and AdamW."""
    device = model.embed.device
    trainer = Trainer(
        model, OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=make_runtime("CUDA graph", device)
    )
    batch = train_batch(model, prompts, prompt, new).to(device)

    def steps(count: int) -> int:
        for _ in range(count):
            trainer.forward_backward(batch)
            trainer.optim_step(1e-6)
        return count

    steps(2)
    step_us = 1e6 * seconds(lambda: steps(TRAIN_STEPS), device.type) / TRAIN_STEPS
    return kernels(lambda: steps(TRAIN_STEPS), device.type), train_floors(model.config, batch), step_us


def train_floors(c: ModelConfig, batch: PackedBatch) -> dict[str, float]:
    """Microseconds a step: three products a weight, one pass over each other tensor for each purpose."""
    tokens, scored = batch.tokens_T.numel(), batch.targets_C.numel()
    layers = num_parameters(c) - c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    lengths = batch.cu_seqlens.diff().double().cpu()
    pairs = float((lengths * (lengths + 1) / 2 + lengths * batch.prefix_len_S.double().cpu()[: len(lengths)]).sum())
    attention = 4 * pairs * c.num_heads * c.head_dim * c.num_layers
    projected = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    flops = {
        "products, LM head among them": 6 * (layers * tokens + c.vocab_size * c.hidden_size * scored),
        "attention": attention,
        "attention, backward": 2.5 * attention,
    }
    bytes_ = {
        "AdamW": 34 * num_parameters(c),
        "gradient norm": 4 * num_parameters(c),
        "gradients added up": 10 * num_parameters(c),
        "sums of exponentials": 4 * scored * c.vocab_size,
        "top-p": 4 * scored * c.vocab_size,
        "gradient of the logits": 6 * scored * c.vocab_size,
        "norms, rotation, cache write": 2 * tokens * c.num_layers * (5 * 2 * c.hidden_size + 5 * projected),
        "SiLU": 2 * tokens * c.num_layers * 8 * c.intermediate_size,
        "embedding and its backward": 2 * c.vocab_size * c.hidden_size,
    }
    floors = {name: 1e6 * work / FLOPS_PER_S for name, work in flops.items()}
    return floors | {name: 1e6 * size / BYTES_PER_S for name, size in bytes_.items()}


def group_of(kernel: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, kernel)), OTHER)


def grouped(found: list[Kernel], floors: dict[str, float]) -> list[dict[str, Any]]:
    """Largest first."""
    groups: dict[str, dict[str, Any]] = {}
    for name, us, launches in found:
        g = groups.setdefault(group_of(name), {"us": 0.0, "launches": 0.0})
        g["us"] += us
        g["launches"] += launches
    order = sorted(groups, key=lambda name: -groups[name]["us"])
    return [{"what": name, **groups[name], "floor_us": floors.get(name)} for name in order]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--layers", type=int, help="the first ones alone (default: all)")
    parser.add_argument("--only", nargs="*", help="parts by name (default: all)")
    parser.add_argument("--top", type=int, default=10, help="kernels shown of each (default: 10)")


def measure(args: argparse.Namespace, report: Report) -> None:
    on_cpu = args.device == "cpu"
    arch = args.arch or ("tiny" if on_cpu else "qwen3-0.6b")
    model = random_weights(first_layers(arch, args.layers), args.device)
    parts: dict[str, Callable[[], Found]] = {
        n: (lambda case=case: decode(model, case)) for n, case in (SMALL if on_cpu else DECODE).items()
    }
    for name, sizes in (SMALL_TRAIN if on_cpu else TRAIN).items():
        parts[name] = lambda sizes=sizes: train(model, *sizes)
    report.figures |= {"arch": arch, "layers": model.config.num_layers}
    rows = [["part", "kernel", "us a step", "launches", "floor us"]]
    for part, run in parts.items():
        if args.only and part not in args.only:
            continue
        found, floors, step_us = run()
        groups = grouped(found, floors)
        report.figures[part] = {
            "step_us": step_us,
            "groups": groups,
            "kernels": [{"kernel": n, "us": us, "launches": count, "what": group_of(n)} for n, us, count in found[:40]],
        }
        rows.append([part, "THE STEP", f"{step_us:.0f}", "", ""])
        rows.append([part, "ALL", f"{sum(us for _, us, _ in found):.0f}", f"{sum(n for *_, n in found):.0f}", ""])
        for g in groups:
            floor = "" if g["floor_us"] is None else f"{g['floor_us']:.0f}"
            rows.append([part, g["what"].upper(), f"{g['us']:.0f}", f"{g['launches']:.0f}", floor])
        rows += [[part, n[:70], f"{us:.0f}", f"{count:.0f}", ""] for n, us, count in found[: args.top]]
        report.save()
    report.tables.append(rows)
