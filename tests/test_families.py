"""Every model family through both roles: bits equal before and after updates, eager and captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import CONFIG, generate, make_model, requests, train_groups, words

from lockstep.config import CompileConfig, GeneratorConfig, LossConfig, OptimizerConfig
from lockstep.generator import Engine, SharedWeights
from lockstep.graph import Compiler
from lockstep.models import ModelConfig
from lockstep.models.rope import RopeScaling
from lockstep.trainer import Trainer, pack

LLAMA = replace(CONFIG, family="llama", tie_word_embeddings=False)
SCALING = RopeScaling("llama3", 8.0, original_max_position_embeddings=64)
FAMILIES = {
    "qwen3": CONFIG,
    "llama": LLAMA,
    "llama, scaled positions, tied": replace(LLAMA, rope_scaling=SCALING, tie_word_embeddings=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capture", ["none", "step"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generator_and_trainer_agree_over_updates(family: str, capture: str, dtype: torch.dtype) -> None:
    completions, different = rounds(FAMILIES[family], capture, dtype)
    assert different == [0, 0, 0]
    assert completions[0] != completions[1] != completions[2]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3"])
def test_captured_is_eager(family: str) -> None:
    assert rounds(FAMILIES[family], "none", torch.bfloat16) == rounds(FAMILIES[family], "step", torch.bfloat16)


def rounds(config: ModelConfig, capture: str, dtype: torch.dtype) -> tuple[list, list[int]]:
    """Three on-policy updates: what was generated, and how many tokens differed."""
    model = make_model(dtype, config=config)
    compiler = Compiler(CompileConfig("step"), torch.device("cpu")) if capture == "step" else None
    trainer = Trainer(model, OptimizerConfig(), LossConfig(), compiler=compiler)
    weights = SharedWeights(model, lambda: trainer.weights_version)
    engine = Engine(weights, GeneratorConfig(), 16384, compiler=compiler)
    prompts, sampling = requests(5, length=12)
    made, different = [], []
    for _ in range(3):
        completions = generate(engine, prompts, sampling)
        for batch in pack(train_groups(prompts, sampling, completions), max_tokens=4096, check_parity=True):
            trainer.forward_backward(batch)
        result = trainer.optim_step(1e-2)
        assert result.applied or result.tokens_different
        made.append(words(completions))
        different.append(result.tokens_different)
    return made, different
