"""Random tiny models of every family: what `transformers` makes of a folder, and one arithmetic in both roles.

One of each here; `tests/matrix.py` has the others.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import MAKERS, assert_roles_agree, assert_same_model, folder_of, logits
from model_edits import edited
from safetensors.torch import load_file, save_file

from lockstep.errors import InputError
from lockstep.models import load_model
from lockstep.models.families import FAMILIES

# Seeds of models of two layers; windows of 7 (smaller than a page), 20 and 70 (larger than a key tile) are among them.
ROLES = {"qwen2": 2, "mistral": 0, "olmo2": 0, "olmo3": 2, "gemma3_text": 3, "gpt_oss": 0, "glm4_moe": 4}


def test_every_family_has_cases_here_or_beside() -> None:
    assert FAMILIES.keys() - MAKERS.keys() == {"qwen3", "qwen3_moe", "llama", "deepseek_v3"}  # test_model_folder


@pytest.mark.parametrize("family", MAKERS)
def test_a_folder_is_the_model_that_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    for seed in range(2):
        assert_same_model(family, seed, tmp_path / str(seed))


@pytest.mark.parametrize("family", MAKERS)
def test_both_roles_agree_over_updates_captured_or_not(family: str, tmp_path: Path) -> None:
    assert_roles_agree(family, ROLES[family], tmp_path, torch.bfloat16)


def test_weights_of_4_bits_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Experts of 32 inputs and more, in blocks and scales that lie in two files."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = folder_of("gpt_oss", 0, tmp_path, hidden_size=64, intermediate_size=32)
    tensors, parts = load_file(tmp_path / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        parts[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        parts[f"{name}_scales"] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        whole = convert_moe_packed_tensors(parts[f"{name}_blocks"], parts[f"{name}_scales"])
        theirs.get_parameter(name).data.copy_(whole)
    scales = {name: part for name, part in parts.items() if name.endswith("scales")}
    files = {"a.safetensors": scales, "b.safetensors": tensors | {n: p for n, p in parts.items() if n not in scales}}
    for file, some in files.items():
        save_file(some, tmp_path / file)
    placed = {name: file for file, some in files.items() for name in some}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    edited(quantization_config={"quant_method": "mxfp4"})(tmp_path)
    tokens = torch.arange(4, 120)
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    found = logits(load_model(tmp_path, torch.float32), tokens)
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    save_file(scales | {"lm_head.bias": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors: lm_head\.bias has no place"):
        load_model(tmp_path, torch.float32)
    edited(quantization_config={"quant_method": "fp8"})(tmp_path)
    with pytest.raises(InputError, match=r"config\.json: quantization_config is .*fp8.*bfloat16 model; no family"):
        load_model(tmp_path, torch.float32)
