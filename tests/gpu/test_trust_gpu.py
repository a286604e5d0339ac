"""Graphs of both roles on a GPU, recorded whole and in pieces: eager's bits before the first step, and the cost."""

from __future__ import annotations

import time

import pytest
import torch

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import CudaRecorder, GraphError, Runtime, check_against_eager, compile_report
from lockstep.graph.check.fingerprints import fingerprint
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, Trainer
from lockstep.types import SamplingParams

CUDA = torch.device("cuda")
SHAPES = [BatchShape(2048, 1024, 24, 600), BatchShape(1040, 512, 24, 600)]
TOP_P = SamplingParams(temperature=0.8, top_p=0.95, n=8, max_completion_length=100)


def make(mode: str, recorder: CudaRecorder | None = None) -> tuple[Runtime, Trainer, Engine]:
    config = ModelConfig(4096, 512, 1024, 4, 8, 4, 128, rope_theta=1e6, max_position_embeddings=2048, family="qwen3")
    model = initialize(Decoder(config, torch.bfloat16, CUDA), 0)
    runtime = Runtime(CompileConfig("step", mode), CUDA, recorder=recorder)
    trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), LossConfig(), runtime=runtime)
    engine = Engine(SharedWeights(model), GeneratorConfig(), 16_384, runtime=runtime)
    trainer.warm_up(SHAPES, TOP_P, check_parity=True)
    engine.warm_up(24, 600, TOP_P)
    return runtime, trainer, engine


def work(trainer: Trainer, engine: Engine) -> list:
    return [*trainer.check_cases(SHAPES, TOP_P, check_parity=True), *engine.check_cases()]


@pytest.mark.parametrize("mode", ["none", "full", "piecewise"])
def test_every_function_gives_eagers_bits(mode: str) -> None:
    began = time.perf_counter()
    runtime, trainer, engine = make(mode)
    warm = time.perf_counter()
    verdicts = check_against_eager(runtime, work(trainer, engine), "strict")
    checked = time.perf_counter()
    report = compile_report(runtime, verdicts)
    print(f"\n{mode}: warm-up {warm - began:.2f} s, check {checked - warm:.2f} s, pool {report['pool_gib']:.3f} GiB")
    for name, about in report["functions"].items():
        print(f"  {name}: {about}")
    assert {v.function for v in verdicts} == {"forward_backward", "optim_step", "check", "decode", "mixed"}
    expected = "captured" if mode == "none" else mode
    assert all(v.level == expected and not v.faults for v in verdicts)
    runtime.close()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_hashes_are_those_of_the_host(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape in ((), (1,), (7,), (1 << 20,), (3001, 1003)):
        x = torch.randn(shape).mul(3).to(dtype)
        assert int(fingerprint(x.cuda())) == int(fingerprint(x))
    pages = torch.randn(3, 9, 64, 1024).to(dtype)
    assert int(fingerprint(pages.cuda()[:, 2:7])) == int(fingerprint(pages[:, 2:7]))


class Stale(CudaRecorder):
    """Recordings of copies of every input: replays work on what was there when they were recorded."""

    def record(self, run, arguments, keep=(), lasting=()):
        self.held = [*getattr(self, "held", []), *(a.clone() for a in arguments)]
        return super().record(run, self.held[len(self.held) - len(arguments) :], keep, lasting)


def test_a_recording_of_other_memory_is_found() -> None:
    runtime, trainer, engine = make("full", Stale(CUDA))
    before = trainer.flat.grad.clone()
    with pytest.raises(
        GraphError, match=r"forward_backward\(.*replay differs from the step before in .*, first at node"
    ):
        check_against_eager(runtime, work(trainer, engine), "strict")
    assert torch.equal(trainer.flat.grad, before)
    runtime.close()


def test_memory_of_pieces_serves_the_next_bucket() -> None:
    """The smaller bucket is recorded in what the larger one left: its values cross pieces in memory that is lent."""
    runtime, trainer, _ = make("piecewise")
    before = compile_report(runtime)["pool_gib"]
    trainer.warm_up([BatchShape(528, 256, 24, 600)], TOP_P, check_parity=True)
    grown = compile_report(runtime)["pool_gib"] - before
    print(f"\npool {before:.3f} GiB, a third bucket adds {grown:.3f}")
    assert grown < 0.25 * before
    runtime.close()
