"""Small captures, and a two-layer model with a batch to train on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fake_recorder import FakeRecorder
from small import make_model

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Runtime, Store
from lockstep.models import Decoder, ModelConfig
from lockstep.types import RolloutGroup, SampleIdentity, SamplingParams

CPU = torch.device("cpu")
FILTERED = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, n=3, max_completion_length=9)


@pytest.fixture(scope="session")
def runtime_of() -> Callable[..., Runtime]:
    """`runtime_of(recorded=False, recompute=())`; recorded ones replay in a `FakeRecorder`, `stored` ones take the
    graphs that an earlier one made."""

    def make(
        recorded: bool = False, recompute: tuple[str, ...] = (), canonicalize: bool = True, stored: bool = False
    ) -> Runtime:
        config = CompileConfig("step", "full" if recorded else "none", canonicalize, recompute)
        return Runtime(config, CPU, recorder=FakeRecorder(), store=Store() if stored else None)

    return make


@pytest.fixture(scope="session")
def decoder() -> Callable[..., Decoder]:
    """`decoder(dtype=float32, seed=0, layers=2)`: tied, distributions far from flat."""

    def make(dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2) -> Decoder:
        config = ModelConfig(97, 48, 64, layers, 4, 2, 16, rope_theta=1e4, max_position_embeddings=256, family="qwen3")
        return make_model(dtype, seed, config)

    return make


@pytest.fixture(scope="session")
def rollout() -> Callable[..., list[RolloutGroup]]:
    """`rollout(model, step, sampling=FILTERED)`: two groups that the model sampled, ready to be packed."""

    def make(model: Decoder, step: int, sampling: SamplingParams = FILTERED) -> list[RolloutGroup]:
        engine = Engine(SharedWeights(model), GeneratorConfig(), cache_tokens=1024)
        prompts = [[(7 * g + i) % 97 for i in range(size)] for g, size in enumerate((21, 3))]
        identities = [SampleIdentity(0, 0, step, g) for g in range(2)]
        groups = []
        for completions in engine.generate(prompts, [sampling] * 2, identities):
            for i, c in enumerate(completions):
                c.name, c.advantage, c.loss_weight = f"sample {i}", (-1.0) ** i, 0.02
            groups.append(RolloutGroup(completions, sampling))
        return groups

    return make
