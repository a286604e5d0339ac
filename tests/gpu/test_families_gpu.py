"""Layers of real models with experts and latent attention, through both roles in recorded graphs: the trainer finds the
generator's bits, before and after an update.
"""

from dataclasses import replace

import pytest
import torch
from both_roles import assert_roles_agree_over_updates, drawn

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.graph import Runtime
from lockstep.models.init import ARCHITECTURES

DEVICE = torch.device("cuda")
MODELS = {
    "qwen3-30b-a3b, 2 layers": replace(ARCHITECTURES["qwen3-30b-a3b"], num_layers=2, vocab_size=4096),
    "deepseek-v3, 3 layers, 32 experts": replace(ARCHITECTURES["deepseek-v3-3-layers-32-experts"], vocab_size=4096),
}


@pytest.mark.parametrize("name", MODELS)
def test_generator_and_trainer_agree_over_updates(name: str) -> None:
    model = drawn(MODELS[name], DEVICE)
    assert_roles_agree_over_updates(model, Runtime(CompileConfig("step", "full"), DEVICE), GeneratorConfig(), 16384)
