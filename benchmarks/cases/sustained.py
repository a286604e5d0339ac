"""What matrix products reach for seconds, at a GPU's limit of power, and for milliseconds: the floor of a long pass.

The products of one layer in training, of the packed tokens of a micro-batch, by torch's own choice: each projection
forward and its two gradients, one after the other, of random numbers and of zeros. Beside each rate stand the power and
the clock that `nvidia-smi` tells meanwhile, and its share of 989 TFLOP/s, which the vendor's sheet gives at a clock
that such passes do not keep.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

import torch
from cases.scaling import PEAK
from common import Report, seconds
from torch import Tensor

from lockstep.models import ModelConfig
from lockstep.models.init import architecture

SHORT_S, REST_S = 0.03, 3.0
QUERY = ("nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "100")


def weights(c: ModelConfig) -> list[tuple[int, int]]:
    """Columns and depth of a layer's projections, those that are read together in one."""
    heads = c.num_heads * c.head_dim
    fused = heads + 2 * c.num_kv_heads * c.head_dim
    return [(fused, c.hidden_size), (c.hidden_size, heads), (2 * c.intermediate_size, c.hidden_size),
            (c.hidden_size, c.intermediate_size)]  # fmt: skip


def operands(c: ModelConfig, tokens: int, device: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, weight and the result's gradient of each."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def drawn(rows: int, width: int, std: float) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=device).normal_(0, std)

    return [(drawn(tokens, k, 1.0), drawn(n, k, 0.02), drawn(tokens, n, 1e-3)) for n, k in weights(c)]


@contextlib.contextmanager
def watched(device: str) -> Iterator[dict[str, float]]:
    """Watts and MHz of the GPU, the medians of what the driver tells in the second half of what is within; nothing on a
    CPU."""
    found: dict[str, float] = {}
    if device != "cuda":
        yield found
        return
    of_it = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
    with subprocess.Popen([*QUERY, of_it], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            lines = [line.split(",") for line in (process.communicate()[0] or "").splitlines() if line.count(",") == 1]
    if told := lines[len(lines) // 2 :]:
        found |= {name: statistics.median(float(one[i]) for one in told) for i, name in enumerate(("watts", "mhz"))}


def rate(run: Callable[[], object], operations: float, length_s: float, device: str) -> float:
    """Operations a second of calls for so long, after two."""
    run()
    count = max(1, int(length_s / max(seconds(run, device), 1e-6)))

    def calls() -> None:
        for _ in range(count):
            run()

    return count * operations / seconds(calls, device)


def flags(parser: argparse.ArgumentParser) -> None:
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--arch", default="qwen3-8b" if on_gpu else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 64)
    parser.add_argument("--seconds", type=float, default=5.0 if on_gpu else 0.05, help="of a long pass")


def measure(given: argparse.Namespace, report: Report) -> None:
    c = architecture(given.arch)
    made = operands(c, given.tokens, given.device)
    operations = 6.0 * given.tokens * sum(n * k for n, k in weights(c))

    def layer() -> None:
        for x, weight, grad in made:
            torch.mm(x, weight.t())
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

    report.figures |= {"arch": given.arch, "tokens": given.tokens, "ways": {}}
    table = [["products", "TFLOP/s", "of 989", "watts", "MHz"]]
    for way, length_s in (("short", SHORT_S), ("long", given.seconds), ("long, of zeros", given.seconds)):
        if way == "short" and given.device == "cuda":
            time.sleep(REST_S)
        if way.endswith("zeros"):
            for tensors in made:
                for tensor in tensors:
                    tensor.zero_()
        with watched(given.device) if way != "short" else contextlib.nullcontext(dict[str, float]()) as told:
            found = rate(layer, operations, min(length_s, given.seconds), given.device)
        about = {"tflops": found / 1e12, "of_peak": found / PEAK, **told}
        report.figures["ways"][way] = about
        report.save()
        shown = [f"{told[name]:.0f}" if name in told else "-" for name in ("watts", "mhz")]
        table.append([way, f"{found / 1e12:.1f}", f"{found / PEAK:.3f}", *shown])
    report.tables.append(table)
