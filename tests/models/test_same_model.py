"""A folder is read as the model that `transformers` makes of it, or refused by the name of file and field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_edits import NORM, edited, tensors
from safetensors.torch import load_file, save_file
from small import load_model

from lockstep import ops
from lockstep.errors import InputError
from lockstep.models import Decoder, FolderWeights, PackedAttention, TensorRange, save_model
from lockstep.models.hf.folder import read_config
from lockstep.models.init import ARCHITECTURES, initialize

transformers = pytest.importorskip("transformers")

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN_ALONE = {"rope_type": "yarn", "factor": 4.0}
YARN = YARN_ALONE | {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with the named random model, as lockstep saves it."""

    def make(arch: str, **options: Any) -> Path:
        model = initialize(Decoder(ARCHITECTURES[arch], torch.float32), 0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        save_model(model, tmp_path / arch, **options)
        return tmp_path / arch

    return make


def without(*names: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in names}))

    return edit


SAME = {
    "a scaling is added": ("tiny", [edited(rope_scaling=LINEAR)]),
    "with its own base": ("tiny", [edited(rope_scaling=YARN | {"rope_theta": 500.0})]),
    "a base in the other entry is not taken": (
        "tiny",
        [edited(rope_scaling=LINEAR, rope_parameters={"rope_theta": 500.0}), without("rope_theta")],
    ),
    "an empty scaling": ("tiny-llama", [edited(rope_scaling={})]),
    "another scaling": ("tiny-llama", [edited(rope_scaling=YARN)]),
    "the context beside the scaling": (
        "tiny-llama",
        [edited(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 999}, original_max_position_embeddings=64)],
    ),
    "the context of a scaling that has none": ("tiny", [edited(rope_scaling=YARN_ALONE, max_position_embeddings=64)]),
    "and of another": ("tiny-llama", [edited(rope_scaling=LLAMA3, max_position_embeddings=64)]),
    "rotations of all layers where kinds have their own": (
        "tiny-gemma3",
        [without("rope_scaling"), edited(rope_theta=500.0, rope_parameters={"rope_theta": 500.0})],
    ),
    "and of a scaling for full layers": (
        "tiny-olmo3",
        [edited(rope_scaling=YARN_ALONE, max_position_embeddings=64), without("rope_parameters", "rope_theta")],
    ),
    "swish": ("tiny-llama", [edited(hidden_act="swish")]),
    "no routed_scaling_factor": ("tiny-deepseek-v3", [without("routed_scaling_factor")]),
    "no flags": ("tiny-deepseek-v3", [without("norm_topk_prob", "rope_interleave")]),
    "null norm_topk_prob": ("tiny-deepseek-v3", [edited(norm_topk_prob=None)]),
    "null rope_interleave": ("tiny-deepseek-v3", [edited(rope_interleave=None)]),
    "linear in deepseek": ("tiny-deepseek-v3", [edited(rope_scaling=LINEAR)]),
    "a head that is the embedding": ("tiny", [tensors(lambda t: t | {HEAD: t[EMBED].clone()})]),
    "frequencies": ("tiny", [tensors(lambda t: t | {"model.rotary_emb.inv_freq": torch.ones(16)})]),
}


@pytest.mark.parametrize("case", SAME)
def test_logits_are_those_of_transformers(case: str, folder_of: Callable[[str], Path]) -> None:
    arch, edits = SAME[case]
    folder = folder_of(arch)
    for edit in edits:
        edit(folder)
    tokens = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(0))
    ours = load_model(folder, torch.float32)
    try:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except AttributeError:  # its check of rotations, which others of its versions have otherwise
        pytest.skip(f"transformers {transformers.__version__} reads no such file")
    with torch.no_grad():
        expected, found = theirs(tokens[None]).logits[0], logits(ours, tokens)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() <= 1e-4


