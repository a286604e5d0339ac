"""What the cases of operators share: timing in CUDA graphs, the table, errors against float64."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import cuda_graph, replay_s, seconds, summary
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
if not ON_GPU:  # the times mean nothing; that every section runs does
    os.environ["TRITON_INTERPRET"] = "1"
BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12  # an H200's memory and bfloat16 matrix products, measured
WARM_ROUNDS = 2
Run = Callable[[], Any]
Record = dict[str, Any]


class Bench:
    """Measures and collects; a record is a row of the table and an entry of the JSON file."""

    def __init__(self, repeats: int) -> None:
        self.repeats = max(repeats, 5)
        self.records: list[Record] = []

    def time(self, runs: list[Run], least: int = 4) -> dict[str, float]:
        """Seconds of one call: median, minimum and maximum of graphs that call each of `runs` in turn."""
        (found,) = self.time_all({"": runs}, least).values()
        return found

    def time_all(self, systems: dict[str, list[Run]], least: int = 4) -> dict[str, dict[str, float]]:
        """`time` of each system, taken in turn, so that a clock that drifts meets all alike."""
        if not ON_GPU:
            return {name: summary([seconds(runs[0], "cpu") for _ in range(2)]) for name, runs in systems.items()}
        calls = {name: runs * math.ceil(least / len(runs)) for name, runs in systems.items()}
        graphs = {name: cuda_graph(runs) for name, runs in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in systems}
        for _ in range(self.repeats + WARM_ROUNDS):
            for name, graph in graphs.items():
                times[name].append(replay_s(graph) / len(calls[name]))
        return {name: summary(found[WARM_ROUNDS:]) for name, found in times.items()}

    def add(
        self,
        op: str,
        case: str,
        ours: dict[str, float],
        others: dict[str, dict[str, float]],
        bytes_: float = 0.0,
        flops: float = 0.0,
        **more: Any,
    ) -> None:
        """One operator in one case; `bytes_` each read and written once."""
        floor = max(bytes_ / BYTES_PER_S, flops / FLOPS_PER_S)
        self.records.append({"op": op, "case": case, "ours": ours, "others": others, "floor_s": floor, **more})
        print(f"{op} {case}: {1e6 * ours['median_s']:.1f} us", file=sys.stderr, flush=True)

    def table(self) -> list[list[str]]:
        """Microseconds, with half the spread; the fastest other, and our time over its and over the floor's."""
        rows = [
            ["operator", "case", "us", "+-", "fastest other", "us", "x other", "floor", "x floor", "error", "torch's"]
        ]
        for r in self.records:
            ours = r["ours"]["median_s"]
            name, other = min(
                ((n, t["median_s"]) for n, t in r["others"].items()), key=lambda x: x[1], default=("", math.nan)
            )
            spread = (r["ours"]["max_s"] - r["ours"]["min_s"]) / 2
            numbers = [f"{1e6 * x:.1f}" for x in (ours, spread, other, r["floor_s"])]
            ratios = [f"{ours / x:.2f}" if x else "" for x in (other, r["floor_s"])]
            errors = [f"{r[k]:.1e}" if k in r else "" for k in ("error", "torch_error")]
            row = [r["op"], r["case"], *numbers[:2], name, numbers[2], ratios[0], numbers[3], ratios[1], *errors]
            rows.append(["" if cell == "nan" else cell for cell in row])
        return rows


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(DTYPE)


def error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||."""
    return float((x.double() - exact).norm() / exact.norm())
