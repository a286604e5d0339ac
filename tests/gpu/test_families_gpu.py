"""Layers of real models with experts and latent attention, through both roles in recorded graphs: the trainer finds the
generator's bits, before and after an update. Folders in other layouts than the decoder's, read on the device.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from both_roles import assert_roles_agree_over_updates, drawn
from model_edits import store_in_4_bits

from lockstep.config import CompileConfig, GeneratorConfig
from lockstep.distributed.mesh import ONE_RANK, Axis, Mesh
from lockstep.graph import Runtime
from lockstep.models import Decoder, FolderWeights, load_part, save_model
from lockstep.models.blocks.rope import LongRopeScaling
from lockstep.models.init import ARCHITECTURES, initialize

DEVICE = torch.device("cuda")
WINDOW: dict[str, Any] = {"sliding_window": 40, "sliding_layers": (0,)}  # shorter than a prompt, in one of two layers
WINDOWS = WINDOW | {"sliding_layers": (0, 1)}
MODELS = {
    "qwen3-30b-a3b, 2 layers": replace(ARCHITECTURES["qwen3-30b-a3b"], num_layers=2, vocab_size=4096),
    "deepseek-v3, 3 layers, 32 experts": replace(ARCHITECTURES["deepseek-v3-3-layers-32-experts"], vocab_size=4096),
    "qwen2.5-7b, 2 layers": replace(ARCHITECTURES["qwen2.5-7b"], num_layers=2, vocab_size=4096),
    "mistral-7b, 2 layers": replace(ARCHITECTURES["mistral-7b"], num_layers=2, vocab_size=4096, **WINDOWS),
    "gemma3-4b, 2 layers": replace(ARCHITECTURES["gemma3-4b"], num_layers=2, vocab_size=4099, **WINDOW),
    "olmo2-1b, 2 layers": replace(ARCHITECTURES["olmo2-1b"], num_layers=2, vocab_size=4096),
    "olmo3-7b, 2 layers": replace(ARCHITECTURES["olmo3-7b"], num_layers=2, vocab_size=4096, **WINDOW),
    "olmoe-1b-7b, 2 layers": replace(ARCHITECTURES["olmoe-1b-7b"], num_layers=2, vocab_size=4096),
    "smollm3-3b, layers 3 and 4": replace(
        ARCHITECTURES["smollm3-3b"], num_layers=2, vocab_size=4096, unrotated_layers=(1,)
    ),
    "gpt-oss-20b, 2 layers": replace(ARCHITECTURES["gpt-oss-20b"], num_layers=2, vocab_size=4096, **WINDOW),
    "phi3-mini, 2 layers": replace(ARCHITECTURES["phi3-mini"], num_layers=2, vocab_size=4096, **WINDOWS),
    "phi4-mini, 2 layers": replace(
        ARCHITECTURES["phi3-mini"], num_layers=2, vocab_size=4096, num_heads=24, num_kv_heads=8, head_dim=128,
        rotary_dim=96, rope_scaling=LongRopeScaling((1.0,) * 48, (2.0,) * 48, 4096, 131072),
        tie_word_embeddings=True, sliding_layers=(),
    ),
    "mixtral-8x7b, 2 layers": replace(ARCHITECTURES["mixtral-8x7b"], num_layers=2, vocab_size=4096),
    "glm4.5-air, 2 layers": replace(ARCHITECTURES["glm4.5-air"], num_layers=2, vocab_size=4096),
}  # fmt: skip


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """A model before the next one is made: programs and what runs them refer to one another."""
    yield
    gc.collect()


@pytest.mark.parametrize("name", MODELS)
def test_generator_and_trainer_agree_over_updates(name: str) -> None:
    model = drawn(MODELS[name], DEVICE)
    assert_roles_agree_over_updates(model, Runtime(CompileConfig("step", "full"), DEVICE), GeneratorConfig(), 16384)


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gpt-oss in 4 bits", "tiny-deepseek-v3", "tiny-glm4-moe"])
def test_a_folder_in_another_layout_is_read_as_on_a_cpu(name: str, tmp_path: Path) -> None:
    architecture, _, in_4_bits = name.partition(" ")
    save_model(initialize(Decoder(ARCHITECTURES[architecture], torch.bfloat16), 3), tmp_path)
    if in_4_bits:
        store_in_4_bits(tmp_path)
    for mesh in (ONE_RANK, Mesh(tp=Axis("tp", 2, 1))):
        found, expected = (load_part(FolderWeights(tmp_path), torch.bfloat16, x, mesh) for x in (DEVICE, "cpu"))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
