"""A mixture of experts: grouped products beside torch's, and a train and a decode step beside their floors.

Layers are Qwen3-30B-A3B's, the depth is what one GPU trains. Grouped products are timed in CUDA graphs, on rows sorted
by expert, each token's eight experts drawn evenly and unevenly. The floor of a decode step is reading the weights that
one token reaches, once, and all keys and values; beside it stands what tokens would read that draw their experts
evenly, which samples of one prompt do not. Of a train step it is the products of the weights that a token uses.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from cases.generate import Case, Ours, random_prompts
from cases.growth import measured
from cases.train_step import Ours as TrainStep
from cases.train_step import groups
from common import Report, random_weights
from ops_common import BYTES_PER_S, DEVICE, FLOPS_PER_S, ON_GPU, Bench, error, normal
from torch import Tensor

from lockstep import ops
from lockstep.models import ModelConfig, num_parameters
from lockstep.models.init import architecture

ARCH = "qwen3-30b-a3b" if ON_GPU else "tiny-qwen3-moe"
TOKENS = (64, 1024, 9800) if ON_GPU else (8, 40)
DECODE = {
    "decode 40": Case(5, 8, 145, 100, 0.8, 0.95),
    "decode 256": Case(32, 8, 256, 256),
}
SMALL = {"decode 8": Case(2, 4, 20, 12, 0.8, 0.95)}
SEQUENCES, LENGTH, PROMPT = (40, 245, 145) if ON_GPU else (8, 32, 16)


def grouped(bench: Bench, c: ModelConfig) -> None:
    """Products of gate and up, and of down, against torch's grouped product."""
    assert c.moe is not None
    wide = c.moe.intermediate_size
    shapes = {"gate and up": (2 * wide, c.hidden_size), "down": (c.hidden_size, wide)}
    for tokens in TOKENS:
        for spread, power in (("even", 1), ("uneven", 3)):
            experts = torch.rand(tokens, c.moe.num_experts, device=DEVICE).pow(power)
            experts = (experts * torch.linspace(1, 1 / power, c.moe.num_experts, device=DEVICE)).topk(
                c.moe.num_experts_per_token
            )
            order, _, offsets = ops.dispatch_plan(experts.indices, c.moe.num_experts)
            for name, (columns, depth) in shapes.items():
                x = normal(len(order), depth)
                weight = normal(c.moe.num_experts, columns, depth, scale=depth**-0.5)
                grouped_case(bench, f"{tokens} tokens, {spread}, {name}", x, weight, offsets)


def grouped_case(bench: Bench, case: str, x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    ends, transposed = offsets[1:].contiguous(), weight.transpose(1, 2)
    theirs_of = getattr(F, "grouped_mm", None) or torch._grouped_mm
    others = {}
    if ON_GPU:
        others["torch"] = bench.time([lambda: theirs_of(x, transposed, offs=ends)])
    touched = int((offsets.diff() > 0).sum())
    moved = x.element_size() * (x.numel() + touched * weight[0].numel() + len(x) * weight.shape[1])
    first = int(offsets.diff().argmax())
    rows = slice(int(offsets[first]), int(offsets[first + 1]))
    exact = x[rows].double() @ weight[first].double().t()
    errors = {"error": error(ops.grouped_linear(x, weight, offsets)[rows], exact)}
    if ON_GPU:
        errors["torch_error"] = error(theirs_of(x, transposed, offs=ends)[rows], exact)
    ours = bench.time([lambda: ops.grouped_linear(x, weight, offsets)])
    bench.add("grouped product", case, ours, others, moved, 2 * len(x) * weight[0].numel(), **errors)


def reached(c: ModelConfig, tokens: int) -> float:
    """Weights of the layers that some of so many tokens use, each drawing its experts evenly."""
    assert c.moe is not None
    expert = 3 * c.hidden_size * c.moe.intermediate_size
    of_all = num_parameters(c) - (1 if c.tie_word_embeddings else 2) * c.vocab_size * c.hidden_size
    share = 1 - (1 - c.moe.num_experts_per_token / c.moe.num_experts) ** tokens
    return of_all - c.moe_layers * c.moe.num_experts * expert * (1 - share)


def decode_floor_s(c: ModelConfig, case: Case, tokens: int) -> float:
    """Of all decode steps of a round, if a step reaches the experts that so many tokens do."""
    weights = 2 * (reached(c, tokens) + c.vocab_size * c.hidden_size)
    token = 2 * 2 * c.num_kv_heads * c.head_dim * c.num_layers
    own = case.sequences * case.new * (case.new - 1) / 2
    return (case.new * weights + token * (case.new * case.prompts * case.prompt + own)) / BYTES_PER_S


def train_floor_s(c: ModelConfig, packed: int, scored: int) -> float:
    """Products of forward and backward, and AdamW's bytes, which dwarf those of a dense model of this speed."""
    flops = 6 * (reached(c, 1) * packed + c.vocab_size * c.hidden_size * scored)
    return flops / FLOPS_PER_S + 38 * num_parameters(c) / BYTES_PER_S


def decode(c: ModelConfig, case: Case, repeats: int) -> dict[str, Any]:
    model = random_weights(c, DEVICE)
    run = Ours(model, case, random_prompts(case.prompts, lambda: case.prompt))
    found = measured(run, repeats, DEVICE)
    floors = {"floor_s": decode_floor_s(c, case, 1), "even_s": decode_floor_s(c, case, case.sequences)}
    return {**vars(case), **found, **floors, "tokens": case.sequences * case.new}


def train(c: ModelConfig, repeats: int) -> dict[str, Any]:
    tokens = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[:, :PROMPT] = tokens[::8, :PROMPT].repeat_interleave(8, 0)[:SEQUENCES]
    scored = SEQUENCES * (LENGTH - PROMPT)
    packed = SEQUENCES // 8 * PROMPT + scored - SEQUENCES
    found = measured(TrainStep(random_weights(c, DEVICE), groups(tokens, 8, PROMPT)), repeats, DEVICE)
    return {"packed": packed, "tokens": tokens.numel(), **found, "floor_s": train_floor_s(c, packed, scored)}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=4 if ON_GPU else 2)


def measure(args: argparse.Namespace, report: Report) -> None:
    torch.manual_seed(0)
    c = replace(architecture(ARCH), num_layers=args.layers, eos_token_ids=())
    bench = Bench(args.repeats)
    report.figures |= {"arch": ARCH, "layers": args.layers, "records": bench.records, "steps": {}}
    grouped(bench, c)
    report.save()
    work = {n: (lambda case=case: decode(c, case, args.repeats)) for n, case in (DECODE if ON_GPU else SMALL).items()}
    work["train step"] = lambda: train(c, args.repeats)
    rows = [["step", "tok/s", "median ms", "min", "max", "floor ms", "peak GiB"]]
    for name, run in work.items():
        f = report.figures["steps"][name] = run()
        shown = [f"{f[k] * 1e3:.1f}" for k in ("median_s", "min_s", "max_s", "floor_s")]
        peak = "-" if f["peak_gib"] is None else f"{f['peak_gib']:.1f}"
        rows.append([name, f"{f['tokens'] / f['median_s']:,.0f}", *shown, peak])
        report.save()
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    report.tables += [bench.table(), rows]
