"""The published headline, rebuilt: ten GRPO steps of a Qwen3-0.6B with random weights, beside TRL on the same prompts.

Each step: 5 prompts of 145 tokens, 8 samples of exactly 100 tokens (temperature 0.8, top-p 0.95), one AdamW update on
all of them. Random weights answer nothing right, so the reward is 0 or 1 drawn from the text, and every group trains.
Every system runs in a process of its own from a model folder on disk; start-up is all that comes before the first step,
imports included, and the total ends with the last step. The export of the model, which lockstep alone makes, is told
apart (`export_s`). TRL, with transformers' generation or with vLLM in the same process, holds its weights and optimizer
state in bfloat16, lockstep its masters in float32; TRL's generate and train are not told apart, so only its total over
the steps stands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from common import Report

    from lockstep.config import RunConfig

Parity = Literal["strict", "warn", "off"]
STEPS, PROMPTS, SAMPLES = 10, 5, 8
PROMPT_TOKENS, NEW_TOKENS = 145, 100
SEED = 42
PUBLISHED = (  # system, hardware, start-up, generate, train, total in seconds, as published; its command used 6 GPUs
    ("TitanRL, no compile (published)", "6-8 H100", 24.3, 262.4, 157.0, 446.0),
    ("TitanRL, CUDA graphs, shared compile (published)", "6-8 H100", 47.9, 5.4, 17.1, 70.4),
)


def coin(completions: list[str], **_: Any) -> list[float]:
    """Heads or tails, a function of the text."""
    return [float(zlib.crc32(text.encode()) & 1) for text in completions]


def prompts() -> list[str]:
    """Ends of SumDigits prompts, one token a character under the byte-level tokenizer."""
    from lockstep.environments.tasks.sum_digits import SumDigits

    task = SumDigits(SEED, 99, 0, easy=False)
    return [str(task.train_problem(s, g).prompt)[-PROMPT_TOKENS:] for s in range(STEPS) for g in range(PROMPTS)]


def prepare(folder: Path, arch: str) -> None:
    """A random model folder, the prompts, and nothing that is timed."""
    import torch
    from common import random_model

    from lockstep.models import save_model
    from lockstep.models.tokenizer import byte_tokenizer, save_tokenizer

    save_model(random_model(arch, "cuda" if torch.cuda.is_available() else "cpu"), folder / "model")
    save_tokenizer(byte_tokenizer(), folder / "model")
    rows = [json.dumps({"prompt": prompt}) for prompt in prompts()]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")


def configuration(folder: Path, parity: Parity, extra: dict[str, Any], count: int) -> RunConfig:
    """The run on the folder; `extra` are fields of its compile section."""
    from lockstep.config import (
        CompileConfig,
        LossConfig,
        OptimizerConfig,
        RunConfig,
        SamplingConfig,
        TaskConfig,
        TrainerConfig,
    )

    return RunConfig(
        recipe="dataset",
        model=str(folder / "model"),
        steps=count,
        seed=SEED,
        parity=parity,
        task=TaskConfig(
            name="dataset",
            data=str(folder / "prompts.jsonl"),
            reward=(f"{Path(__file__).resolve()}:coin",),
            validation_prompts=0,
        ),
        sampling=SamplingConfig(
            num_generations=SAMPLES, max_completion_length=NEW_TOKENS, temperature=0.8, top_p=0.95, ignore_eos=True
        ),
        trainer=TrainerConfig(prompts_per_step=PROMPTS, skip_zero_variance=False),
        loss=LossConfig(loss_type="grpo", epsilon=0.2),
        optimizer=OptimizerConfig(learning_rate=2e-6, weight_decay=0.1, warmup_steps=2),
        compile=CompileConfig(**extra),
    )


def ours(folder: Path, began: float, parity: Parity, extra: dict[str, Any], count: int) -> dict[str, Any]:
    """`lockstep train` on the folder, run folder and report included."""
    from lockstep import train

    summary = train(configuration(folder, parity, extra, count), folder / "run")
    ended = time.time()
    from lockstep.run.timeline import TIMELINE_FILE, read_timeline

    spans = read_timeline(folder / "run" / TIMELINE_FILE)
    export = sum(span.seconds for _, span in spans if span.name == "save_model")
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    certificate = json.loads((folder / "run" / "parity.json").read_text())
    spent = sum(s["time/step"] for s in steps)
    return {
        "startup_s": ended - began - spent - export,
        "startup": {k.removeprefix("startup/"): v for k, v in summary.items() if k.startswith("startup/")},
        "generate_s": summary["generator_s"],
        "train_s": summary["trainer_s"],
        "sync_s": summary["sync_s"],
        "steps_s": spent,
        "total_s": ended - began - export,
        "export_s": export,
        "step_s": [s["time/step"] for s in steps],
        "recompiles": [s["recompiles"] for s in steps],
        "replays": {k: v for k, v in steps[-1].items() if k.startswith("graph_replays/")},
        "compile": summary.get("compile", {}),
        "peak_gib": steps[-1]["memory/peak_gib"],
        "certificate": certificate,
    }


def generation(vllm: bool) -> dict[str, Any]:
    """TRL's fields for completions of exactly so many tokens."""
    if not vllm:
        return {"generation_kwargs": {"min_new_tokens": NEW_TOKENS}}
    length = {"vllm_max_model_length": PROMPT_TOKENS + NEW_TOKENS + 1, "vllm_gpu_memory_utilization": 0.3}
    forced = {"min_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"use_vllm": True, "vllm_mode": "colocate", **length, "generation_kwargs": forced}


def trl(folder: Path, began: float, vllm: bool) -> dict[str, Any]:
    """TRL's GRPOTrainer, the fastest settings that fit the same work."""
    if vllm:
        import peer_vllm

        os.environ.update(peer_vllm.SETTINGS)
    import datasets
    import torch
    import transformers
    import trl as library

    class Clock(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.time())

    clock = Clock()
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    args = library.GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=NEW_TOKENS,
        **generation(vllm),
        temperature=0.8,
        top_p=0.95,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="none",
        learning_rate=2e-6,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        warmup_steps=2,
        lr_scheduler_type="constant_with_warmup",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "bfloat16"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        seed=SEED,
    )
    trainer = library.GRPOTrainer(
        model=str(folder / "model"),
        args=args,
        reward_funcs=coin,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    steps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    assert len(steps) == STEPS
    return {
        "startup_s": clock.ends[0] - began,
        "steps_s": sum(steps),
        "total_s": clock.ends[-1] - began,
        "step_s": steps,
        "version": library.__version__,
    }


def part(name: str, folder: str, parity: Parity, extra: str, count: str, began: str) -> dict[str, Any]:
    """The figures of one system; `extra` are fields of lockstep's compile section, as JSON."""
    if name == "lockstep":
        return ours(Path(folder), float(began), parity, json.loads(extra), int(count))
    return trl(Path(folder), float(began), name == "trl-vllm")


def run_system(name: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The system in a fresh process; its figures."""
    from common import in_a_process, peer_environment

    environment = None if name == "lockstep" else peer_environment()
    given = name, folder, args.parity, args.compile, args.steps, repr(time.time())
    try:
        return in_a_process("seed_workload", *given, environment=environment)
    except subprocess.CalledProcessError as failed:
        return {"failed": f"exit code {failed.returncode}"}


def row(name: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [name, "FAILED", "", "", "", "", ""]
    cells = [f.get(k) for k in ("startup_s", "generate_s", "train_s", "sync_s", "total_s")]
    later = statistics.median(f["step_s"][1:])
    return [name, *("-" if c is None else f"{c:.2f}" for c in cells), f"{later * 1e3:.0f}"]


def split(f: dict[str, Any]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in f["startup"].items())


def floor_s(arch: str) -> dict[str, float]:
    """Seconds that no run of all steps can be below here: the bytes of decoding at the bandwidth of a plain sum, and
    the matrix products of prefill and training, prompts once, at the rate of a large one. Attention and the update
    are not in it."""
    import torch
    from cases.generate import Case, decode_bytes
    from common import bandwidth, product_rate

    from lockstep.models import num_parameters
    from lockstep.models.init import architecture

    c = architecture(arch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rate = product_rate(device, dtype)
    head = c.vocab_size * c.hidden_size
    layers = num_parameters(c) - head * (1 if c.tie_word_embeddings else 2)
    prompt, completions = PROMPTS * PROMPT_TOKENS, PROMPTS * SAMPLES * NEW_TOKENS
    train = 6 * (layers * (prompt + completions - PROMPTS * SAMPLES) + head * completions)
    case = Case(PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS)
    decode = decode_bytes(c, case, torch.empty(0, dtype=dtype).element_size()) / bandwidth(device)
    return {"generate_s": STEPS * (decode + 2 * layers * prompt / rate), "train_s": STEPS * train / rate}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="qwen3-0.6b")
    parser.add_argument("--peer", choices=["trl", "trl-vllm", "none"], default="none",
                        help="trl-vllm: TRL both ways")  # fmt: skip
    parser.add_argument("--parity", choices=["strict", "warn", "off"], default="strict")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of ours (default: {STEPS})")
    parser.add_argument("--runs", type=int, default=1, help="fresh processes of ours (default: 1)")
    parser.add_argument("--compile", default="{}", help="fields of the compile section, as JSON")


def measure(args: argparse.Namespace, report: Report) -> bool:
    figures = report.figures
    figures |= {"arch": args.arch, "systems": {}, "published": [list(p) for p in PUBLISHED]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, args.arch)
        for i in range(args.runs):
            figures["systems"][f"lockstep, run {i + 1}"] = run_system("lockstep", folder, args)
            _move_aside(folder, i)
            report.save()
        if args.peer != "none":
            figures["systems"]["TRL, transformers generation"] = run_system("trl", folder, args)
            report.save()
        if args.peer == "trl-vllm":
            figures["systems"]["TRL, vLLM generation"] = run_system("trl-vllm", folder, args)
            report.save()
    floor = floor_s(args.arch)
    figures |= {"floor": floor, "floor_s": sum(floor.values())}
    rows = [["system", "start-up s", "generate s", "train s", "sync s", "total s", "later step ms"]]
    rows += [row(name, f) for name, f in figures["systems"].items()]
    parts = [f"{seconds:.2f}" for seconds in floor.values()]
    rows.append(["floor (bytes of decoding, products)", "-", *parts, "-", f"{figures['floor_s']:.2f}", ""])
    report.tables.append(rows)
    for name, f in figures["systems"].items():
        if c := f.get("certificate"):
            checked = f"{c['tokens_different']} of {c['tokens_checked']} tokens different"
            report.notes.append(f"{name}: {checked}; start-up {split(f)}")
            counts = f"recompiles {f['recompiles'][-1]}, replays {f['replays']}"
            report.notes.append(f"  {counts}, peak {f['peak_gib']:.1f} GiB")
    return any("failed" in f for f in figures["systems"].values())


def _move_aside(folder: Path, i: int) -> None:
    if (folder / "run").exists():
        (folder / "run").rename(folder / f"run{i}")