def logits(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    zero, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([0, len(tokens)], dtype=torch.int32)
    attend = PackedAttention(ops.Packed(ends, zero, zero, len(tokens)), model.masks)
    return model(tokens, torch.arange(len(tokens)), attend) @ model.lm_head.t()


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("tiny", {"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0; yarn scaling needs a number above 1"),
        ("tiny", {"rope_scaling": LINEAR | {"rope_theta": "x"}}, "rope_scaling: rope_theta is 'x'"),
        (
            "tiny",
            {"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}},
            "embeddings of the yarn rope scal",
        ),
        ("tiny", {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor of the yarn rope scaling is 0"),
        ("tiny", {"rope_scaling": {"full_attention": YARN}}, "rope_scaling has separate values for 'full_attention'"),
        ("tiny-llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1"),
        ("tiny-qwen3-moe", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ("tiny-deepseek-v3", {"partial_rotary_factor": 2}, "partial_rotary_factor is 2; supported: 1"),
        (
            "tiny-deepseek-v3",
            {"rope_scaling": LINEAR | {"mscale_all_dim": 1.0}},
            "mscale_all_dim is 1.0; it is supported with yarn only",
        ),
    ],
)
def test_a_configuration_of_another_model_is_refused(
    arch: str, changes: dict[str, Any], message: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of(arch)
    edited(**changes)(folder)
    with pytest.raises(InputError, match=re.escape(f"{folder / 'config.json'}: ") + ".*" + re.escape(message)):
        read_config(folder)


def test_a_configuration_in_code_is_refused_too() -> None:
    config = ARCHITECTURES["tiny-deepseek-v3"]
    with pytest.raises(InputError, match="rope_theta is 1.0; yarn scaling needs"):
        replace(config, rope_theta=1.0)


def test_a_partial_rotary_factor_of_one_is_let_pass(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("tiny")
    before = read_config(folder)
    edited(partial_rotary_factor=1.0)(folder)
    assert read_config(folder) == before


@pytest.mark.parametrize("name", ["lm_head.bias", "score.weight", "model.extra.weight"])
def test_a_tensor_without_a_place_is_refused_wherever_it_is(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("tiny")
    tensors(lambda t: t | {name: torch.ones(2)})(folder)
    with pytest.raises(InputError, match=rf"model\.safetensors: {name} has no place in the model"):
        load_model(folder, torch.float32)


def test_a_shard_of_nothing_but_unknown_tensors_is_read(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("tiny", max_shard_bytes=10**6)
    place(folder, "score.safetensors", {"score.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"score\.safetensors: score\.weight has no place"):
        load_model(folder, torch.float32)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("tiny")
    for change in (lambda e: e + 1e-3, lambda e: e[:9].clone()):
        tensors(lambda t, change=change: t | {HEAD: change(t[EMBED])})(folder)
        with pytest.raises(
            InputError, match=r"model\.safetensors: lm_head\.weight differs from the embedding, and tie_"
        ):
            load_model(folder, torch.float32)
    tensors(lambda t: t | {HEAD: t[EMBED] + 1})(folder)
    edited(tie_word_embeddings=False)(folder)
    assert torch.equal(load_model(folder, torch.float32).lm_head, load_file(folder / "model.safetensors")[HEAD])


def test_masters_are_read_from_a_folder_that_its_model_is_read_from(folder_of: Callable[[str], Path]) -> None:
    """The head has the embedding's bits in bfloat16, and not in float32, in which an optimizer has its masters."""
    folder = folder_of("tiny")
    tensors(lambda t: t | {HEAD: t[EMBED].bfloat16()})(folder)
    model = load_model(folder, torch.bfloat16)
    masters = {name: [TensorRange(torch.zeros(p.numel()), 0)] for name, p in model.named_parameters()}
    with pytest.raises(InputError, match=r"lm_head\.weight differs from the embedding"):
        FolderWeights(folder).fill(masters)
    FolderWeights(folder, torch.bfloat16).fill(masters)
    for name, parameter in model.named_parameters():
        assert torch.equal(masters[name][0].values.bfloat16(), parameter.flatten())


def place(folder: Path, file: str, more: dict[str, torch.Tensor]) -> None:
    """Put tensors in a shard of their own, which the index names."""
    save_file(more, folder / file)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"] |= dict.fromkeys(more, file)
    index.write_text(json.dumps(values))


def test_a_tensor_in_two_shards_is_refused_with_both_files(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("tiny", max_shard_bytes=10**6)
    first = folder / "model-00001-of-00004.safetensors"
    assert NORM not in load_file(first)
    save_file(load_file(first) | {NORM: torch.ones(128)}, first)
    with pytest.raises(InputError, match=rf"-00004-of-00004\.safetensors: {NORM} is in .*-00001-of-.*; remove one"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("own", ["a.safetensors", "z.safetensors"])
def test_experts_in_both_forms_are_refused_with_both_files(own: str, folder_of: Callable[..., Path]) -> None:
    folder = folder_of("tiny-qwen3-moe", max_shard_bytes=10**6)
    fused = "model.layers.1.mlp.experts.down_proj"
    place(folder, own, {fused: torch.ones(8, 128, 192)})
    with pytest.raises(InputError, match=r"are the same weights; keep one of the two forms") as refused:
        load_model(folder, torch.float32)
    assert own in str(refused.value) and fused in str(refused.value) and "experts.0.down_proj" in str(refused.value)
    assert re.search(r"model-0000\d-of-", str(refused.value))


def test_what_is_missing_is_told_by_the_index(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("tiny", max_shard_bytes=10**6)
    index = folder / "model.safetensors.index.json"
    last = folder / "model-00004-of-00004.safetensors"
    save_file({k: v for k, v in load_file(last).items() if k != NORM}, last)
    with pytest.raises(InputError, match=re.escape(f"{index}: 1 tensors are missing, first {NORM}")):
        load_model(folder, torch.float32)
