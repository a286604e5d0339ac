"""The policy step under every way to capture and run it: what it costs, and what of it is eager's bit for bit.

Times are of one forward and backward pass (the seed workload's: groups of 8 share a prompt) and of the update. `s to
first` is the first step, tracing and compiling included. Log-probabilities must be equal everywhere, and gradients
where Inductor has no part; where it has, the table gives how far they are from eager's, in norm, and a second run must
give the same bits. On a CPU the fake recorder stands in for CUDA graphs, and its times mean nothing. The exit code is 1
when something differs that must not, or a way failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
import traceback
from typing import Any, NamedTuple

import torch
from cases.capture import Memory, runtime_of, timed, train_batch
from common import Report, random_model
from torch import Tensor

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.graph.check.tolerance import BOUNDS, relative_error
from lockstep.models import Decoder
from lockstep.trainer import Trainer
from lockstep.types import PackedBatch

WAYS: dict[str, CompileConfig | None] = {
    "eager": None,
    "step": CompileConfig("step", "none"),
    "step, CUDA graph": CompileConfig("step", "full"),
    "joint": CompileConfig("joint", "none"),
    "joint, CUDA graph": CompileConfig("joint", "full"),
    "step, inductor": CompileConfig("step", "none", backend="inductor"),
    "step, inductor, CUDA graph": CompileConfig("step", "full", backend="inductor"),
    "joint, inductor, CUDA graph": CompileConfig("joint", "full", backend="inductor"),
    "layer": CompileConfig("layer", "none"),
    "layer, inductor": CompileConfig("layer", "none", backend="inductor"),
}


class Evidence(NamedTuple):
    """What one step left behind: a hash of both log-probabilities, the gradients."""

    logprobs: int
    gradient: Tensor


def one_step(trainer: Trainer, batch: PackedBatch) -> Evidence:
    """Gradients from zero, and an update of rate 0."""
    scored = trainer.programs.launch("forward_backward", batch, loss_type="grpo", with_support=False)
    evidence = Evidence(
        int(fingerprint(torch.cat((scored["logprob_C"], scored["model_logprob_C"])))),
        trainer.flat.grad.to("cpu", copy=True),
    )
    trainer.optim_step(0.0)
    return evidence


def timed_way(way: str, source: Decoder, batch: PackedBatch, repeats: int) -> tuple[Evidence, dict[str, Any]]:
    """What the first step left behind, and the figures of the way."""
    device = source.embed.device
    runtime = runtime_of(WAYS[way], device)
    with Memory(device) as memory:
        trainer = Trainer(copy.deepcopy(source), OptimizerConfig(), LossConfig(), enforce_parity=False, runtime=runtime)
        began = time.perf_counter()
        first = one_step(trainer, batch)
        figures: dict[str, Any] = {"first_step_s": time.perf_counter() - began}
        again = one_step(trainer, batch)
        figures["repeats"] = again.logprobs == first.logprobs and torch.equal(again.gradient, first.gradient)
        figures["forward_backward"] = timed(lambda: trainer.forward_backward(batch), repeats, device)
        figures["optim_step"] = timed(lambda: trainer.launch_optim_step(0.0), repeats, device)
    figures |= memory.figures
    if runtime.compiles:
        figures["passes"] = {title: list(log) for title, log in runtime.builder.logs.items()}
        figures["seconds"], figures["compiled"] = dict(runtime.timings.seconds), runtime.captures
        runtime.close()
    return first, figures


def judge(way: str, found: Evidence, eager: Evidence, dtype: torch.dtype) -> dict[str, Any]:
    """How a way compares with eager, and whether that is as it must be."""
    config = WAYS[way]
    same = torch.equal(found.gradient, eager.gradient)
    error = 0.0 if same else relative_error(found.gradient, eager.gradient)
    free = config is not None and config.backend == "inductor"
    logprobs = found.logprobs == eager.logprobs
    return {
        "logprobs_equal": logprobs,
        "gradient_error": error,
        "holds": logprobs and (same or (free and error <= BOUNDS[dtype])),
    }


def row(way: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [way, "FAILED", f["failed"][:70], "", "", "", "", "", ""]
    peak = f"{f.get('peak_gib', 0):.1f}/{f.get('reserved_gib', 0):.1f}"
    passed = "yes" if f["holds"] and f["repeats"] else "NO"
    gradient = "equal" if f["gradient_error"] == 0 else f"{f['gradient_error']:.1e}"
    t, optim = f["forward_backward"], f["optim_step"]["ms"]
    times = f"{t['ms']:.2f}", f"{t['host_ms']:.2f}", f"{optim:.2f}", peak, f"{f['first_step_s']:.1f}"
    return [way, passed, "equal" if f["logprobs_equal"] else "DIFFER", gradient, *times]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="default: tiny on a CPU, qwen3-0.6b on a GPU")
    parser.add_argument("--prompts", type=int, default=5, help="groups of 8 (default: 5)")
    parser.add_argument("--prompt-length", type=int, help="default: 145 on a GPU, 30 on a CPU")
    parser.add_argument("--length", type=int, help="completion tokens; default: 100 on a GPU, 20 on a CPU")
    parser.add_argument("--only", nargs="+", choices=list(WAYS), default=list(WAYS), help="eager is always run")


def measure(args: argparse.Namespace, report: Report) -> bool:
    on_cpu = args.device == "cpu"
    prompt_length, length = args.prompt_length or (30 if on_cpu else 145), args.length or (20 if on_cpu else 100)
    arch = args.arch or ("tiny" if on_cpu else "qwen3-0.6b")
    model = random_model(arch, args.device)
    batch = train_batch(model, args.prompts, prompt_length, length).to(model.embed.device)
    ways: dict[str, Any] = {}
    report.figures |= {"arch": arch, "dtype": str(model.embed.dtype), "packed_tokens": len(batch.tokens_T)}
    report.figures["ways"] = ways
    rows = [["way", "holds", "log-probs", "gradient", "ms", "host ms", "update ms", "GiB peak/reserved", "s to first"]]
    eager: Evidence | None = None
    for way in ["eager", *(w for w in WAYS if w in args.only and w != "eager")]:
        print(way, file=sys.stderr, flush=True)
        try:
            found, ways[way] = timed_way(way, model, batch, args.repeats)
            eager = eager or found
            ways[way] |= judge(way, found, eager, model.embed.dtype)
        except Exception as error:
            traceback.print_exc()
            ways[way] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        rows.append(row(way, ways[way]))
        report.save()
        gc.collect()
        if not on_cpu:
            torch.cuda.empty_cache()
    report.tables.append(rows)
    return any(r[1] != "yes" for r in rows[1:])
