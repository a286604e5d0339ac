"""A run's model takes the place of the one before it when it is whole."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from lockstep.config import RunConfig
from lockstep.errors import LockstepError
from lockstep.models.hf.export import Export
from lockstep.session.build import load_policy, save_policy


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("ends", ["well", "with a full disk"])
def test_the_model_before_stays_until_the_new_one_is_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    policy, out = load_policy(RunConfig(model=str(model), device="cpu")), tmp_path / "model"
    save_policy(policy, out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    before, convert_layouts, seen = held(out), Export.convert_layouts, []

    def last(export: Export) -> None:
        convert_layouts(export)
        seen.append(held(out))
        if ends != "well":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Export, "convert_layouts", last)
    (out.parent / ".new-model").mkdir()  # of a process that was killed
    with torch.no_grad():
        policy.model.norm.add_(1)
    if ends == "well":
        save_policy(policy, out)
    else:
        with pytest.raises(OSError, match="No space"):
            save_policy(policy, out)
    assert seen == [before] and [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (held(out) != before) == (ends == "well") and held(out).keys() == before.keys()


def test_a_disk_that_is_full_leaves_no_model(model: Path, tmp_path: Path) -> None:
    policy, limit = load_policy(RunConfig(model=str(model), device="cpu")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        with pytest.raises(LockstepError, match=r"model\.safetensors: cannot be written .*File too large"):
            save_policy(policy, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_a_link_is_followed_and_what_cannot_be_replaced_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, out = load_policy(RunConfig(model=str(model), device="cpu")), tmp_path / "run" / "model"
    (tmp_path / "elsewhere").mkdir()
    out.parent.mkdir()
    out.symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        save_policy(policy, out)
        assert out.is_symlink() and (tmp_path / "elsewhere" / "config.json").exists()
    before, rename = held(out), Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.startswith(".new-"):
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(LockstepError, match=r"elsewhere: cannot be replaced .*; the model is in .*\.new-elsewhere"):
        save_policy(policy, out)
    assert held(out) == before and held(tmp_path / ".new-elsewhere").keys() == before.keys()


def test_what_a_folder_says_of_generation_comes_back(model: Path, tmp_path: Path) -> None:
    folder, out, name = tmp_path / "model", tmp_path / "out", "generation_config.json"
    shutil.copytree(model, folder)
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "pad_token_id": 257}
    (folder / name).write_text(json.dumps(values | {"eos_token_id": [258, 257]}))
    save_policy(load_policy(RunConfig(model=str(folder), device="cpu")), out)
    found = GenerationConfig.from_pretrained(out)
    assert {key: getattr(found, key) for key in values} == values and found.eos_token_id == [258, 257]
    (folder / name).unlink()
    save_policy(load_policy(RunConfig(model=str(folder), device="cpu")), out)
    assert json.loads((out / name).read_text()).keys() == {"eos_token_id", "pad_token_id"}
