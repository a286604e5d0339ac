"""Changes to a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def edited(**changes: Any) -> Callable[[Path], None]:
    """Change fields of config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def written(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Replace a file, or remove it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_bytes(content) and None


def instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Put something else where a file is."""

    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return edit


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


NORM = "model.norm.weight"


def store_in_4_bits(folder: Path) -> int:
    """Replace the experts' matrices of a gpt-oss folder of one file by drawn MXFP4 weights, and return their bytes."""
    generator, path, packed = torch.Generator().manual_seed(0), folder / "model.safetensors", 0
    stored = load_file(path)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = stored.pop(name).shape
        shape = experts, outputs, inputs // 32
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(120, 128, shape, generator=generator, dtype=torch.uint8)
        packed += experts * outputs * inputs // 32 * 17
    save_file(stored, path)
    edited(quantization_config={"quant_method": "mxfp4"})(folder)
    return packed
