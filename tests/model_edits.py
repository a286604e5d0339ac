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
