"""A rehearsal finds the kernels that the launches need: none is compiled at its first launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime
from lockstep.models import Decoder, ModelConfig
from lockstep.models.init import initialize
from lockstep.trainer import BatchShape, Trainer
from lockstep.types import SamplingParams

CUDA = torch.device("cuda")
SHAPES = [BatchShape(1040, 512, 24, 600)]
TOP_P = SamplingParams(temperature=0.8, top_p=0.95, n=8, max_completion_length=100)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that are compiled, as it comes to pass."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda *, fn, **_: names.append(fn.name)
    yield names
    knobs.runtime.jit_cache_hook = before


def test_after_a_rehearsal_nothing_is_compiled(compiled: list[str]) -> None:
    # Sizes of no other test's, so that this process has compiled none of it.
    config = ModelConfig(8192, 768, 1536, 2, 6, 3, 128, rope_theta=1e6, max_position_embeddings=2048, family="qwen3")
    model = initialize(Decoder(config, torch.bfloat16, CUDA), 0)
    runtime = Runtime(CompileConfig("step", "full"), CUDA)
    trainer = Trainer(model, OptimizerConfig(weight_decay=0.1), LossConfig(), runtime=runtime)
    engine = Engine(SharedWeights(model), GeneratorConfig(), 16_384, runtime=runtime)
    state = [tensor.clone() for tensor in trainer.state()[0].values()]

    def warm_up() -> None:
        trainer.warm_up(SHAPES, TOP_P, check_parity=True)
        engine.warm_up(24, 600, TOP_P)

    with runtime.warm_up.rehearsal():
        warm_up()
    assert compiled and not any(runtime.launches.values())
    assert all(map(torch.equal, state, trainer.state()[0].values()))
    assert not trainer.flat.grad.any() and not engine.cache.k.any()
    rehearsed, runtime.warm_up.kernels_loaded = len(compiled), True
    with runtime.warm_up.make_graphs():  # recorded without a run
        warm_up()
    assert not any(runtime.launches.values()) and all(map(torch.equal, state, trainer.state()[0].values()))
    warm_up()
    assert compiled[rehearsed:] == [] and runtime.replays == runtime.launches
    assert set(runtime.launches) == {"forward_backward", "optim_step", "check", "decode", "mixed"}
    runtime.close()
