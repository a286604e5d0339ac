"""The optimizer's state on the device and in the host's memory (`optimizer.offload`): bits, seconds and memory.

Updates of the same random gradients, some of them refused, must leave the same weights, masters and moments in every
bit. An update's time stands beside its floor: a copy of the state to the device and one back at the same time, pinned.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from dataclasses import replace
from typing import Any

import torch
from common import Report, architecture, random_weights, seconds

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import Runtime
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.machine import allocate_host_buffer
from lockstep.trainer import Trainer

GIB = 2**30
UPDATES = 4  # the third is refused


def updated(arch: str, layers: int, device: str, offload: bool, repeats: int) -> dict[str, Any]:
    """What the updates leave, and what one takes."""
    gc.collect()
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    config = architecture(arch)
    model = random_weights(replace(config, num_layers=layers or config.num_layers), device).to(torch.bfloat16)
    runtime = Runtime(CompileConfig("step", cudagraph_mode="full" if on_gpu else "none"), torch.device(device))
    optimizer = OptimizerConfig(weight_decay=0.1, offload=offload)
    trainer = Trainer(model, optimizer, LossConfig(), enforce_parity=False, runtime=runtime)
    grad = trainer.flat.grad
    times = []
    for update in range(UPDATES + repeats):
        grad.normal_(generator=torch.Generator(device).manual_seed(update))
        if update == 2:
            grad[-1] = torch.inf
        times.append(seconds(lambda: trainer.optim_step(1e-3, 0), device))
        if update == UPDATES - 1:
            state = {**trainer.optimizer.local_state(), "weights": trainer.flat.data}
            words = {name: fingerprint(tensor.to(device)).item() for name, tensor in state.items()}
    steps = trainer.optimizer.steps.tolist()
    runtime.close()
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else None
    found = {"words": words, "updates": steps, "median_s": statistics.median(times[UPDATES:]), "peak_gib": peak}
    return found | {"state_gib": sum(state[name].nbytes for name in ("master", "exp_avg", "exp_avg_sq")) / GIB}


def floor_s(size: int, device: str) -> float:
    """Of copying so many bytes to the device and as many back, at the same time."""
    if device == "cpu":
        return 0.0
    chunk = min(size, 1 << 30)
    there, back = allocate_host_buffer(chunk, True), allocate_host_buffer(chunk, True)
    here, gone = (torch.empty(chunk, dtype=torch.uint8, device=device) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            here.copy_(there, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            back.copy_(gone, non_blocking=True)

    return min(seconds(copy, device) for _ in range(5)) * size / chunk


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all)")


def measure(given: argparse.Namespace, report: Report) -> bool:
    rows = [["state", "GiB", "update ms", "floor ms", "peak GiB", "updates"]]
    found = {}
    for name, offload in (("device", False), ("host", True)):
        found[name] = row = updated(given.arch, given.layers, given.device, offload, given.repeats)
        floor = floor_s(int(row["state_gib"] * GIB), given.device) if offload else 0.0
        report.figures[name] = row = {**row, "floor_s": floor}
        report.save()
        times = [f"{row[key] * 1e3:.1f}" for key in ("median_s", "floor_s")]
        peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.2f}"
        rows.append([name, f"{row['state_gib']:.2f}", *times, peak, str(row["updates"])])
    same = found["device"]["words"] == found["host"]["words"]
    report.figures |= {"arch": given.arch, "same_bits": same}
    report.tables.append(rows)
    report.notes.append(f"weights, masters and moments have the same bits: {same}")
    return not same
