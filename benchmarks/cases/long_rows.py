"""A training step on rows that are one long sequence each, every token in the loss and the optimizer in it, by several
processes: the workload that trainers of others publish.

Each process has so many rows, a micro-batch each. `--again` says of how many layers the forward pass is computed again
in the backward pass: all of them is what others measure, fewer need more memory. Weights and tokens are random. Beside
the time stands that of the products alone, each counted once, at the rate of a large one here, and of attention's two
products, whose lower half alone is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from cases.degrees import LIMIT_S, drawn_weights
from common import Report, ended, first_layers, product_rate, require_gpus, torchrun, write_json

from lockstep.config import ELEMENTWISE
from lockstep.models import num_parameters


def part(device: str, given: str) -> dict[str, Any]:
    """One process of several: its figures, in a file of the folder."""
    from lockstep import machine

    machine.restrict_to_local_gpu()
    from lockstep.config import CompileConfig, LossConfig, OptimizerConfig, ParallelConfig
    from lockstep.distributed import join
    from lockstep.graph import Runtime
    from lockstep.models import load_part
    from lockstep.trainer import Trainer

    about = json.loads(given)
    config, where = first_layers(about["arch"], about["layers"]), torch.device(device)
    world = join(ParallelConfig(timeout=200), device)
    on_gpu = where.type == "cuda"
    again = (ELEMENTWISE,)
    if about["again"] != ELEMENTWISE:
        again = tuple(f"layers.{layer}" for layer in range(min(int(about["again"]), config.num_layers)))
    compile = CompileConfig("step", cudagraph_mode="full" if on_gpu else "none", recompute=again)
    runtime = Runtime(compile, where, mesh=world.sizes, peers=world)
    source = drawn_weights(device, config)
    model = load_part(source, torch.bfloat16 if on_gpu else torch.float32, where, world.generator_mesh)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), world=world, runtime=runtime, source=source)
    batches = [batch.to(where) for batch in rows(about["rows"], about["length"], world.rank)]
    times = []
    for _ in range(about["repeats"] + 1):
        world.gather(None)
        began = time.perf_counter()
        for batch in batches:
            trainer.forward_backward(batch, loss_type="sft")
        result = trainer.optim_step(1e-6)
        times.append(time.perf_counter() - began)
        assert result.applied
    peak = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0
    found = {"step_s": statistics.median(times[1:]), "steps_s": times, "peak_gib": peak, "loss": result.loss}
    slowest = max(world.gather(found), key=lambda of_rank: of_rank["step_s"])
    if world.is_first:
        write_json(slowest, Path(about["folder"]) / "found.json")
    runtime.close()
    world.close()
    return {}


def rows(count: int, length: int, rank: int) -> list[Any]:
    """A micro-batch a row: one token, and all others to train on."""
    from lockstep.trainer import batch_shapes, pack
    from lockstep.types import RolloutGroup, SamplingParams, Segment, Trajectory

    generator = torch.Generator().manual_seed(rank)
    weight, groups = 1.0 / (count * (length - 1)), []
    for _ in range(count):
        first, *others = torch.randint(0, 256, (length,), generator=generator).tolist()
        turns = [Segment([first]), Segment(others, sampled=True)]
        groups.append(RolloutGroup([Trajectory(turns, advantage=1.0, loss_weight=weight)], SamplingParams()))
    shapes = batch_shapes(1, 1, 1, length - 1, max_len=length, max_tokens=length)
    return list(pack(groups, max_tokens=length, check_parity=False, shapes=shapes))


def floor_s(arch: str, layers: int, count: int, length: int, rate: float) -> float:
    """Of a process's products, forward and backward, and attention's two (queries with keys, weights with values)."""
    c = first_layers(arch, layers)
    weights = num_parameters(c) - (0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size)
    attention = 2 * c.num_layers * c.num_heads * c.head_dim * length  # multiplications a token, half of all pairs
    return 3.0 * count * length * (2 * weights + attention) / rate


def flags(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--arch", default="qwen3-4b" if on_gpu else "tiny")
    parser.add_argument("--layers", type=int, default=0, help="of the model (default: all)")
    parser.add_argument("--rows", type=int, default=2, help="of a process (default: 2)")
    parser.add_argument("--length", type=int, default=16384 if on_gpu else 64, help="tokens of a row")
    parser.add_argument(
        "--again", nargs="+", default=["0", "1000"], help="layers computed again, or elementwise (default: none, all)"
    )


def measure(given: argparse.Namespace, report: Report) -> None:
    require_gpus(given.device, given.processes)
    about = {key: getattr(given, key) for key in ("arch", "layers", "rows", "length", "repeats", "processes")}
    rate = product_rate(given.device, torch.bfloat16)
    floor = floor_s(given.arch, given.layers, given.rows, given.length, rate)
    if given.device == "cuda":
        torch.cuda.empty_cache()
    report.figures |= {**about, "product_rate": rate, "floor_s": floor, "ways": {}}
    table = [["computed again", "step s", "floor s", "tokens/s", "GiB"]]
    for again in given.again:
        found = launched(given.device, {**about, "again": again})
        report.figures["ways"][again] = found
        report.save()
        rate_of = given.processes * given.rows * given.length / found["step_s"]
        table.append([again, f"{found['step_s']:.3f}", f"{floor:.3f}", f"{rate_of:,.0f}", f"{found['peak_gib']:.1f}"])
    report.tables.append(table)


def launched(device: str, about: dict[str, Any]) -> dict[str, Any]:
    """What the slowest of the processes measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *torchrun(about["processes"]),
            str(Path(__file__).parents[1] / "run.py"),
            "long_rows",
            "--part",
            device,
        ]
        given = json.dumps({**about, "folder": folder})
        ended([*command, given], LIMIT_S)
        return json.loads((Path(folder) / "found.json").read_text())
