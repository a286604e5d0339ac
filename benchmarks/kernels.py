"""Where the GPU time goes: the kernels of a decode and of a train step, largest first, replayed as CUDA graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from capture import train_batch
from common import arguments, finish, random_model
from generate import Case, make_engine, random_prompts
from torch.profiler import ProfilerActivity, profile

from lockstep.config import CompileConfig, LossConfig, OptimizerConfig
from lockstep.graph import Compiler
from lockstep.models import Decoder
from lockstep.trainer import Trainer
from lockstep.types import SampleIdentity

DECODE = {
    "decode 40": Case(5, 8, 145, 100, 0.8, 0.95),
    "decode 40, T=1": Case(5, 8, 145, 100),
    "decode 256": Case(32, 8, 256, 512),
}
TRAIN_STEPS = 5


def kernels(run: Callable[[], object], steps: int) -> list[tuple[str, float, float]]:
    """Name, microseconds a step and launches a step of every kernel within `run`, largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time
            launches[event.name] += 1
    order = sorted(spent, key=lambda name: -spent[name])
    return [(name, spent[name] / steps, launches[name] / steps) for name in order]


def decode(model: Decoder, case: Case) -> list[tuple[str, float, float]]:
    """Of a decode step; the prompts run before."""
    engine = make_engine(model, case.sequences, case.prompt + case.new, case.sampling)
    for call in range(2):
        for group, prompt in enumerate(random_prompts(case.prompts, lambda: case.prompt)):
            engine.add_request(prompt, case.sampling, SampleIdentity(0, 0, call, group))
        while engine.scheduler.waiting or len(engine.scheduler.running) < case.sequences:
            engine.step()
        engine.drain()
        steps = engine.scheduler.running[0].remaining
        if call == 1:
            return kernels(lambda: drain(engine), steps)
        drain(engine)
    raise AssertionError


def drain(engine: Any) -> None:
    while engine.scheduler.busy:
        engine.step()


def train(model: Decoder) -> list[tuple[str, float, float]]:
    """Of the seed workload's step: forward, backward, clip and AdamW."""
    compiler = Compiler(CompileConfig("step", cudagraph_mode="full"), model.embed.device)
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), enforce_parity=False, compiler=compiler)
    batch = train_batch(model, 5, 145, 100)

    def step() -> None:
        trainer.forward_backward(batch)
        trainer.optim_step(1e-6)

    step()
    step()
    return kernels(lambda: [step() for _ in range(TRAIN_STEPS)], TRAIN_STEPS)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--arch", default="qwen3-0.6b")
    parser.add_argument("--top", type=int, default=10, help="kernels shown of each (default: 10)")
    args = parser.parse_args()
    model = random_model(args.arch, "cuda")
    parts = {name: (lambda case=case: decode(model, case)) for name, case in DECODE.items()}
    parts["train step"] = lambda: train(model)
    figures: dict[str, Any] = {"arch": args.arch}
    rows = [["part", "kernel", "us a step", "launches", "us each"]]
    for part, run in parts.items():
        found = run()
        figures[part] = [{"kernel": name, "us": us, "launches": count} for name, us, count in found]
        rows.append([part, "ALL", f"{sum(us for _, us, _ in found):.0f}", f"{sum(n for *_, n in found):.0f}", ""])
        rows += [[part, n[:70], f"{us:.0f}", f"{c:.0f}", f"{us / c:.1f}"] for n, us, c in found[: args.top]]
    finish("kernels", figures, rows, args.json)


if __name__ == "__main__":
    main()
