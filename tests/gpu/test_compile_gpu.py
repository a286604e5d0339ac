"""Joint graphs, compiled regions and compiled layers on a GPU: eager's bits under contract, bounds for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import EAGER, Runtime, check_against_eager, compile_report
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, Trainer, pack
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams

CUDA = torch.device("cuda")
SHAPES = [BatchShape(1040, 512, 24, 600), BatchShape(528, 256, 24, 600)]
TOP_P = SamplingParams(temperature=0.8, top_p=0.95, n=8, max_completion_length=40)


def model() -> Decoder:
    config = ModelConfig(4096, 512, 1024, 3, 8, 4, 128, rope_theta=1e6, max_position_embeddings=2048, family="qwen3")
    return initialize(Decoder(config, torch.bfloat16, CUDA), 0)


@pytest.mark.parametrize(
    ("capture", "backend", "mode"),
    [
        *(("joint", "eager", mode) for mode in ("none", "full", "piecewise")),
        *((capture, "inductor", mode) for capture in ("step", "joint") for mode in ("none", "full")),
    ],
)
def test_every_function_is_trusted(capture: str, backend: str, mode: str) -> None:
    runtime = Runtime(CompileConfig(capture, mode, backend=backend), CUDA)  # type: ignore[arg-type]
    trainer = Trainer(model(), OptimizerConfig(weight_decay=0.1), LossConfig(), runtime=runtime)
    trainer.warm_up(SHAPES, TOP_P, check_parity=True)
    verdicts = check_against_eager(runtime, trainer.check_cases(SHAPES, TOP_P, check_parity=True), "strict")
    assert {v.function for v in verdicts} == {"forward_backward", "optim_step", "check"}
    assert all(v.level == ("captured" if mode == "none" else mode) and not v.faults for v in verdicts)
    print(f"\n{capture}, {backend}, {mode}: {runtime.timings.seconds}")
    for title, log in compile_report(runtime)["passes"].items():
        print(f"  {title}: {log}")
    if backend == "inductor":
        assert runtime.builder.backend.regions._made  # type: ignore[attr-defined]
    runtime.close()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_layers_keep_parity_and_few_variants_are_compiled(backend: str) -> None:
    def gradients(runtime: Runtime) -> torch.Tensor:
        own = model()
        trainer = Trainer(own, OptimizerConfig(), LossConfig(), runtime=runtime)
        engine = Engine(SharedWeights(own), GeneratorConfig(), 16_384, runtime=runtime)
        prompts = [[(7 * g + i) % 4096 for i in range(size)] for g, size in enumerate((210, 33))]
        done = engine.generate(prompts, [TOP_P] * 2, [SampleIdentity(0, 0, 0, g) for g in range(2)])
        groups = [RolloutGroup([replace(c, advantage=1.0, loss_weight=0.01) for c in cs], TOP_P) for cs in done]
        for batch in pack(groups, max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch.to(CUDA))
        found = trainer.flat.grad.clone()
        result = trainer.optim_step(1e-5)
        assert result.applied and result.tokens_different == 0 and result.tokens_checked > 100
        return found

    runtime = Runtime(CompileConfig("layer", backend=backend), CUDA)  # type: ignore[arg-type]
    found, expected = gradients(runtime), gradients(EAGER)
    print(f"\n{backend}: {runtime.captures} variants")
    assert runtime.captures <= 6
    if backend == "eager":
        assert torch.equal(found, expected)
    else:
        assert (found - expected).norm() < 2**-5 * expected.norm()
