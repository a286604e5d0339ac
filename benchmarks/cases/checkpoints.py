"""What a checkpoint, an exported model and its loading cost: how long a step waits, how long writing takes, and the
memory.

Each number of processes trains one model, whose state they share; a process's share of what is written stands beside
the memory that it takes at most (the peak of what is resident over what was before, of files that are read too).
A step waits for the copy of its state to the host; the floor is the host's own copy of as many bytes. What was exported
is loaded by as many processes that generate together, each its part; beside that stand the bytes that it reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import Report, ended, random_model, require_gpus, torchrun

LIMIT_S = 300.0


def part(arch: str, device: str, folder: str, repeats: str) -> dict[str, Any]:
    """One process of several: its figures, in a file of the folder."""
    from lockstep import machine
    from lockstep.config import LossConfig, OptimizerConfig, ParallelConfig
    from lockstep.distributed import Axis, Mesh, join
    from lockstep.models import FolderWeights, load_part
    from lockstep.models.tokenizer import byte_tokenizer
    from lockstep.run import checkpoint
    from lockstep.session.build import save_policy
    from lockstep.session.text.policy import Policy
    from lockstep.trainer import Trainer

    machine.restrict_to_local_gpu()
    world, path = join(ParallelConfig(timeout=200), device), Path(folder)
    model = random_model(arch, device)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), world=world)
    own, alike, _ = trainer.local_state()
    tensors = {checkpoint.part_name("trainer", world.rank): own} | ({"trainer": alike} if world.is_first else {})
    found: dict[str, Any] = {"state_bytes": sum(x.nbytes for x in own.values())}
    saver = checkpoint.Saver(path / "checkpoints", 2, world, shared=True)
    found["copy_bytes"], _ = _peak(lambda: saver.save(0, tensors, {}))
    saver.wait()
    waits, writes = [], []
    for step in range(int(repeats)):
        world.gather(None)
        began = time.perf_counter()
        saver.save(step + 1, tensors, {})
        waits.append(time.perf_counter() - began)
        saver.wait()
        writes.append(time.perf_counter() - began)
    found |= {"wait_s": statistics.median(waits), "write_s": statistics.median(writes)}
    found["floor_s"] = _copy_s(found["state_bytes"])
    policy = Policy(model, byte_tokenizer())
    held = trainer.ranges_to_write()
    found["share_bytes"] = sum(one.values.nbytes for ranges in held.values() for one in ranges)
    found["export_peak_bytes"], found["export_s"] = _peak(lambda: save_policy(policy, path / "model", held, world))
    loaded = checkpoint.latest(path / "checkpoints")
    assert loaded is not None
    given = loaded.by_rank("trainer")
    together = Mesh(tp=Axis("tp", world.size, world.rank))
    before, loading = _read_so_far(), []
    found["load_peak_bytes"], found["load_s"] = _peak(
        lambda: loading.append(load_part(FolderWeights(path / "model"), model.embed.dtype, device, together))
    )
    found["load_read_bytes"] = _read_so_far() - before
    stored = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in loading.pop().parameters()}
    found["part_bytes"] = sum(stored.values())
    found["read_bytes"], found["restore_s"] = _peak(lambda: trainer.load_state(given, {"weights_version": 0}))
    (path / f"{world.rank}.json").write_text(json.dumps(found))
    world.close()
    return found


def _peak(run: Callable[[], object]) -> tuple[int, float]:
    """Bytes that became resident at most, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, began = _resident("VmRSS"), time.perf_counter()
    run()
    return _resident("VmHWM") - before, time.perf_counter() - began


def _read_so_far() -> int:
    """Bytes that this process has asked files for."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def _copy_s(size: int) -> float:
    """Of so many bytes of the host, to memory that is there."""
    part = min(size, 1 << 30)
    source, target = torch.ones(part, dtype=torch.uint8), torch.ones(part, dtype=torch.uint8)
    began = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - began) * size / part


def processes(count: int, arch: str, device: str, repeats: int) -> dict[str, Any]:
    """The figures of so many: the slowest's seconds, and the most bytes of any."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(count), str(Path(__file__).parents[1] / "run.py"), "checkpoints", "--part"]
        given = [arch, device, folder, str(repeats)]
        ended([*command, *given], LIMIT_S)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    return {"processes": count} | {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--arch", default="qwen3-100m")


def measure(given: argparse.Namespace, report: Report) -> None:
    require_gpus(given.device, max(given.processes))
    report.figures |= {"arch": given.arch, "cores": os.cpu_count(), "rows": []}
    rows = [
        [
            "processes",
            "state MB",
            "waits s",
            "copy, floor s",
            "written s",
            "model MB",
            "peak MB",
            "export s",
            "restored, MB",
            "part MB",
            "loaded, peak MB",
            "read MB",
            "load s",
        ]
    ]
    for count in given.processes:
        row = processes(count, given.arch, given.device, given.repeats)
        report.figures["rows"].append(row)
        report.save()
        r = SimpleNamespace(**row)
        times = [f"{one:.3f}" for one in (r.wait_s, r.floor_s, r.write_s)]
        sizes = [f"{one / 1e6:.0f}" for one in (r.state_bytes, r.share_bytes, r.export_peak_bytes)]
        loaded = [f"{one / 1e6:.0f}" for one in (r.read_bytes, r.part_bytes, r.load_peak_bytes, r.load_read_bytes)]
        rows.append([str(count), sizes[0], *times, *sizes[1:], f"{r.export_s:.2f}", *loaded, f"{r.load_s:.2f}"])
    report.tables.append(rows)
