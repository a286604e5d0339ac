"""One training step (forward, loss, backward, clip, AdamW) beside transformers' on the same tokens, eager and compiled.

Both train on all tokens of equal-length sequences: ours packs each as a one-token prompt and its completion. A second
row of ours is what an RL step needs of the same sequences: each prompt of eight once, and the LM head on completions.
The peers hold weights in the compute dtype and do not clip; ours holds float32 masters and clips. On a GPU ours runs
as CUDA graphs. The floors are the matrix products of forward and backward alone.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from common import Report, alternate, random_model, summary

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import EAGER, Runtime
from lockstep.models import Decoder, save_model
from lockstep.trainer import Trainer, batch_shapes, pack
from lockstep.types import RolloutGroup, SamplingParams, Segment, Trajectory

LEARNING_RATE = 1e-6
MAX_TOKENS = 1 << 17  # of a micro-batch


def groups(tokens: torch.Tensor, shared: int, prompt: int) -> list[RolloutGroup]:
    """Rows as a prompt and its completion; with `shared` > 1 so many follow one prompt."""
    rows = tokens.tolist()
    cut = prompt if shared > 1 else 1
    weight = 1.0 / (len(rows) * (len(rows[0]) - cut))
    made = []
    for i in range(0, len(rows), shared):
        prompt, turns = Segment(rows[i][:cut]), [Segment(row[cut:], sampled=True) for row in rows[i : i + shared]]
        made.append(
            RolloutGroup([Trajectory([prompt, t], advantage=1.0, loss_weight=weight) for t in turns], SamplingParams())
        )
    return made


class Ours:
    """Packing included; batches are padded to the shapes of a run of such sequences."""

    def __init__(self, model: Decoder, made: list[RolloutGroup]) -> None:
        self.device = model.embed.device
        on_gpu = self.device.type == "cuda"
        runtime = Runtime(CompileConfig("step", cudagraph_mode="full"), self.device) if on_gpu else EAGER
        self.trainer = Trainer(model, OptimizerConfig(learning_rate=LEARNING_RATE), LossConfig(), runtime=runtime)
        self.groups = made
        prompt, completion = len(made[0].prompt_ids), len(made[0].rollouts[0].token_ids)
        bounds = {"max_len": prompt + completion, "max_tokens": MAX_TOKENS}
        self.shapes = batch_shapes(len(made), len(made[0].rollouts), prompt, completion, **bounds)

    def __call__(self) -> None:
        for batch in pack(self.groups, max_tokens=MAX_TOKENS, check_parity=False, shapes=self.shapes):
            self.trainer.forward_backward(batch.to(self.device), loss_type="sft")
        result = self.trainer.optim_step(LEARNING_RATE)
        assert result.applied


class Transformers:
    """The step as its users write it: sdpa attention, fused AdamW, and `torch.compile` of the model if asked for, with
    static shapes."""

    def __init__(self, model: Decoder, tokens: torch.Tensor, compiled: bool = False) -> None:
        import transformers

        with tempfile.TemporaryDirectory() as folder:
            save_model(model, Path(folder))
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.embed.dtype)
        self.model = loaded.to(model.embed.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.tokens = tokens.to(model.embed.device)
        self.forward = torch.compile(self.model, dynamic=False) if compiled else self.model

    def __call__(self) -> None:
        loss = self.forward(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def floor(model: Decoder, tokens: int, logit_rows: int):
    """Matrix products of forward and backward: three a weight."""
    layers = [w for layer in model.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    pairs = [(w.detach(), tokens) for w in layers] + [(model.lm_head.detach(), logit_rows)]
    sizes = {(rows, w.shape[1]) for w, rows in pairs}
    inputs = {size: torch.randn(size, dtype=model.embed.dtype, device=model.embed.device) for size in sizes}
    work = [(w, inputs[rows, w.shape[1]]) for w, rows in pairs]

    def run() -> None:
        for weight, x in work:
            out = torch.nn.functional.linear(x, weight)
            torch.mm(out, weight)
            torch.mm(out.t(), x)

    return run


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--sequences", type=int, help="default: 32 on a CPU, 40 on a GPU")
    parser.add_argument("--length", type=int, help="default: 128 on a CPU, 245 on a GPU")
    parser.add_argument("--prompt", type=int, help="shared by eight; default: 64 on a CPU, 145 on a GPU")
    parser.add_argument("--peer", choices=["transformers", "eager", "none"], default="transformers",
                        help="transformers: eager and compiled (default)")  # fmt: skip


def measure(args: argparse.Namespace, report: Report) -> None:
    on_cpu = args.device == "cpu"
    count, length = args.sequences or (32 if on_cpu else 40), args.length or (128 if on_cpu else 245)
    prompt = args.prompt or (64 if on_cpu else 145)
    arch = args.arch or ("tiny" if on_cpu else "qwen3-0.6b")

    def fresh() -> Decoder:
        return random_model(arch, args.device)

    tokens = torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(1))
    tokens[:, :prompt] = tokens[::8, :prompt].repeat_interleave(8, 0)[:count]
    completions = count * (length - prompt)
    packed = count // 8 * prompt + completions - count
    runs = {
        "lockstep, all tokens": Ours(fresh(), groups(tokens, 1, prompt)),
        "lockstep, the RL step's work": Ours(fresh(), groups(tokens, 8, prompt)),
        "floor, all tokens": floor(fresh(), count * length, count * length),
        "floor, the RL step's work": floor(fresh(), packed, completions),
    }
    if args.peer != "none":
        runs["transformers, eager"] = Transformers(fresh(), tokens)
    if args.peer == "transformers":
        runs["transformers, compiled"] = Transformers(fresh(), tokens, compiled=True)
    times = alternate(runs, args.repeats, args.device)
    systems = {name: summary(measured) for name, measured in times.items()}
    report.figures |= {"arch": arch, "sequences": count, "length": length, "systems": systems}
    rows = [["system", "tok/s", "median ms", "min", "max"]]
    for name, s in systems.items():
        rate = count * length / s["median_s"]
        rows.append([name, f"{rate:,.0f}", *(f"{s[k] * 1e3:.1f}" for k in ("median_s", "min_s", "max_s"))])
    report.tables.append(rows)
